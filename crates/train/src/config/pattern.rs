//! Matching of parameter paths against patterns, as in `train.freeze`, groups and adapters.

/// Whether the pattern matches the path or a prefix of it. The parts between stars are matched in order, each as early as possible, so
/// the time is at most the product of both lengths.
pub fn matches(pattern: &str, path: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('.').collect();
    let path: Vec<&str> = path.split('.').collect();
    let mut parts = pattern.split(|name| *name == "**");
    let fits = |part: &[&str], at: usize| {
        path[at..].len() >= part.len()
            && part.iter().zip(&path[at..]).all(|(name, of)| name_matches(name, of))
    };
    let first = parts.next().unwrap_or_default();
    let mut at = first.len();
    fits(first, 0)
        && parts.all(|part| {
            let found = (at..=path.len()).find(|at| fits(part, *at));
            at = found.unwrap_or(at) + part.len();
            found.is_some()
        })
}

fn name_matches(pattern: &str, name: &str) -> bool {
    let Some((before, rest)) = pattern.split_once('*') else { return pattern == name };
    let (between, after) = rest.rsplit_once('*').unwrap_or(("", rest));
    let inner = name.strip_prefix(before).and_then(|name| name.strip_suffix(after));
    let Some(mut left) = inner else { return false };
    between.split('*').all(|part| {
        let found = left.find(part);
        left = found.map_or(left, |at| &left[at + part.len()..]);
        found.is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_names_scopes_and_wildcards() {
        let path = "layers.3.attn.q_norm";
        for pattern in [
            "layers",
            "layers.3",
            "layers.*.attn",
            "**.q_norm",
            "**.*_norm",
            path,
            "*",
            "**",
            "layers.**.q*m",
        ] {
            assert!(matches(pattern, path), "{pattern}");
        }
        for pattern in ["layer", "layers.30", "layers.3.attn.q", "attn", "**.q", "layers.*.q_norm", ""] {
            assert!(!matches(pattern, path), "{pattern}");
        }
        assert!(matches("é*", "éa"));
        assert!(matches("*a*a", "aa") && !matches("*a*a", "a") && !matches("a*a", "a"));
        assert!(matches("**.a.**.a.b", "a.a.c.a.b") && !matches("**.a.**.a.b", "a.b.c"));
    }

    #[test]
    fn many_stars_do_not_take_exponential_time() {
        let began = std::time::Instant::now();
        let (name, path) = ("a".repeat(60), vec!["a"; 60].join("."));
        assert!(!matches(&format!("{}b", "*a".repeat(40)), &name));
        assert!(!matches(&format!("{}b", "**.a.".repeat(30)), &path));
        assert!(!matches(&format!("{}b", "**.".repeat(2000)), &path));
        assert!(matches(&format!("{}*", "*a".repeat(60)), &name));
        assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
    }
}
