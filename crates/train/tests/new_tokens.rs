//! Tokens that a run adds to the tokeniser of a model: the tables that grow, their training, and export and import of both.

use std::fs;
use std::path::{Path, PathBuf};

use flatout_data::Vocabulary;
use flatout_train::device::Device;
use flatout_train::infer::logits;
use flatout_train::recipes;
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::loaded::Loaded;
use serde_json::Value;

use crate::adapters::f32s;
use crate::distance::relative;
use crate::resume::resumes_exactly;
use crate::small_run::{self, train_in};

const TOKENS: &str = "data.new_tokens=['<tool>','</tool>']";
const VOCAB: usize = 300;

/// A folder with a text, a text with the new tokens, and a model whose tokeniser lacks them.
struct TestFolder(tempfile::TempDir);

impl TestFolder {
    fn new(tied: bool) -> TestFolder {
        let folder = TestFolder(tempfile::tempdir().expect("a folder"));
        let plain: String = (0..400).map(|i| format!("the {} cats saw {i} birds.\n\n", i * 7 % 30)).collect();
        let tools = plain.replace("saw", "<tool>look up</tool> and saw");
        fs::write(folder.at("plain.txt"), plain).expect("a text");
        fs::write(folder.at("tools.txt"), tools).expect("a text");
        let text = folder.word("data.path", "plain.txt");
        let (tied, vocab) = (format!("model.tied={tied}"), format!("model.vocab={VOCAB}"));
        train_in(&folder.at("first"), &small_run::config(&[&text, &tied, &vocab, "train.steps=6"]), |_| {});
        folder.export("first", "base", false);
        folder
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn word(&self, key: &str, name: &str) -> String {
        format!("{key}={}", self.at(name).display())
    }

    /// The overrides of a run on the text with new tokens that begins from a model.
    fn words(&self, from: &str, more: &[&str]) -> Vec<String> {
        let own = [self.word("model.from", from), self.word("data.path", "tools.txt")];
        own.into_iter().chain(more.iter().map(|word| word.to_string())).collect()
    }

    fn train(&self, run: &str, words: &[String]) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        train_in(&self.at(run), &small_run::config(&words), |_| {});
    }

    fn export(&self, run: &str, to: &str, adapter: bool) -> Vec<String> {
        let mut loaded = Loaded::open(&self.at(run), &[]).expect("a run");
        let (to, dtype, shard_bytes) = (self.at(to), Width::F32, u64::MAX);
        export(&mut loaded, &Export { to, dtype, shard_bytes, force: false, adapter })
            .expect("an export")
            .files
    }

    fn json(&self, path: &str) -> Value {
        serde_json::from_slice(&fs::read(self.at(path)).expect("a file")).expect("JSON")
    }

    /// Logits of rows with the new tokens.
    fn logits(&self, model: &str) -> Vec<f32> {
        let path = self.at("logits.safetensors");
        let mut loaded = Loaded::open(&self.at(model), &[]).expect("a model");
        let rows = [vec![5, 300, 7, 301, 9], vec![9, 10, 300, 301, 13]];
        logits::write(&mut loaded, &Device::Cpu { threads: 2 }, &rows, &path).expect("logits");
        f32s(&mut TensorFile::open(&path).expect("a file"), "logits")
    }
}

/// A table of a folder, or of a run's newest checkpoint.
fn table(model: &Path, name: &str) -> Vec<f32> {
    let place = Loaded::open(model, &[]).expect("a model").place;
    let state = place.join("state.safetensors");
    let path = if state.is_file() { state } else { place.join("model.safetensors") };
    f32s(&mut TensorFile::open(&path).expect("tensors"), name)
}

const STILL: [&str; 4] = ["train.steps=1", "lr=1e-30", "schedule.warmup_steps=0", "weight_decay=0"];

