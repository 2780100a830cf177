//! The commonest tokeniser, faster: byte-level BPE over words as GPT-2 cuts them.
//!
//! A text is cut into words by a scanner instead of a regular expression, and the tokens of a word are remembered. Words
//! that are not remembered go to the library, so the tokens are the library's.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, LazyLock, Mutex};

use tokenizers::models::bpe::BPE;
use tokenizers::{Model, ModelWrapper, PreTokenizerWrapper, Tokenizer};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::characters::Ranges;

/// Words beyond this many are not remembered, nor are longer ones than this: texts have few of them twice.
const MOST_WORDS: usize = 1 << 17;
const LONGEST_WORD: usize = 48;

/// Encodes as a tokeniser does that is nothing but byte-level BPE.
#[derive(Clone)]
pub(crate) struct ByteLevelEncoder {
    model: Arc<BPE>,
    /// Memories that no thread uses at the moment.
    memories: Arc<Mutex<Vec<Memory>>>,
}

impl std::fmt::Debug for ByteLevelEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ByteLevelEncoder")
    }
}

impl ByteLevelEncoder {
    /// `None` for a tokeniser that does anything else than cut words as GPT-2 does and merge their bytes.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        let Some(PreTokenizerWrapper::ByteLevel(cuts)) = tokenizer.get_pre_tokenizer() else { return None };
        let plain = tokenizer.get_normalizer().is_none()
            && !cuts.add_prefix_space
            && cuts.use_regex
            && tokenizer.get_added_tokens_decoder().values().all(|token| token.special)
            && model.dropout.is_none_or(|dropout| dropout == 0.0);
        plain.then(|| Self { model: Arc::new(model.clone()), memories: Arc::default() })
    }

    /// The tokens of a text, or what the library says is wrong.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let free = self.memories.lock().expect("nobody panics while holding a memory's lock").pop();
        let mut memory = free.unwrap_or_default();
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut rest = text;
        while !rest.is_empty() {
            let (word, tail) = rest.split_at(word_bytes(rest));
            rest = tail;
            match memory.words.get(word.as_bytes()) {
                Some((start, len)) => {
                    tokens.extend_from_slice(&memory.tokens[*start as usize..(*start + *len) as usize]);
                }
                None => {
                    let before = tokens.len();
                    let spelled: String = word.bytes().map(|byte| SPELLED[usize::from(byte)]).collect();
                    let merged = self.model.tokenize(&spelled).map_err(|error| error.to_string())?;
                    tokens.extend(merged.iter().map(|token| token.id));
                    memory.keep(word, &tokens[before..]);
                }
            }
        }
        self.memories.lock().expect("nobody panics while holding a memory's lock").push(memory);
        Ok(tokens)
    }
}

/// Words and their tokens, one after another in `tokens`.
#[derive(Default)]
struct Memory {
    words: HashMap<Box<[u8]>, (u32, u32), BuildHasherDefault<WordHasher>>,
    tokens: Vec<u32>,
}

impl Memory {
    fn keep(&mut self, word: &str, tokens: &[u32]) {
        if word.len() <= LONGEST_WORD && self.words.len() < MOST_WORDS {
            let place = (self.tokens.len() as u32, tokens.len() as u32);
            self.tokens.extend_from_slice(tokens);
            self.words.insert(word.as_bytes().into(), place);
        }
    }
}

/// Words are short, and nobody chooses them to collide at our cost but whoever gives the text.
#[derive(Default)]
struct WordHasher(u64);

impl Hasher for WordHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn write_usize(&mut self, number: usize) {
        self.0 ^= number as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// How byte-level vocabularies spell each byte: printable ones as themselves, the others from U+0100 on.
static SPELLED: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
            return char::from(byte as u8);
        }
        next += 1;
        char::from_u32(next - 1).expect("a letter beyond Latin-1")
    })
});

/// The byte that a letter of a byte-level vocabulary spells.
pub(super) fn byte_of(letter: char) -> Option<u8> {
    SPELLED.iter().position(|spelled| *spelled == letter).map(|byte| byte as u8)
}

/// The classes of characters that the expression tells apart.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CharacterClass {
    Letter,
    Number,
    Space,
    Other,
}

static LETTERS: LazyLock<Ranges> = LazyLock::new(|| Ranges::of(r"\p{L}"));
static NUMBERS: LazyLock<Ranges> = LazyLock::new(|| Ranges::of(r"\p{N}"));
static SPACES: LazyLock<Ranges> = LazyLock::new(|| Ranges::of(r"\s"));

