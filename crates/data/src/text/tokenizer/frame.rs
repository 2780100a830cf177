//! The tokens that begin and end a document: those named by files in the folder of a `tokenizer.json`, or a known pair.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::text::synthetic::grammar::{BOS, EOS};

/// The file in the folder of a `tokenizer.json` that names its special tokens.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Files that name tokens by spelling and files that name them by number, in the order they are read.
const BY_SPELLING: [&str; 2] = [TOKENIZER_CONFIG, "special_tokens_map.json"];
const BY_NUMBER: [&str; 2] = ["config.json", "generation_config.json"];

/// Known names of the tokens that begin and end a document, for `tokenizer.json` files without other files, in the order they
/// are tried.
const KNOWN: [(&str, &str); 6] = [
    (BOS, EOS),
    ("<s>", "</s>"),
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<|startoftext|>", "<|endoftext|>"),
    ("[CLS]", "[SEP]"),
    ("<|endoftext|>", "<|endoftext|>"),
];

/// The tokens that begin and end a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    pub bos: u32,
    pub eos: u32,
}

impl Frame {
    /// The first known pair of which a tokeniser has both tokens.
    pub fn known(tokenizer: &Tokenizer) -> Option<Frame> {
        let pair = |(bos, eos): &(&str, &str)| {
            Some(Frame { bos: tokenizer.token_to_id(bos)?, eos: tokenizer.token_to_id(eos)? })
        };
        KNOWN.iter().find_map(pair)
    }

    /// The pair that the files in a tokeniser's folder name, or a known one. Where a tokeniser has only an end token, a
    /// document begins with the end token of the previous one.
    pub fn beside(folder: &Path, tokenizer: &Tokenizer) -> Result<Frame, String> {
        let [bos, eos] = named(folder, tokenizer)?;
        let end_of = |bos: u32| {
            let known = KNOWN.iter().find(|(name, _)| tokenizer.token_to_id(name) == Some(bos));
            known.and_then(|(_, end)| tokenizer.token_to_id(end))
        };
        let known = Frame::known(tokenizer);
        let frame = match (bos, eos) {
            (None, None) => known,
            (bos, Some(eos)) => Some(Frame { bos: bos.unwrap_or(eos), eos }),
            (Some(bos), None) => end_of(bos).or(known.map(|known| known.eos)).map(|eos| Frame { bos, eos }),
        };
        frame.ok_or_else(|| {
            let known: Vec<String> = KNOWN.iter().map(|(bos, eos)| format!("{bos} {eos}")).collect();
            format!(
                "it has no tokens for the beginning and the end of a document; name them as bos_token and eos_token in a \
                 {TOKENIZER_CONFIG} beside it, or use one of these pairs: {}",
                known.join(", ")
            )
        })
    }

    /// The content of a `tokenizer_config.json` that names them.
    pub fn to_json(self, tokenizer: &Tokenizer) -> String {
        let spelled = |token: u32| tokenizer.id_to_token(token);
        let config = json!({ "bos_token": spelled(self.bos), "eos_token": spelled(self.eos) });
        serde_json::to_string_pretty(&config).expect("JSON has a text")
    }
}

/// Both tokens, each by the first file that names it.
fn named(folder: &Path, tokenizer: &Tokenizer) -> Result<[Option<u32>; 2], String> {
    let mut found = [None; 2];
    for file in BY_SPELLING {
        let Some(fields) = object(&folder.join(file))? else { continue };
        for (token, key) in found.iter_mut().zip(["bos_token", "eos_token"]) {
            // Newer files contain the whole entry of the added token.
            let entry = &fields[key];
            let Some(name) = entry.as_str().or(entry["content"].as_str()) else { continue };
            if token.is_none() {
                let known = tokenizer.token_to_id(name);
                *token = Some(known.ok_or_else(|| {
                    format!("its {file} says that `{key}` is {name:?}, which it does not have")
                })?);
            }
        }
    }
    for file in BY_NUMBER {
        let Some(fields) = object(&folder.join(file))? else { continue };
        for (token, key) in found.iter_mut().zip(["bos_token_id", "eos_token_id"]) {
            // A model that sees images may have it in the part about text.
            let named_in_config = [&fields[key], &fields["text_config"][key]]
                .into_iter()
                .find(|named_in_config| !named_in_config.is_null());
            // Where several tokens end a text, the first one ends a document.
            let number = named_in_config
                .and_then(|named_in_config| named_in_config.as_u64().or(named_in_config[0].as_u64()));
            let id = number.and_then(|number| u32::try_from(number).ok());
            *token = token.or(id.filter(|id| tokenizer.id_to_token(*id).is_some()));
        }
    }
    Ok(found)
}