/// Old rows are the model's, and new rows begin near their mean.
#[test]
fn tables_grow_around_the_mean_of_their_rows() {
    let folder = TestFolder::new(false);
    folder.train("still", &folder.words("base", &[&[TOKENS][..], &STILL].concat()));
    for (ours, theirs) in [("embed.weight", "model.embed_tokens.weight"), ("head.weight", "lm_head.weight")] {
        let (grown, old) = (table(&folder.at("still"), ours), table(&folder.at("base"), theirs));
        let width = old.len() / VOCAB;
        assert_eq!((grown.len(), &grown[..old.len()]), ((VOCAB + 2) * width, &old[..]));
        let mean =
            |c: usize| old.iter().skip(c).step_by(width).map(|x| *x as f64).sum::<f64>() / VOCAB as f64;
        let new: Vec<&[f32]> = grown[old.len()..].chunks(width).collect();
        assert!((0..width).all(|c| new.iter().all(|row| (row[c] as f64 - mean(c)).abs() < 1e-4)));
        assert_ne!(new[0], new[1], "two tokens are told apart");
    }
}

/// A fully trained model is exported with its tokens, and runs that begin from the export or from the run have them.
#[test]
fn a_model_that_grew_is_exported_and_read_back() {
    let folder = TestFolder::new(true);
    folder.train("run", &folder.words("base", &[TOKENS, "train.steps=6", "lr=1e-2"]));
    folder.export("run", "out", false);
    assert_eq!(folder.json("out/config.json")["vocab_size"], VOCAB + 2);
    let added = folder.json("out/tokenizer.json")["added_tokens"].clone();
    let ids: Vec<(u64, &str)> = added
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|token| Some((token["id"].as_u64()?, token["content"].as_str()?)))
        .collect();
    assert!(ids.contains(&(300, "<tool>")) && ids.contains(&(301, "</tool>")), "{ids:?}");
    let vocabulary = Vocabulary::load(&folder.at("out/tokenizer.json")).expect("a tokeniser");
    let tokens = vocabulary.encode("cats <tool>look</tool>").expect("tokens");
    assert!(tokens.contains(&300) && tokens.last() == Some(&301), "{tokens:?}");
    assert_eq!(vocabulary.decode(&tokens), "cats <tool>look</tool>");
    assert_eq!(folder.logits("out"), folder.logits("run"));

    folder.train("onward", &folder.words("run", &STILL));
    assert_eq!(folder.logits("onward"), folder.logits("run"));
    folder.export("onward", "again", false);
    assert_eq!(folder.json("again/tokenizer.json"), folder.json("out/tokenizer.json"));
}

/// With adapters the tables are trained in full, exported in PEFT's layout, and imported to the bit.
#[test]
fn tables_that_grew_are_exported_with_adapters() {
    for tied in [true, false] {
        let folder = TestFolder::new(tied);
        let also = if tied { "adapter.also_train=embed" } else { "adapter.also_train=['embed','head']" };
        let tuned = [TOKENS, "adapter.kind=lora", "adapter.rank=2", also, "train.steps=6", "lr=1e-2"];
        folder.train("run", &folder.words("base", &tuned));
        let files = folder.export("run", "apart", true);
        assert!(files.contains(&"tokenizer.json".to_string()), "{files:?}");
        let config = folder.json("apart/adapter_config.json");
        assert_eq!(config["modules_to_save"], serde_json::json!(["lm_head", "model.embed_tokens"]));
        let from = folder.word("adapter.from", "apart");
        folder.train("again", &folder.words("base", &[&[TOKENS, from.as_str(), also][..], &STILL].concat()));
        assert_eq!(folder.logits("again"), folder.logits("run"), "tied {tied}");
        folder.export("run", "merged", false);
        let off = relative(&folder.logits("merged"), &folder.logits("run"));
        assert!(off < 1e-5, "tied {tied}: off by {off:.1e}");
        if tied {
            // The tensors of a head that was trained separately.
            let path = folder.at("apart/adapter_model.safetensors");
            let mut bytes = fs::read(&path).expect("tensors");
            let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
            let json: Value = serde_json::from_slice(&bytes[8..header]).expect("a header");
            let at = json["base_model.model.lm_head.weight"]["data_offsets"][0].as_u64().expect("a place");
            bytes[header + at as usize] ^= 1;
            fs::write(&path, bytes).expect("tensors");
            let words = folder.words("base", &[&[TOKENS, from.as_str(), also][..], &STILL].concat());
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let config = small_run::config(&words);
            let refused = begun(&config).expect_err("a refusal");
            assert!(refused.contains("is not `embed.weight` of this model"), "{refused}");
        }
    }
}

