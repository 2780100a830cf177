//! Log-probabilities of tokens, and the names of tokens.

use flatout_data::Vocabulary;
use flatout_train::infer::generate::Told;
use serde_json::{Map, Value, json};

/// Every token's bytes.
#[derive(Default)]
pub struct Pieces {
    bytes: Vec<Vec<u8>>,
    /// Tokens that leave no trace in a text.
    is_special: Vec<bool>,
    /// Texts have a space between two tokens.
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

/// The place in a text at which the next token begins, in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextOffset {
    characters: usize,
    is_begun: bool,
}

impl TextOffset {
    /// Goes on behind a token and gives the place at which it begins.
    fn pass(&mut self, pieces: &Pieces, token: u32) -> usize {
        let here = self.characters;
        if !pieces.is_special.get(token as usize).is_none_or(|special| *special) {
            // A character counts where its first byte is.
            let begins = pieces.bytes(token).iter().filter(|byte| **byte & 0xc0 != 0x80).count();
            self.characters += begins + usize::from(pieces.has_gaps && self.is_begun);
            self.is_begun = true;
        }
        here
    }
}

/// The likeliest tokens, and the one that was taken among them.
fn with_taken(told: &Told) -> impl Iterator<Item = (u32, f32)> + '_ {
    let taken = told.logp.filter(|_| told.top.iter().all(|(token, _)| *token != told.token));
    told.top.iter().copied().chain(taken.map(|logp| (told.token, logp)))
}

/// Of completions: four lists with an entry a token.
pub fn of_completion(pieces: &Pieces, told: &[&Told], place: &mut TextOffset) -> Value {
    let top = |told: &Told| -> Value {
        told.logp.map_or(Value::Null, |_| {
            let mut named = Map::new();
            for (token, logp) in with_taken(told) {
                named.entry(pieces.name(token)).or_insert(json!(logp));
            }
            named.into()
        })
    };
    json!({
        "tokens": told.iter().map(|told| pieces.name(told.token)).collect::<Vec<_>>(),
        "token_logprobs": told.iter().map(|told| told.logp).collect::<Vec<_>>(),
        "top_logprobs": told.iter().map(|told| top(told)).collect::<Vec<_>>(),
        "text_offset": told.iter().map(|told| place.pass(pieces, told.token)).collect::<Vec<_>>(),
    })
}

/// Of chat: an object a token.
pub fn of_chat(pieces: &Pieces, told: &[&Told]) -> Value {
    let one = |token: u32, logp: Option<f32>| json!({ "token": pieces.name(token), "logprob": logp, "bytes": pieces.bytes(token) });
    let content = |told: &&Told| {
        let mut entry = one(told.token, told.logp);
        let top = told.top.iter().map(|(token, logp)| one(*token, Some(*logp)));
        entry["top_logprobs"] = top.collect();
        entry
    };
    json!({ "content": told.iter().map(content).collect::<Vec<_>>(), "refusal": null })
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
        let told: Vec<Told> =
            tokens.iter().map(|token| Told { token: *token, logp: Some(-1.0), top: vec![] }).collect();
        let said = of_completion(&pieces, &told.iter().collect::<Vec<_>>(), &mut TextOffset::default());
        let offsets: Vec<u64> =
            said["text_offset"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
        assert_eq!((offsets[0], offsets[1]), (0, 0), "the first token leaves no trace");
        assert!(
            offsets.is_sorted() && *offsets.last().unwrap() == text.chars().count() as u64,
            "{offsets:?}"
        );
        let names = said["tokens"].as_array().unwrap();
        assert_eq!(names[0], "<bos>");
        assert!(names.iter().any(|name| name == "bytes:\\xf0"), "{names:?}");
        assert_eq!(said["top_logprobs"][1].as_object().unwrap().len(), 1, "the token itself is always there");
        let said = of_chat(&pieces, &[&told[1]]);
        assert_eq!(said["content"][0]["bytes"], json!(pieces.bytes(tokens[1])));
    }
}
