//! A fast path for the most common tokeniser: byte-level BPE over words as GPT-2 splits them.
//!
//! A scanner splits the text into words in place of a regular expression, and the tokens of a word are cached. Words that are
//! not cached are encoded by the library, so the tokens are the same.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, LazyLock, Mutex};

use tokenizers::models::bpe::BPE;
use tokenizers::{Model, ModelWrapper, PreTokenizerWrapper, Tokenizer};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::characters::Ranges;

/// Most words in a cache, and the longest cached word: longer ones rarely repeat.
const MOST_WORDS: usize = 1 << 17;
const LONGEST_WORD: usize = 48;

/// Encodes as a tokeniser that is plain byte-level BPE.
#[derive(Clone)]
pub(crate) struct ByteLevelEncoder {
    model: Arc<BPE>,
    /// Caches that no thread uses at the moment.
    caches: Arc<Mutex<Vec<WordCache>>>,
}

impl std::fmt::Debug for ByteLevelEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ByteLevelEncoder")
    }
}

impl ByteLevelEncoder {
    /// `None` for a tokeniser that does anything but split words as GPT-2 does and merge their bytes.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        let Some(PreTokenizerWrapper::ByteLevel(cuts)) = tokenizer.get_pre_tokenizer() else { return None };
        let plain = tokenizer.get_normalizer().is_none()
            && !cuts.add_prefix_space
            && cuts.use_regex
            && tokenizer.get_added_tokens_decoder().values().all(|token| token.special)
            && model.dropout.is_none_or(|dropout| dropout == 0.0);
        plain.then(|| Self { model: Arc::new(model.clone()), caches: Arc::default() })
    }

    /// The tokens of a text, or the library's error.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let free = self.caches.lock().expect("nobody panics while holding a cache's lock").pop();
        let mut cache = free.unwrap_or_default();
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut rest = text;
        while !rest.is_empty() {
            let (word, tail) = rest.split_at(word_bytes(rest));
            rest = tail;
            match cache.words.get(word.as_bytes()) {
                Some((start, len)) => {
                    tokens.extend_from_slice(&cache.tokens[*start as usize..(*start + *len) as usize]);
                }
                None => {
                    let before = tokens.len();
                    let spelled: String = word.bytes().map(|byte| SPELLED[usize::from(byte)]).collect();
                    let merged = self.model.tokenize(&spelled).map_err(|error| error.to_string())?;
                    tokens.extend(merged.iter().map(|token| token.id));
                    cache.insert(word, &tokens[before..]);
                }
            }
        }
        self.caches.lock().expect("nobody panics while holding a cache's lock").push(cache);
        Ok(tokens)
    }
}

/// Cached words, with their tokens concatenated in `tokens`.
#[derive(Default)]
struct WordCache {
    words: HashMap<Box<[u8]>, (u32, u32), BuildHasherDefault<WordHasher>>,
    tokens: Vec<u32>,
}

impl WordCache {
    fn insert(&mut self, word: &str, tokens: &[u32]) {
        if word.len() <= LONGEST_WORD && self.words.len() < MOST_WORDS {
            let place = (self.tokens.len() as u32, tokens.len() as u32);
            self.tokens.extend_from_slice(tokens);
            self.words.insert(word.as_bytes().into(), place);
        }
    }
}

/// A fast hash without protection against collisions: only the author of the text could provoke them.
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

/// The spelling of each byte in byte-level vocabularies: printable bytes as themselves, the others from U+0100 on.
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

/// The byte that a letter of a byte-level vocabulary stands for.
pub(super) fn byte_of(letter: char) -> Option<u8> {
    SPELLED.iter().position(|spelled| *spelled == letter).map(|byte| byte as u8)
}

/// The classes of characters that the expression distinguishes.
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

/// Length in bytes of the prefix of `text` whose characters are all of one class.
fn run(text: &str, wanted: CharacterClass) -> usize {
    text.char_indices().find(|(_, character)| kind(*character) != wanted).map_or(text.len(), |(at, _)| at)
}

/// The length in bytes of the first word of a non-empty text, as this expression splits it:
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
    // The last space of several joins the word that follows, or is a word of its own.
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
    fn every_character_has_the_class_of_the_expression() {
        let texts = ["a"];
        let vocabulary = Vocabulary::train(texts.into_iter(), 258).unwrap();
        let fast = ByteLevelEncoder::of(vocabulary.library()).expect("a plain tokeniser");
        // Between two letters, a character is split off, joined, or a word of its own, depending on its class. Without merges
        // only splitting differs, which the library's own offsets show.
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