fn kind(character: char) -> CharacterClass {
    match character {
        'a'..='z' | 'A'..='Z' => CharacterClass::Letter,
        '0'..='9' => CharacterClass::Number,
        ' ' | '\t'..='\r' => CharacterClass::Space,
        '\0'..='\x7f' => CharacterClass::Other,
        other if LETTERS.contains(other) => CharacterClass::Letter,
        other if NUMBERS.contains(other) => CharacterClass::Number,
        other if SPACES.contains(other) => CharacterClass::Space,
        _ => CharacterClass::Other,
    }
}

/// Bytes at the beginning of `text` that are all of a kind.
fn run(text: &str, wanted: CharacterClass) -> usize {
    text.char_indices().find(|(_, character)| kind(*character) != wanted).map_or(text.len(), |(at, _)| at)
}

/// The length of the first word of a text that is not empty, as this expression cuts it:
/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
fn word_bytes(text: &str) -> usize {
    let bytes = text.as_bytes();
    if bytes[0] == b'\'' {
        match bytes[1..] {
            [b's' | b't' | b'm' | b'd', ..] => return 2,
            [b'r' | b'v', b'e', ..] | [b'l', b'l', ..] => return 3,
            _ => {}
        }
    }
    let space = usize::from(bytes[0] == b' ');
    if let Some(first) = text[space..].chars().next() {
        let kind = kind(first);
        if kind != CharacterClass::Space {
            return space + run(&text[space..], kind);
        }
    }
    let spaces = run(text, CharacterClass::Space);
    if spaces == text.len() {
        return spaces;
    }
    // The last of several goes with the word that follows, or stands alone.
    let last = text[..spaces].chars().next_back().map_or(0, char::len_utf8);
    if spaces > last { spaces - last } else { spaces }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::mix;
    use crate::text::tokenizer::Vocabulary;

    /// Characters for every alternative of the expression, and characters at the edges of the tables.
    const PIECES: [&str; 40] = [
        " ", "  ", "\n", "\t", "\r\n", "\u{a0}", "\u{3000}", "\u{85}", "\u{200b}", "'", "'s", "'t", "'re",
        "'ve", "'ll", "'d", "'m", "'S", "a", "word", "Zürich", "東京", "ß", "é", "e\u{301}", "7", "2024",
        "½", "Ⅷ", "٣", ".", "...", "-", "—", "🦊", "\u{0}", "_", "ª", "\u{16ee}", "<eos>",
    ];

    #[test]
    fn tokens_are_those_of_the_library() {
        let texts = [
            "the word and the words",
            " it's 2024, isn't it? they'll",
            "東京 Zürich ... — 🦊\n\n  and\ttabs",
        ];
        let vocabulary = Vocabulary::train(texts.into_iter(), 400).unwrap();
        let fast = ByteLevelEncoder::of(vocabulary.library()).expect("a plain tokeniser");
        for number in 0..4000u64 {
            let pieces = 1 + mix(number) % 9;
            let text: String = (0..pieces)
                .map(|at| PIECES[(mix(number * 100 + at) % PIECES.len() as u64) as usize])
                .collect();
            let wanted = vocabulary.library().encode_fast(text.as_str(), false).unwrap();
            assert_eq!(fast.encode(&text).unwrap(), wanted.get_ids(), "{text:?}");
        }
    }

    #[test]
    fn every_character_is_of_the_same_kind_as_in_the_expression() {
        let texts = ["a"];
        let vocabulary = Vocabulary::train(texts.into_iter(), 258).unwrap();
        let fast = ByteLevelEncoder::of(vocabulary.library()).expect("a plain tokeniser");
        // Between two letters a character is cut off, joined, or stands alone, by its kind: without merges only cutting
        // differs, which the library's own offsets show.
        for character in ('\0'..'\u{3000}').chain('\u{a000}'..'\u{a900}').step_by(7) {
            let text = format!("a{character}1{character} {character}");
            let encoding = vocabulary.library().encode(text.as_str(), false).unwrap();
            assert_eq!(fast.encode(&text).unwrap(), encoding.get_ids(), "{character:?}");
            let mut words = vec![];
            let mut rest = text.as_str();
            while !rest.is_empty() {
                let (word, tail) = rest.split_at(word_bytes(rest));
                words.push(word);
                rest = tail;
            }
            let mut wanted: Vec<Option<u32>> = encoding.get_word_ids().to_vec();
            wanted.dedup();
            assert_eq!(words.len(), wanted.len(), "{character:?} in {words:?}");
        }
    }

    #[test]
    fn other_tokenisers_are_left_to_the_library() {
        let words = ["<bos>", "<eos>", "the"].map(String::from);
        assert!(ByteLevelEncoder::of(Vocabulary::from_words(&words).library()).is_none());
    }
}