/// The object in a file; `None` where there is no such file.
fn object(path: &Path) -> Result<Option<Value>, String> {
    if !path.is_file() {
        return Ok(None);
    }
    let unreadable =
        |why: &dyn std::fmt::Display| format!("{} beside it cannot be read ({why})", path.display());
    let bytes = fs::read(path).map_err(|error| unreadable(&error))?;
    match serde_json::from_slice(&bytes).map_err(|error| unreadable(&error))? {
        object @ Value::Object(_) => Ok(Some(object)),
        _ => Err(unreadable(&"it is not an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::text::tokenizer::Vocabulary;

    /// The frame of a tokeniser of five words with these files in its folder, or the error.
    fn ends(name: &str, files: &[(&str, Value)]) -> Result<(u32, u32), String> {
        let words: Vec<String> =
            ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "a"].map(String::from).to_vec();
        let scratch = Scratch::new(name);
        let path = scratch.path().join("tokenizer.json");
        Vocabulary::from_words(&words).save(&path).unwrap();
        assert!(!scratch.path().join(TOKENIZER_CONFIG).exists(), "a known pair needs no file");
        for (file, value) in files {
            scratch.write(file, value.to_string().as_bytes());
        }
        let loaded = Vocabulary::load(&path).map_err(|error| error.sentence)?;
        // A saved tokeniser keeps its frame in any folder.
        let again = scratch.path().join("again");
        fs::create_dir(&again).unwrap();
        loaded.save(&again.join("tokenizer.json")).unwrap();
        let saved = Vocabulary::load(&again.join("tokenizer.json")).unwrap();
        assert_eq!((saved.bos(), saved.eos()), (loaded.bos(), loaded.eos()));
        assert_eq!(saved.fingerprint(), loaded.fingerprint());
        Ok((loaded.bos(), loaded.eos()))
    }

    #[test]
    fn the_files_beside_the_tokeniser_name_its_frame() {
        assert_eq!(ends("frame-none", &[]), Ok((0, 1)));
        let config = json!({ "bos_token": "<|im_start|>", "eos_token": { "content": "<|im_end|>" } });
        let model = json!({ "bos_token_id": 0, "eos_token_id": [1, 3] });
        assert_eq!(ends("frame-config", &[(TOKENIZER_CONFIG, config.clone())]), Ok((2, 3)));
        let both = [(TOKENIZER_CONFIG, config), ("config.json", model.clone())];
        assert_eq!(ends("frame-first", &both), Ok((2, 3)));
        let half = json!({ "bos_token": null, "eos_token": "<|im_end|>" });
        let halves = [(TOKENIZER_CONFIG, half.clone()), ("config.json", model)];
        assert_eq!(ends("frame-halves", &halves), Ok((0, 3)));
        assert_eq!(ends("frame-end", &[(TOKENIZER_CONFIG, half)]), Ok((3, 3)));
        let generation = json!({ "eos_token_id": 3 });
        assert_eq!(ends("frame-generation", &[("generation_config.json", generation)]), Ok((3, 3)));
        let text = json!({ "text_config": { "bos_token_id": 2, "eos_token_id": 3 } });
        assert_eq!(ends("frame-text", &[("config.json", text)]), Ok((2, 3)));
        assert_eq!(ends("frame-beginning", &[("config.json", json!({ "bos_token_id": 0 }))]), Ok((0, 1)));
        let beyond = json!({ "bos_token_id": 2, "eos_token_id": 31 });
        assert_eq!(ends("frame-beyond", &[("config.json", beyond)]), Ok((2, 1)), "one that it does not have");
    }

    #[test]
    fn files_that_contradict_the_tokeniser_are_named() {
        let refused = |name: &str, file: &str, value: Value| ends(name, &[(file, value)]).unwrap_err();
        let other = refused("frame-other", TOKENIZER_CONFIG, json!({ "eos_token": "<end>" }));
        assert!(other.contains("`eos_token` is \"<end>\", which it does not have"), "{other}");
        let list = refused("frame-list", "config.json", json!([1]));
        assert!(list.contains("config.json beside it cannot be read (it is not an object)"), "{list}");
    }
}
