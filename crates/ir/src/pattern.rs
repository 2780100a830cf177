//! Path patterns of users: `*` stands for any run of characters, and a pattern without `*` also names a whole scope.

/// Whether `path` is named by `pattern`: `layers.0.*`, `*.wq`, or the scope `layers.0`.
pub fn matches(pattern: &str, path: &str) -> bool {
    if !pattern.contains('*') {
        return path == pattern || path.strip_prefix(pattern).is_some_and(|rest| rest.starts_with('.'));
    }
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or("");
    let Some(mut rest) = path.strip_prefix(first) else { return false };
    let pieces: Vec<&str> = pieces.collect();
    let (last, middle) = pieces.split_last().expect("a pattern with a star has a piece after it");
    for piece in middle {
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_and_scopes() {
        for (pattern, path, expected) in [
            ("*", "layers.0.wq", true),
            ("layers.0", "layers.0.wq", true),
            ("layers.0", "layers.01.wq", false),
            ("layers.*.wq", "layers.3.attn.wq", true),
            ("layers.*.wq", "layers.3.attn.wk", false),
            ("*.norm*", "layers.3.norm1.weight", true),
            ("embed", "embed", true),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} on {path}");
        }
    }
}
