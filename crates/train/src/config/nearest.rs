//! Suggestions for misspelt names.

/// The candidate with the smallest edit distance from `name`, if that is small enough for a typing error: at most two, or a third of the
/// name.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let bound = (name.chars().count() / 3).max(2);
    candidates
        .into_iter()
        .map(|candidate| (distance(name, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= bound && *distance < candidate.chars().count())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// The end of a sentence about a name that is not among `names`: it suggests the names that begin with it, else the nearest one.
pub fn suggestion(name: &str, names: &[&str]) -> Option<String> {
    let longer: Vec<&str> =
        names.iter().copied().filter(|known| name.len() > 1 && known.starts_with(name)).collect();
    let meant =
        if longer.is_empty() { nearest(name, names.iter().copied()).into_iter().collect() } else { longer };
    let meant: Vec<String> = meant.iter().map(|name| format!("`{name}`")).collect();
    (!meant.is_empty()).then(|| format!("did you mean {}?", meant.join(" or ")))
}

/// The number of insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before_last = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let substituted = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = substituted.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before_last[j - 2] + 1);
            }
        }
        (before_last, last) = (last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_typing_errors() {
        assert_eq!(distance("width", "width"), 0);
        assert_eq!(distance("widht", "width"), 1, "a swap is one slip");
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
    }

    #[test]
    fn only_typing_errors_are_corrected() {
        let names = ["optimizer.lr", "train.steps", "lr"];
        assert_eq!(nearest("optimiser.lr", names), Some("optimizer.lr"));
        assert_eq!(nearest("train.step", names), Some("train.steps"));
        assert_eq!(nearest("zebra", names), None);
        assert_eq!(nearest("xy", names), None, "two slips in a name of two letters are another name");
    }

    #[test]
    fn a_prefix_suggests_all_names_that_begin_with_it() {
        let names = ["a100-40", "a100-80", "h100"];
        assert_eq!(suggestion("a100", &names).unwrap(), "did you mean `a100-40` or `a100-80`?");
        assert_eq!(suggestion("h10", &names).unwrap(), "did you mean `h100`?");
        assert_eq!(suggestion("a100-90", &names).unwrap(), "did you mean `a100-40`?");
        assert_eq!(suggestion("zebra", &names), None);
        assert_eq!(suggestion("", &names), None);
    }
}