/// Opens a session and writes the initial weights of the config; the error is the message.
fn begun(config: &flatout_train::Config) -> Result<(), String> {
    let target = flatout_runtime::cpu::target(2);
    let compiled = flatout_train::resolve::compile::compile(config, &target).expect("plans");
    let mut session = flatout_runtime::Session::new(compiled.plans, 2).expect("a session");
    let begun = flatout_train::weights::pretrained::begin(config, &mut session);
    begun.map(|_| ()).map_err(|failure| failure.to_string())
}

#[test]
fn runs_that_grow_resume_exactly() {
    let folder = TestFolder::new(true);
    let words =
        folder.words("base", &[TOKENS, "adapter.kind=lora", "adapter.also_train=embed", "precision=bf16"]);
    resumes_exactly(&words.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Models of labelled texts, whose number of classes comes from the data, can grow too.
#[test]
fn models_of_classes_grow() {
    let folder = TestFolder::new(true);
    let rows: String = (0..20)
        .map(|i| format!("{{\"text\": \"<tool>cats {i}</tool>\", \"label\": \"{}\"}}\n", ["a", "b"][i % 2]))
        .collect();
    fs::write(folder.at("labelled.jsonl"), rows).expect("texts");
    let path = folder.word("data.path", "labelled.jsonl");
    let words = folder.words("base", &[TOKENS, "data.task=classes", "model.head=classes", &path]);
    let config = recipes::resolve("tiny", &[], &words).expect("a config");
    assert_eq!((config.model.vocab(), config.model.classes()), (Some(VOCAB + 2), Some(2)));
}

/// The config of a run has the vocabulary that its model grew to.
#[test]
fn a_run_with_new_tokens_starts_again_from_its_own_config() {
    let folder = TestFolder::new(false);
    folder.train("run", &folder.words("base", &[TOKENS, "train.steps=1", "schedule.warmup_steps=0"]));
    let own = folder.at("run").join("config.toml");
    let own = own.to_str().expect("a path");
    let first = Loaded::open(&folder.at("run"), &[]).expect("a run").config;
    let again = recipes::resolve(own, &[], &[]).expect("the same config");
    assert_eq!((again.model.vocab(), again.model), (Some(VOCAB + 2), first.model));
    let other = recipes::resolve(own, &[], &["model.vocab=310".into()]).expect_err("another vocabulary").0;
    assert!(other.contains("`model.vocab` is 310 and the model of"), "{other}");
}

#[test]
fn new_tokens_that_cannot_be_are_refused() {
    let folder = TestFolder::new(false);
    let refused = |more: &[&str], part: &str| {
        let sentence = recipes::resolve("tiny", &[], &folder.words("base", more)).expect_err(part).0;
        assert!(sentence.contains(part), "{sentence}");
    };
    refused(&["data.new_tokens=['<tool>','the']"], "\"the\", which the tokeniser has already as token");
    refused(&["data.new_tokens=['<a>','<a>']"], "data.new_tokens has \"<a>\" twice");
    refused(&["data.new_tokens=[' ']"], "a blank token");
    refused(&[TOKENS, "train.freeze=embed"], "`train.freeze` names `embed.weight`");
    refused(&[TOKENS, "adapter.kind=lora"], "name embed in adapter.also_train");
    refused(&[TOKENS, "adapter.kind=lora", "adapter.also_train=embed"], "name head in adapter.also_train");
    let words = ["data.new_tokens=['<a>']", "model.value_embeddings=1", "model.tied=false"].map(String::from);
    let files = [folder.word("data.path", "plain.txt"), folder.word("data.tokenizer", "base/tokenizer.json")];
    let sentence = recipes::resolve("tiny", &[], &[&words[..], &files].concat()).expect_err("tables").0;
    assert!(sentence.contains("value embeddings cannot grow"), "{sentence}");
    let alone = ["data.new_tokens=['<a>']", &folder.word("data.path", "tools.txt")].map(String::from);
    let sentence = recipes::resolve("tiny", &[], &alone).expect_err("no tokeniser").0;
    assert!(sentence.contains("there is no tokeniser to add them to"), "{sentence}");
    let synthetic = [&alone[..1], &[folder.word("model.from", "base")]].concat();
    let sentence = recipes::resolve("tiny", &[], &synthetic).expect_err("no text").0;
    assert!(sentence.contains("the synthetic source reads no file"), "{sentence}");
}
