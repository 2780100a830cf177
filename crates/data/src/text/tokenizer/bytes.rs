//! The bytes of text that tokens stand for, which make losses of different tokenisers comparable.

use serde_json::Value;
use tokenizers::Tokenizer;

use super::byte_level::byte_of;

/// SentencePiece's letter for a space.
const SPACE: char = '▁';

/// The spelling of bytes in the pieces of a vocabulary.
enum Spelling {
    /// One letter per byte.
    Bytes,
    /// UTF-8, with a letter of its own for the space, and `<0x0A>` for bytes that no piece has.
    Pieces,
}

/// The number of bytes of every token, 0 for special ones. `None` where pieces do not determine their bytes, as words whose
/// white space is not kept.
pub(super) fn byte_lengths(tokenizer: &Tokenizer) -> Option<Vec<u32>> {
    let spelling = spelling(&serde_json::to_value(tokenizer.get_decoder()?).ok()?)?;
    let of_piece = |piece: &str| match spelling {
        Spelling::Bytes => piece.chars().count(),
        Spelling::Pieces if is_byte(piece) => 1,
        Spelling::Pieces => piece.chars().map(|c| if c == SPACE { 1 } else { c.len_utf8() }).sum(),
    };
    let vocabulary = tokenizer.get_vocab(false);
    let added = tokenizer.get_added_tokens_decoder();
    let last = vocabulary.values().chain(added.keys()).max()?;
    let mut lengths = vec![0; *last as usize + 1];
    for (piece, token) in &vocabulary {
        lengths[*token as usize] = of_piece(piece) as u32;
    }
    for (token, added) in &added {
        lengths[*token as usize] = if added.special { 0 } else { added.content.len() as u32 };
    }
    Some(lengths)
}

/// The bytes that every token stands for. Special tokens and words stand for their own spelling.
pub(super) fn pieces(tokenizer: &Tokenizer) -> Vec<Vec<u8>> {
    let decoder = tokenizer.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok());
    let spelling = decoder.as_ref().and_then(spelling);
    let of_piece = |piece: &str| match spelling {
        Some(Spelling::Bytes) => {
            let bytes: Option<Vec<u8>> = piece.chars().map(byte_of).collect();
            bytes.unwrap_or_else(|| piece.into())
        }
        Some(Spelling::Pieces) => match byte(piece) {
            Some(byte) => vec![byte],
            None => piece.replace(SPACE, " ").into(),
        },
        None => piece.into(),
    };
    let vocabulary = tokenizer.get_vocab(false);
    let added = tokenizer.get_added_tokens_decoder();
    let last = vocabulary.values().chain(added.keys()).max().map_or(0, |last| *last as usize + 1);
    let mut pieces = vec![vec![]; last];
    for (piece, token) in &vocabulary {
        pieces[*token as usize] = of_piece(piece);
    }
    for (token, added) in &added {
        pieces[*token as usize] = added.content.clone().into();
    }
    pieces
}

fn is_byte(piece: &str) -> bool {
    byte(piece).is_some()
}

/// The byte of a piece such as `<0x0A>`.
fn byte(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2)
}

/// Derives the spelling from the parts of the decoder, which turns pieces into text.
fn spelling(decoder: &Value) -> Option<Spelling> {
    let parts = match decoder["decoders"].as_array() {
        Some(parts) => parts.as_slice(),
        None => std::slice::from_ref(decoder),
    };
    let has = |kind: &str| parts.iter().any(|part| part["type"] == kind);
    let replaces_spaces = || parts.iter().any(|part| part["pattern"]["String"] == SPACE.to_string());
    if has("ByteLevel") {
        Some(Spelling::Bytes)
    } else {
        (has("Metaspace") || replaces_spaces()).then_some(Spelling::Pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Vocabulary;

    fn piece_tokenizer() -> Tokenizer {
        let vocab = r#"{"<unk>": 0, "▁": 1, "▁a": 2, "é": 3, "<0x0A>": 4, "b": 5, "▁▁": 6}"#;
        let json = format!(
            r#"{{"version": "1.0", "added_tokens": [{{"id": 0, "content": "<unk>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true}}, {{"id": 7, "content": "<x>", "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false, "special": false}}],
                "decoder": {{"type": "Sequence", "decoders": [{{"type": "Replace", "pattern": {{"String": "▁"}}, "content": " "}},
                {{"type": "ByteFallback"}}, {{"type": "Fuse"}}]}},
                "model": {{"type": "BPE", "vocab": {vocab}, "merges": []}}}}"#
        );
        Tokenizer::from_bytes(json).expect("a tokeniser")
    }

    #[test]
    fn tokens_have_as_many_bytes_as_their_text() {
        let text = "Größe: 12 µm,\n\tπ ≈ 3.14159 and so on, and so on.";
        let vocabulary = Vocabulary::train([text, text].into_iter(), 300).unwrap();
        let lengths = vocabulary.byte_lengths().expect("byte-level pieces");
        let of = |token: &u32| lengths[*token as usize] as usize;
        assert_eq!(vocabulary.encode(text).unwrap().iter().map(of).sum::<usize>(), text.len());
        assert_eq!([vocabulary.bos(), vocabulary.eos()].map(|token| of(&token)), [0, 0]);
        assert_eq!(byte_lengths(&piece_tokenizer()).unwrap(), [0, 1, 2, 2, 1, 1, 2, 3]);
    }

    #[test]
    fn the_bytes_of_tokens_make_the_text() {
        let text = "Größe: 12 µm,\n\tπ ≈ 3.14159 🦊 and so on, and so on.";
        let vocabulary = Vocabulary::train([text, text].into_iter(), 300).unwrap();
        let pieces = vocabulary.pieces();
        let tokens = vocabulary.encode(text).unwrap();
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| pieces[*token as usize].clone()).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
        assert_eq!(pieces[vocabulary.eos() as usize], b"<eos>");
        let named = super::pieces(&piece_tokenizer());
        assert_eq!(
            named[1..],
            [&b" "[..], b" a", "é".as_bytes(), b"\n", b"b", b"  ", b"<x>"].map(<[u8]>::to_vec)
        );
    }

    #[test]
    fn words_do_not_say_their_bytes() {
        assert!(
            Vocabulary::from_words(&["<bos>".into(), "<eos>".into(), "a".into()]).byte_lengths().is_none()
        );
    }
}
