//! The tokeniser files of an export: those that the run stored from its source model, with added tokens, or new ones for a
//! tokeniser of flatout's own.

use std::fs;
use std::path::PathBuf;

use flatout_data::Vocabulary;
use serde_json::{Map, Value, json};

use crate::run::BESIDE;
use crate::weights::loaded::{Loaded, added_to};
use crate::weights::pretrained::folder::CONFIG;

pub const FILE: &str = "tokenizer.json";
pub const SETTINGS: &str = "tokenizer_config.json";
const SPECIAL: &str = "special_tokens_map.json";

/// The tokeniser of a run.
pub struct Tokenizer {
    pub vocabulary: Option<Vocabulary>,
    /// The folder with the tokeniser's original files, if the run stored them and they belong to this tokeniser.
    pub beside: Option<PathBuf>,
    /// Tokens added to those files.
    pub added: Vec<String>,
}

impl Tokenizer {
    /// Takes the vocabulary of a run, or of a folder in the Hugging Face layout.
    pub fn of(loaded: &mut Loaded) -> Tokenizer {
        let vocabulary = loaded.vocabulary.take();
        let kept = if loaded.is_run { loaded.dir.join(BESIDE) } else { loaded.dir.clone() };
        let beside = Some(kept).filter(|beside| beside.join(CONFIG).is_file());
        let added = beside.as_ref().and_then(|beside| match &vocabulary {
            Some(vocabulary) => added_to(beside, vocabulary),
            None => Some(vec![]),
        });
        let beside = beside.filter(|_| added.is_some());
        Tokenizer { vocabulary, beside, added: added.unwrap_or_default() }
    }

    /// The contents of a file that the run stored.
    pub fn kept(&self, name: &str) -> Option<Vec<u8>> {
        self.beside.as_ref().and_then(|beside| fs::read(beside.join(name)).ok())
    }

    /// The names and contents of its files.
    pub fn files(&self, positions: usize) -> Vec<(&'static str, Vec<u8>)> {
        let text = |value: &Value| serde_json::to_vec_pretty(value).expect("JSON has a text");
        let mut files = vec![];
        match (self.kept(FILE), &self.vocabulary) {
            (Some(kept), _) => files.push((FILE, self.with_added(kept, add_tokens))),
            (None, Some(vocabulary)) => files.push((FILE, text(&framed(vocabulary)))),
            (None, None) => {}
        }
        let Some(vocabulary) = &self.vocabulary else { return files };
        let spelled = |token: u32| vocabulary.token(token).unwrap_or_default();
        let (bos, eos) = (spelled(vocabulary.bos()), spelled(vocabulary.eos()));
        let special = json!({ "bos_token": bos, "eos_token": eos });
        let settings = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "model_max_length": positions,
            "clean_up_tokenization_spaces": false,
        });
        // Stored settings may leave special tokens out on purpose, so no map of them is added to those.
        let (settings, special) = match self.kept(SETTINGS) {
            Some(kept) => (self.with_added(kept, add_to_decoder), self.kept(SPECIAL)),
            None => (text(&settings), Some(self.kept(SPECIAL).unwrap_or_else(|| text(&special)))),
        };
        files.push((SETTINGS, settings));
        files.extend(special.map(|special| (SPECIAL, special)));
        files
    }

    /// A stored file with the added tokens; unchanged if there are none.
    fn with_added(&self, kept: Vec<u8>, add: fn(&mut Value, u32, Map<String, Value>)) -> Vec<u8> {
        let Some(vocabulary) = self.vocabulary.as_ref().filter(|_| !self.added.is_empty()) else {
            return kept;
        };
        let Ok(mut file) = serde_json::from_slice::<Value>(&kept) else { return kept };
        for token in &self.added {
            let Some(id) = vocabulary.id(token) else { continue };
            let entry = json!({
                "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": false,
            });
            add(&mut file, id, entry.as_object().expect("an object").clone());
        }
        serde_json::to_vec_pretty(&file).expect("JSON has a text")
    }
}

/// In `tokenizer.json` tokens are listed with their numbers.
fn add_tokens(file: &mut Value, id: u32, mut token: Map<String, Value>) {
    token.insert("id".into(), json!(id));
    if let Some(list) = file["added_tokens"].as_array_mut() {
        list.push(Value::Object(token));
    } else {
        file["added_tokens"] = json!([token]);
    }
}

/// In `tokenizer_config.json` tokens are keyed by number, if it lists them.
fn add_to_decoder(file: &mut Value, id: u32, token: Map<String, Value>) {
    if let Some(by_number) = file.get_mut("added_tokens_decoder").and_then(Value::as_object_mut) {
        by_number.insert(id.to_string(), Value::Object(token));
    }
}

/// A `tokenizer.json` that begins a text as documents began in training, if the vocabulary does not do that itself.
fn framed(vocabulary: &Vocabulary) -> Value {
    let mut tokenizer: Value =
        serde_json::from_str(&vocabulary.to_json()).expect("a tokeniser's text is JSON");
    if tokenizer["post_processor"].is_null() {
        let (id, bos) = (vocabulary.bos(), vocabulary.token(vocabulary.bos()).unwrap_or_default());
        let special = json!({ "SpecialToken": { "id": bos, "type_id": 0 } });
        let sequence = |name: &str, type_id: u32| json!({ "Sequence": { "id": name, "type_id": type_id } });
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [special, sequence("A", 0)],
            "pair": [special, sequence("A", 0), sequence("B", 1)],
            "special_tokens": { bos.clone(): { "id": bos.clone(), "ids": [id], "tokens": [bos] } },
        });
    }
    tokenizer
}
