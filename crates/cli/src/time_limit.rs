//! Durations as people type them: `3h50m`, `90s`, `1d12h`.

use std::time::Duration;

/// Units from the largest to the smallest, in seconds.
const UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3_600), ('m', 60), ('s', 1)];

/// Parses whole numbers, each with its unit, larger units first and each at most once.
pub fn parse(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a duration: give whole numbers with units, as in 3h50m or 90s");
    let (mut seconds, mut rest, mut units) = (0u64, text, &UNITS[..]);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let number: u64 = rest[..digits].parse().map_err(|_| wrong())?;
        let unit = rest[digits..].chars().next().ok_or_else(wrong)?;
        let at = units.iter().position(|(name, _)| *name == unit).ok_or_else(wrong)?;
        let part = number.checked_mul(units[at].1).ok_or_else(wrong)?;
        seconds = seconds.checked_add(part).ok_or_else(wrong)?;
        units = &units[at + 1..];
        rest = &rest[digits + 1..];
    }
    if seconds == 0 {
        return Err(format!("`{text}` is no time at all: give a duration above zero"));
    }
    Ok(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed() {
        for (text, seconds) in [
            ("90s", 90),
            ("3h50m", 13_800),
            ("2d", 172_800),
            ("1d12h", 129_600),
            ("1h1m1s", 3661),
            ("0h5m", 300),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused_with_a_sentence() {
        for text in [
            "",
            "0s",
            "90",
            "h",
            "3h50",
            "50m3h",
            "3h4h",
            "1.5h",
            "-3s",
            "3 h",
            "3w",
            "99999999999999999999s",
            "3\u{e9}",
        ] {
            let sentence = parse(text).unwrap_err();
            assert!(sentence.starts_with(&format!("`{text}`")), "{sentence}");
        }
        assert!(parse("400000000000000d").is_err(), "more seconds than fit in a u64");
    }
}
