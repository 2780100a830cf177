//! Guards the library's tokenisers, which may come from anywhere: bounds the growth of a text, and turns panics into errors.
//!
//! Normalisers, pre-tokenisers, decoders and post-processors come in chains, and each may lengthen a text. The largest growth
//! of a step is known when the file is read. A step that exceeds [`MAX_STEP_GROWTH`] is refused then, and so is a chain of
//! anything but normalisers. Where the product of a chain of normalisers exceeds it, the chain runs step by step, with a check
//! before each, before a text is encoded.

use serde::Serialize;
use serde_json::Value;
use tokenizers::{Encoding, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, Tokenizer};

use crate::contained::contained;

/// Largest factor by which a step may lengthen a text. Unicode compatibility forms reach 11, tables of SentencePiece 33.
const MAX_STEP_GROWTH: usize = 64;
/// Largest factor by which all normalisers together may lengthen a text, and the bytes added for short texts.
const MAX_TOTAL_GROWTH: usize = 128;
const SPARE_BYTES: usize = 64 << 10;

/// Longest word, in characters, that WordPiece may split: the time is cubic in its length. 100 is usual.
const LONGEST_WORD: usize = 1000;

/// Why a text cannot be encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unencodable {
    /// This text cannot be encoded; others may be.
    Text(String),
    /// The tokeniser itself is at fault.
    Tokenizer(String),
}

