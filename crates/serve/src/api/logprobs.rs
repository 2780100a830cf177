//! Log-probabilities of tokens, and the names of tokens.

use flatout_data::Vocabulary;
use flatout_train::infer::generate::ScoredToken;
use serde_json::{Map, Value, json};

/// Every token's bytes.
#[derive(Default)]
pub struct Pieces {
    bytes: Vec<Vec<u8>>,
    /// Whether a token does not appear in texts.
    is_special: Vec<bool>,
    /// Whether texts have a space between two tokens.
    has_gaps: bool,
}

impl Pieces {
    pub fn of(vocabulary: &Vocabulary) -> Pieces {
        let bytes = vocabulary.pieces();
        let lengths = vocabulary.byte_lengths();
        let is_end = |token: usize| [vocabulary.bos(), vocabulary.eos()].contains(&(token as u32));
        let is_special = |token: usize| is_end(token) || lengths.is_some_and(|lengths| lengths[token] == 0);
        let is_special = (0..bytes.len()).map(is_special).collect();
        Pieces { bytes, is_special, has_gaps: lengths.is_none() }
    }

    /// Bytes of the longest token.
    pub fn longest(&self) -> usize {
        self.bytes.iter().map(Vec::len).max().unwrap_or(0)
    }

    fn bytes(&self, token: u32) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], Vec::as_slice)
    }

    /// A token's text, or its bytes where they are a part of a character: no two tokens with different bytes have one name.
    fn name(&self, token: u32) -> String {
        let bytes = self.bytes(token);
        match std::str::from_utf8(bytes) {
            Ok(text) => text.into(),
            Err(_) => bytes.iter().fold("bytes:".into(), |name, byte| format!("{name}\\x{byte:02x}")),
        }
    }
}

/// The offset in a text at which the next token begins, in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextOffset {
    characters: usize,
    is_begun: bool,
}

impl TextOffset {
    /// Advances past a token and returns the offset at which it begins.
    fn pass(&mut self, pieces: &Pieces, token: u32) -> usize {
        let here = self.characters;
        if !pieces.is_special.get(token as usize).is_none_or(|special| *special) {
            // A character counts in the token with its first byte.
            let begins = pieces.bytes(token).iter().filter(|byte| **byte & 0xc0 != 0x80).count();
            self.characters += begins + usize::from(pieces.has_gaps && self.is_begun);
            self.is_begun = true;
        }
        here
    }
}

/// The likeliest tokens, with the sampled one if it is not among them.
fn with_taken(scored: &ScoredToken) -> impl Iterator<Item = (u32, f32)> + '_ {
    let taken = scored.logp.filter(|_| scored.top.iter().all(|(token, _)| *token != scored.token));
    scored.top.iter().copied().chain(taken.map(|logp| (scored.token, logp)))
}

/// Log-probabilities in the format of completions: four lists with an entry per token.
pub fn of_completion(pieces: &Pieces, scored: &[&ScoredToken], place: &mut TextOffset) -> Value {
    let top = |scored: &ScoredToken| -> Value {
        scored.logp.map_or(Value::Null, |_| {
            let mut named = Map::new();
            for (token, logp) in with_taken(scored) {
                named.entry(pieces.name(token)).or_insert(json!(logp));
            }
            named.into()
        })
    };
    json!({
        "tokens": scored.iter().map(|scored| pieces.name(scored.token)).collect::<Vec<_>>(),
        "token_logprobs": scored.iter().map(|scored| scored.logp).collect::<Vec<_>>(),
        "top_logprobs": scored.iter().map(|scored| top(scored)).collect::<Vec<_>>(),
        "text_offset": scored.iter().map(|scored| place.pass(pieces, scored.token)).collect::<Vec<_>>(),
    })
}

/// Log-probabilities in the format of chat: an object per token.
pub fn of_chat(pieces: &Pieces, scored: &[&ScoredToken]) -> Value {
    let one = |token: u32, logp: Option<f32>| json!({ "token": pieces.name(token), "logprob": logp, "bytes": pieces.bytes(token) });
    let content = |scored: &&ScoredToken| {
        let mut entry = one(scored.token, scored.logp);
        let top = scored.top.iter().map(|(token, logp)| one(*token, Some(*logp)));
        entry["top_logprobs"] = top.collect();
        entry
    };
    json!({ "content": scored.iter().map(content).collect::<Vec<_>>(), "refusal": null })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_names_and_places() {
        let text = "the fox — größer 🦊";
        let vocabulary = Vocabulary::train([text, text].into_iter(), 262).unwrap();
        let pieces = Pieces::of(&vocabulary);
        let tokens = [vec![vocabulary.bos()], vocabulary.encode(text).unwrap()].concat();
        let scored: Vec<ScoredToken> =
            tokens.iter().map(|token| ScoredToken { token: *token, logp: Some(-1.0), top: vec![] }).collect();
        let written = of_completion(&pieces, &scored.iter().collect::<Vec<_>>(), &mut TextOffset::default());
        let offsets: Vec<u64> =
            written["text_offset"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
        assert_eq!((offsets[0], offsets[1]), (0, 0), "the first token does not appear in the text");
        assert!(
            offsets.is_sorted() && *offsets.last().unwrap() == text.chars().count() as u64,
            "{offsets:?}"
        );
        let names = written["tokens"].as_array().unwrap();
        assert_eq!(names[0], "<bos>");
        assert!(names.iter().any(|name| name == "bytes:\\xf0"), "{names:?}");
        assert_eq!(
            written["top_logprobs"][1].as_object().unwrap().len(),
            1,
            "the token itself is always there"
        );
        let written = of_chat(&pieces, &[&scored[1]]);
        assert_eq!(written["content"][0]["bytes"], json!(pieces.bytes(tokens[1])));
    }
}
