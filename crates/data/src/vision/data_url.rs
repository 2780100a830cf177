//! Data URLs of images (`data:image/png;base64,...`), in rows of data and in requests to a server.

use crate::formats::Reason;
use crate::images::Flaw;

/// The prefix of data URLs.
const SCHEME: &str = "data:";

/// Whether a text is a data URL, whatever its content.
pub fn is_data_url(text: &str) -> bool {
    text.get(..SCHEME.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(SCHEME))
}

/// The bytes of a data URL, at most `most` of them.
pub fn decode_data_url(text: &str, most: usize) -> Result<Vec<u8>, Flaw> {
    let broken =
        |sentence: &str| Flaw::new(Reason::BrokenImage, format!("the data URL of an image {sentence}"));
    let (head, body) = text[SCHEME.len()..].split_once(',').ok_or_else(|| broken("has no comma"))?;
    if !head.rsplit(';').next().is_some_and(|last| last.trim().eq_ignore_ascii_case("base64")) {
        return Err(broken("is not written in base64"));
    }
    if body.len() / 4 * 3 > most.saturating_add(3) {
        return Err(Flaw::new(
            Reason::LargeImage,
            format!("the data URL of an image has {} characters, and {most} bytes are the most", body.len()),
        ));
    }
    base64(body.as_bytes()).ok_or_else(|| broken("has a character that base64 does not, or ends early"))
}

/// Decodes base64; `None` where it is invalid. Accepts both alphabets, line breaks and missing padding. Unused bits at the end
/// must be 0, as encoders write them: other values mean that the text is truncated, which an image decoder might not notice.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 3);
    let (mut held, mut digits, mut filled) = (0u32, 0, 0);
    for character in text.iter().filter(|character| !character.is_ascii_whitespace()) {
        if *character == b'=' {
            filled += 1;
            continue;
        }
        if filled > 0 {
            return None;
        }
        held = held << 6 | u32::from(digit(*character)?);
        digits += 1;
        if digits == 4 {
            bytes.extend(&held.to_be_bytes()[1..]);
            (held, digits) = (0, 0);
        }
    }
    // Two digits give one byte, three give two; the remaining bits of the last digit must be 0.
    let (count, rest) = match digits {
        0 => (0, 0),
        2 => (1, held & 0xf),
        3 => (2, held & 0x3),
        _ => return None,
    };
    if rest != 0 || filled != 0 && (digits == 0 || filled + digits != 4) {
        return None;
    }
    let last = held << (6 * (4 - digits).min(3));
    bytes.extend(&last.to_be_bytes()[1..1 + count]);
    Some(bytes)
}

fn digit(character: u8) -> Option<u8> {
    match character {
        b'A'..=b'Z' => Some(character - b'A'),
        b'a'..=b'z' => Some(character - b'a' + 26),
        b'0'..=b'9' => Some(character - b'0' + 52),
        b'+' | b'-' => Some(62),
        b'/' | b'_' => Some(63),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read_with_and_without_its_end() {
        // The vectors of RFC 4648.
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(text.as_bytes()).as_deref(), Some(bytes.as_bytes()), "{text}");
            assert_eq!(base64(text.trim_end_matches('=').as_bytes()).as_deref(), Some(bytes.as_bytes()));
        }
        assert_eq!(base64(b"+/\n-_ ").unwrap(), [0xfb, 0xff, 0xbf]);
        for broken in ["A", "Zg=", "Zh==", "Z!==", "Zg==Zg==", "Zm9vYm=", "===="] {
            assert_eq!(base64(broken.as_bytes()), None, "{broken}");
        }
    }

    #[test]
    fn faults_of_data_urls_are_named() {
        let decoded = |text: &str| decode_data_url(text, 6).map_err(|flaw| flaw.said);
        assert!(is_data_url("DATA:image/png;base64,Zm8=") && !is_data_url("datum.png") && !is_data_url("ü"));
        assert_eq!(decoded("data:image/png;base64,Zm8=").unwrap(), b"fo");
        assert_eq!(decoded("data:image/png;name=a;BASE64,Zm8").unwrap(), b"fo");
        for (text, why) in [
            ("data:image/png;base64", "no comma"),
            ("data:image/png,abc", "not written in base64"),
            ("data:image/png;base64,Zm?=", "a character that base64 does not"),
            ("data:image/png;base64,Zm9vYmFyZm9vYmFy", "6 bytes are the most"),
        ] {
            assert!(decoded(text).unwrap_err().contains(why), "{text}: {:?}", decoded(text));
        }
    }
}