impl Unencodable {
    pub fn message(self) -> String {
        match self {
            Unencodable::Text(message) | Unencodable::Tokenizer(message) => message,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct GuardedTokenizer {
    library: Tokenizer,
    /// The normalisers one by one, each with its largest growth factor. Empty where all of them together stay within the bound.
    bounded_steps: Vec<(NormalizerWrapper, usize)>,
}

impl GuardedTokenizer {
    /// Checks the parts of a tokeniser; the error names the one that may make a text too long.
    pub fn new(library: Tokenizer) -> Result<Self, String> {
        let normalizers = steps(library.get_normalizer())?;
        let factors = check(&normalizers, "normaliser", false)?;
        check(&steps(library.get_pre_tokenizer())?, "pre-tokeniser", true)?;
        check(&steps(library.get_decoder())?, "decoder", true)?;
        check(&steps(library.get_post_processor())?, "post-processor", true)?;
        if let ModelWrapper::WordPiece(model) = library.get_model()
            && model.max_input_chars_per_word > LONGEST_WORD
        {
            return Err(format!(
                "its words have up to {} characters, and at most {LONGEST_WORD} are allowed",
                model.max_input_chars_per_word
            ));
        }
        let product = factors.iter().try_fold(1usize, |product, factor| product.checked_mul(*factor));
        let bounded_steps = match product.is_some_and(|product| product <= MAX_STEP_GROWTH) {
            true => Vec::new(),
            false => {
                let read = |(step, factor): (Value, usize)| {
                    serde_json::from_value(step).map(|step| (step, factor)).map_err(|error| error.to_string())
                };
                normalizers.into_iter().zip(factors).map(read).collect::<Result<_, _>>()?
            }
        };
        Ok(Self { library, bounded_steps })
    }

    pub fn library(&self) -> &Tokenizer {
        &self.library
    }

    /// Changes parts that do not affect lengths: special tokens, padding, processing.
    pub fn change(&mut self, change: impl FnOnce(&mut Tokenizer)) {
        change(&mut self.library);
    }

    /// The tokens of a text with their offsets.
    pub fn encode(&self, text: &str, with_frame: bool) -> Result<Encoding, Unencodable> {
        self.guarded(text, || self.library.encode(text, with_frame))
    }

    /// As [`GuardedTokenizer::encode`], without offsets.
    pub fn encode_fast(&self, text: &str, with_frame: bool) -> Result<Encoding, Unencodable> {
        self.guarded(text, || self.library.encode_fast(text, with_frame))
    }

    /// The text of tokens, or the message of the library's panic.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String, String> {
        contained(|| self.library.decode(tokens, skip_special))?.map_err(|error| error.to_string())
    }

    fn guarded(
        &self,
        text: &str,
        encode: impl FnOnce() -> tokenizers::Result<Encoding>,
    ) -> Result<Encoding, Unencodable> {
        let panicked = |message: String| {
            Unencodable::Tokenizer(format!("the tokeniser fails while encoding: {message}"))
        };
        contained(|| {
            self.check_growth(text)?;
            encode().map_err(|error| Unencodable::Text(error.to_string()))
        })
        .map_err(panicked)?
    }

    /// Runs the normalisers one by one, and stops before one that could make the text too long.
    fn check_growth(&self, text: &str) -> Result<(), Unencodable> {
        if self.bounded_steps.is_empty() {
            return Ok(());
        }
        let most = text.len().saturating_mul(MAX_TOTAL_GROWTH).saturating_add(SPARE_BYTES);
        let mut normalized = NormalizedString::from(text);
        for (step, factor) in &self.bounded_steps {
            if normalized.get().len().saturating_mul(*factor) > most {
                return Err(Unencodable::Tokenizer(format!(
                    "the normalisers of the tokeniser make a text more than {MAX_TOTAL_GROWTH} times as long"
                )));
            }
            step.normalize(&mut normalized).map_err(|error| Unencodable::Text(error.to_string()))?;
        }
        Ok(())
    }
}

/// The steps of a part of the tokeniser in order, as JSON of the file format.
fn steps<T: Serialize>(part: Option<&T>) -> Result<Vec<Value>, String> {
    let Some(part) = part else { return Ok(Vec::new()) };
    let written = serde_json::to_value(part).map_err(|error| error.to_string())?;
    let mut steps = Vec::new();
    flatten(written, &mut steps);
    Ok(steps)
}

fn flatten(step: Value, steps: &mut Vec<Value>) {
    if step["type"] == "Sequence" {
        for list in ["normalizers", "pretokenizers", "decoders", "processors"] {
            for inner in step[list].as_array().into_iter().flatten() {
                flatten(inner.clone(), steps);
            }
        }
    } else {
        steps.push(step);
    }
}

/// The growth factor of each step. An error where one step, or all of them `together`, exceed the bound.
fn check(steps: &[Value], part: &str, together: bool) -> Result<Vec<usize>, String> {
    let factors: Vec<usize> = steps.iter().map(factor).collect();
    if let Some(at) = factors.iter().position(|factor| *factor > MAX_STEP_GROWTH) {
        return Err(format!(
            "its {part} {} may make a text {} times as long, and at most {MAX_STEP_GROWTH} times is allowed",
            steps[at]["type"].as_str().unwrap_or_default(),
            factors[at]
        ));
    }
    let product = factors.iter().try_fold(1usize, |product, factor| product.checked_mul(*factor));
    match together && product.is_none_or(|product| product > MAX_STEP_GROWTH) {
        true => Err(format!(
            "its {} {part}s may together make a text more than {MAX_STEP_GROWTH} times as long",
            steps.len()
        )),
        false => Ok(factors),
    }
}

/// The largest growth factor of a step, in bytes.
fn factor(step: &Value) -> usize {
    let bytes = |field: &str| step[field].as_str().map_or(0, str::len);
    match step["type"].as_str().unwrap_or_default() {
        "NFKC" | "NFKD" => 11,
        "NFC" | "NFD" | "Metaspace" => 3,
        "BertNormalizer" => 6,
        "Lowercase" | "ByteLevel" => 2,
        "Prepend" => 1 + bytes("prepend"),
        "Precompiled" => longest_entry(step["precompiled_charsmap"].as_str().unwrap_or_default()).max(1),
        "TemplateProcessing" => {
            let repeats = |form: &str, id: &str| {
                let pieces = step[form].as_array().into_iter().flatten();
                pieces.filter(|piece| piece["Sequence"]["id"] == id).count()
            };
            repeats("single", "A").max(repeats("pair", "A")).max(repeats("pair", "B")).max(1)
        }
        "Replace" => {
            let content = bytes("content");
            match least_match(&step["pattern"]) {
                0 => 1 + content,
                least => content.div_ceil(least).max(1),
            }
        }
        _ => 1,
    }
}

/// The fewest bytes that a pattern matches.
fn least_match(pattern: &Value) -> usize {
    if let Some(text) = pattern["String"].as_str() {
        return text.len();
    }
    let parsed = pattern["Regex"].as_str().and_then(|expression| regex_syntax::parse(expression).ok());
    // An expression that only the library's own parser accepts is assumed to match the empty text.
    parsed.and_then(|parsed| parsed.properties().minimum_len()).unwrap_or(0)
}

/// The longest replacement in one of SentencePiece's tables: the replacements end with a NUL and follow the index, whose size
/// comes first.
fn longest_entry(base64: &str) -> usize {
    let table = decoded(base64);
    let Some(size) = table.get(..4).map(|size| u32::from_le_bytes(size.try_into().expect("four bytes")))
    else {
        return 1;
    };
    let entries = table.get(4 + size as usize..).unwrap_or_default();
    entries.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(1)
}

fn decoded(base64: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let (mut bits, mut held, mut out) = (0u32, 0, Vec::with_capacity(base64.len() / 4 * 3));
    for digit in base64.bytes().filter_map(digit) {
        bits = bits << 6 | u32::from(digit);
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::Vocabulary;

    fn with(part: &str, step: &str) -> Result<GuardedTokenizer, String> {
        let plain = Vocabulary::train(["the fox and the dog"].into_iter(), 260).unwrap().to_json();
        let mut file: Value = serde_json::from_str(&plain).unwrap();
        file[part] = serde_json::from_str(step).unwrap();
        GuardedTokenizer::new(Tokenizer::from_bytes(file.to_string()).unwrap())
    }

    fn sequence(list: &str, step: &str, times: usize) -> String {
        format!(r#"{{"type":"Sequence","{list}":[{}]}}"#, vec![step; times].join(","))
    }

    #[test]
    fn parts_that_make_a_text_far_too_long_are_refused_when_they_are_read() {
        let long = "x".repeat(100);
        let doubling =
            r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}"#;
        let growing = r#"{"type":"Replace","pattern":{"String":"a"},"content":"aa"}"#;
        for (part, step, message) in [
            ("normalizer", format!(r#"{{"type":"Prepend","prepend":"{long}"}}"#), "normaliser Prepend"),
            (
                "normalizer",
                format!(r#"{{"type":"Replace","pattern":{{"Regex":"x*"}},"content":"{long}"}}"#),
                "normaliser Replace",
            ),
            ("pre_tokenizer", sequence("pretokenizers", doubling, 30), "pre-tokenisers may together"),
            ("decoder", sequence("decoders", growing, 30), "decoders may together"),
        ] {
            let error = with(part, &step).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn chained_normalisers_are_stopped_before_they_take_the_memory() {
        let growing = r#"{"type":"Replace","pattern":{"String":"a"},"content":"aaaaaaaa"}"#;
        let chained = with("normalizer", &sequence("normalizers", growing, 20)).unwrap();
        assert!(chained.encode("dog", false).is_ok());
        let error = chained.encode(&"a".repeat(1 << 14), false).unwrap_err();
        assert!(
            matches!(&error, Unencodable::Tokenizer(message) if message.contains("times as long")),
            "{error:?}"
        );
        let usual = sequence("normalizers", r#"{"type":"NFKD"},{"type":"Lowercase"}"#, 3);
        assert!(with("normalizer", &usual).unwrap().encode("The Ǆ \u{fdfa}", false).is_ok());
    }

    #[test]
    fn a_panic_of_the_library_is_an_error_of_the_tokeniser() {
        for (part, step) in [
            ("normalizer", r#"{"type":"Replace","pattern":{"String":""},"content":"b"}"#),
            (
                "pre_tokenizer",
                r#"{"type":"Split","pattern":{"String":""},"behavior":"Isolated","invert":false}"#,
            ),
            (
                "pre_tokenizer",
                r#"{"type":"Split","pattern":{"Regex":"x*"},"behavior":"Removed","invert":true}"#,
            ),
        ] {
            let Ok(guarded) = with(part, step) else { continue };
            for text in ["the fox", "", "xx é 🦊"] {
                match guarded.encode(text, false) {
                    Ok(_) | Err(Unencodable::Text(_)) => {}
                    Err(Unencodable::Tokenizer(message)) => {
                        assert!(message.contains("fails while encoding"), "{message}")
                    }
                }
            }
        }
    }
}
