//! SLURM's host lists: `gpu-[01-03,7],login,rack[1-2]n[0-1]`.

/// Maximum number of hosts: a list is expanded in memory, which a damaged one must not fill.
const MOST_HOSTS: usize = 1 << 16;
/// Maximum length of a host's name, as in DNS.
const MOST_LETTERS: usize = 253;

/// Every host of a list, in order. The error is a sentence.
pub fn expand(list: &str) -> Result<Vec<String>, String> {
    let mut hosts = vec![];
    for word in split(list)? {
        hosts.extend(one(word).map_err(|why| format!("`{list}` is no list of hosts: {why}"))?);
        if hosts.len() > MOST_HOSTS {
            return Err(format!("`{list}` names more than {MOST_HOSTS} hosts"));
        }
    }
    Ok(hosts)
}

/// The words between commas outside brackets.
fn split(list: &str) -> Result<Vec<&str>, String> {
    let (mut words, mut begin, mut is_inside) = (vec![], 0, false);
    for (at, letter) in list.char_indices() {
        match letter {
            '[' if !is_inside => is_inside = true,
            ']' if is_inside => is_inside = false,
            '[' | ']' => return Err(format!("`{list}` is no list of hosts: its brackets do not match")),
            ',' if !is_inside => {
                words.push(&list[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    words.push(&list[begin..]);
    if is_inside {
        return Err(format!("`{list}` is no list of hosts: its brackets do not match"));
    }
    if words.iter().any(|word| word.trim().is_empty()) {
        return Err(format!("`{list}` is no list of hosts: a name is empty"));
    }
    Ok(words.into_iter().map(str::trim).collect())
}

/// Expands a name with any number of brackets; the last one varies fastest.
fn one(word: &str) -> Result<Vec<String>, String> {
    let mut names = vec![String::new()];
    let mut rest = word;
    while let Some((before, behind)) = rest.split_once('[') {
        let (inside, after) = behind.split_once(']').ok_or("a bracket does not close")?;
        let numbers = numbers(inside)?;
        let longest = |words: &[String]| words.iter().map(String::len).max().unwrap_or(0);
        if longest(&names) + before.len() + longest(&numbers) > MOST_LETTERS {
            return Err(format!("a name has more than {MOST_LETTERS} letters"));
        }
        if names.len().saturating_mul(numbers.len()) > MOST_HOSTS {
            return Err(format!("it names more than {MOST_HOSTS} hosts"));
        }
        let long =
            |name: &String| -> Vec<String> { numbers.iter().map(|n| format!("{name}{before}{n}")).collect() };
        names = names.iter().flat_map(long).collect();
        rest = after;
    }
    if names.iter().any(|name| name.len() + rest.len() > MOST_LETTERS) {
        return Err(format!("a name has more than {MOST_LETTERS} letters"));
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    Ok(names)
}

/// Expands `01-03,7` to 01, 02, 03, 7; the numbers of a range have the width of its first number.
fn numbers(inside: &str) -> Result<Vec<String>, String> {
    let mut all = vec![];
    for range in inside.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |digits: &str| {
            let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| digits.parse::<u64>().ok()).flatten().ok_or(format!("`{digits}` is no number"))
        };
        let (from, to) = (number(first)?, number(last)?);
        if from > to {
            return Err(format!("`{range}` runs backwards"));
        }
        if to - from >= (MOST_HOSTS - all.len()) as u64 {
            return Err(format!("it names more than {MOST_HOSTS} hosts"));
        }
        let width = first.len();
        if width > MOST_LETTERS {
            return Err(format!("a name has more than {MOST_LETTERS} letters"));
        }
        all.extend((from..=to).map(|n| format!("{n:0width$}")));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_bracket() {
        for (list, hosts) in [
            ("gpu1", "gpu1"),
            ("gpu1,gpu2.site.org", "gpu1 gpu2.site.org"),
            ("gpu-[1-3]", "gpu-1 gpu-2 gpu-3"),
            ("gpu-[01-03,7]", "gpu-01 gpu-02 gpu-03 gpu-7"),
            ("gpu-[08-11]", "gpu-08 gpu-09 gpu-10 gpu-11"),
            ("a[1-2],b,c[3]", "a1 a2 b c3"),
            ("rack[1-2]n[0-1]", "rack1n0 rack1n1 rack2n0 rack2n1"),
            ("n[1,3]-ib", "n1-ib n3-ib"),
            ("tux[9-10]", "tux9 tux10"),
            ("a, b", "a b"),
        ] {
            assert_eq!(expand(list).unwrap().join(" "), hosts, "{list}");
        }
    }

    #[test]
    fn damaged_lists_are_refused_with_a_sentence() {
        for (list, why) in [
            ("", "a name is empty"),
            ("a,,b", "a name is empty"),
            ("gpu[1-3", "brackets do not match"),
            ("gpu1-3]", "brackets do not match"),
            ("gpu[[1]]", "brackets do not match"),
            ("gpu[]", "`` is no number"),
            ("gpu[a-b]", "`a` is no number"),
            ("gpu[3-1]", "`3-1` runs backwards"),
            ("gpu[1-99999999]", "more than 65536 hosts"),
            ("a[0-999]b[0-999]", "more than 65536 hosts"),
            ("a[0-65535,0-1]", "more than 65536 hosts"),
            (&format!("{}[1-9]", "n".repeat(253)), "more than 253 letters"),
            (&format!("a[{}1]", "0".repeat(300)), "more than 253 letters"),
            (&"n".repeat(254), "more than 253 letters"),
        ] {
            let told = expand(list).unwrap_err();
            assert!(told.contains(why) && told.contains(list), "{list}: {told}");
        }
    }
}
