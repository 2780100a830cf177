//! Patterns of parameter paths, as `train.freeze`, groups and adapters write them.

/// Whether the pattern names the path or something above it.
pub fn matches(pattern: &str, path: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('.').collect();
    let path: Vec<&str> = path.split('.').collect();
    names_match(&pattern, &path)
}

fn names_match(pattern: &[&str], path: &[&str]) -> bool {
    match (pattern, path) {
        ([], _) => true,
        (["**", rest @ ..], _) => (0..=path.len()).any(|skipped| names_match(rest, &path[skipped..])),
        ([first, rest @ ..], [name, below @ ..]) => name_matches(first, name) && names_match(rest, below),
        (_, []) => false,
    }
}

fn name_matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(before) else { return false };
    rest.char_indices().map(|(at, _)| at).chain([rest.len()]).any(|at| name_matches(after, &rest[at..]))
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
    }
}
