//! Encoders in files: bodies under all names that their tensors may have, with and without a pooler, runs that begin from them,
//! and the exports of those runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use flatout_data::{Example, ExampleTable, Vocabulary};
use flatout_runtime::{Session, cpu};
use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::infer::classify::logits;
use flatout_train::recipes;
use flatout_train::resolve::compile;
use flatout_train::run::checkpoint::{Dtype, TensorFile, header};
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::loaded::Loaded;
use flatout_train::weights::pretrained;
use serde_json::{Value, json};

use crate::class_run::run_in;
use crate::distance::relative;

fn family(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/families").join(name)
}

/// Tensors in f32 with their shapes, by name.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn tensors(folder: &Path) -> Tensors {
    let file = TensorFile::open(&folder.join("model.safetensors")).expect("a file");
    let names: Vec<(String, Vec<usize>)> =
        file.entries().iter().map(|(name, entry)| (name.clone(), entry.shape.clone())).collect();
    let read = |(name, shape): (String, Vec<usize>)| {
        let mut bytes = vec![0; 4 * shape.iter().product::<usize>()];
        file.read_into(&name, &mut bytes).expect("a tensor");
        (name, (shape, bytes))
    };
    names.into_iter().map(read).collect()
}

/// A family's folder with other tensors and another class.
fn folder(at: &Path, family_name: &str, class: &str, tensors: &Tensors) {
    fs::create_dir_all(at).expect("a folder");
    let config = fs::read(family(family_name).join("config.json")).expect("a file");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["architectures"] = json!([class]);
    fs::write(at.join("config.json"), config.to_string()).expect("a file");
    let described: Vec<_> =
        tensors.iter().map(|(name, (shape, _))| (name.as_str(), Dtype::F32, shape.as_slice())).collect();
    let values = tensors.values().flat_map(|(_, bytes)| bytes);
    let all = header(&described, &[]).expect("a header").into_iter().chain(values.copied());
    fs::write(at.join("model.safetensors"), all.collect::<Vec<u8>>()).expect("a file");
}

/// A run from a folder, with a tokeniser of as many words as the fixtures have tokens.
fn config(scratch: &Path, from: &Path, more: &[&str]) -> Result<Config, String> {
    let from = format!("model.from={}", from.display());
    let words = ["<bos>", "<eos>"].map(String::from).into_iter().chain((2..29).map(|n| format!("w{n}")));
    let path = scratch.join("tokenizer.json");
    Vocabulary::from_words(&words.collect::<Vec<_>>()).save(&path).expect("a tokeniser");
    let tokenizer = format!("data.tokenizer={}", path.display());
    let words = [
        &from,
        &tokenizer,
        "data.task=classes",
        "model.head=classes",
        "train.batch=4",
        "eval.rows=0",
        "warmup_steps=0",
    ];
    let words: Vec<String> = words.iter().chain(more).map(|word| word.to_string()).collect();
    recipes::resolve("tiny", &[], &words).map_err(|error| error.0)
}

/// A session with the initial parameters of a run.
fn begun(config: &Config) -> Session {
    let compiled = compile::compile(config, &cpu::target(2)).expect("plans");
    let mut session = Session::new(compiled.plans, 2).expect("a session");
    pretrained::begin(config, &mut session).expect("weights");
    session
}

/// Pairs of texts, the second of which begins after the third token.
fn pairs(vocab: u32) -> ExampleTable {
    let mut table = ExampleTable::default();
    for i in 0..12u32 {
        let tokens: Vec<u32> = (0..6 + i % 5).map(|at| 2 + (7 * i + 3 * at) % (vocab - 2)).collect();
        let weights = vec![0.0; tokens.len()];
        table.push(Example { tokens: &tokens, weights: &weights, label: Some(i % 3), images: &[] });
        table.set_second(Some(3));
    }
    table
}

/// Old files call the vectors of norms gamma and beta, files of the body omit its name, and both may contain the pooler.
#[test]
fn a_body_is_read_under_every_name_its_tensors_have() {
    let scratch = tempfile::tempdir().expect("a folder");
    let own = tensors(&family("bert"));
    let body = || own.iter().filter(|(name, _)| name.starts_with("bert."));
    let older = |name: &str| {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    };
    let bare: Tensors =
        body().map(|(name, tensor)| (older(name.strip_prefix("bert.").unwrap()), tensor.clone())).collect();
    let mut masked: Tensors = body()
        .filter(|(name, _)| !name.contains("pooler"))
        .map(|(name, tensor)| (older(name), tensor.clone()))
        .collect();
    masked.insert("cls.predictions.bias".into(), (vec![29], vec![0; 4 * 29]));
    masked.insert("bert.embeddings.position_ids".into(), (vec![1], vec![0; 4]));
    let at = |name: &str| scratch.path().join(name);
    folder(&at("bare"), "bert", "BertModel", &bare);
    folder(&at("masked"), "bert", "BertForMaskedLM", &masked);

    let more = ["model.classes=5", "train.steps=1"];
    let f32s = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
    };
    let pooler = f32s(&own["bert.pooler.dense.weight"].1);
    for (name, has_pooler) in [("bare", true), ("masked", false)] {
        let session = begun(&config(scratch.path(), &at(name), &more).expect("a config"));
        let norm = session.read_f32("layers.1.ffn_residual_norm").expect("a norm");
        assert_eq!(norm, f32s(&own["bert.encoder.layer.1.output.LayerNorm.weight"].1), "{name}");
        let dense = session.read_f32("score.dense").expect("the layer before the classes");
        assert_eq!(dense == pooler, has_pooler, "{name}");
        assert_eq!(session.read_f32("score.weight").expect("a head").len(), 5 * 12);
    }
    let words = [format!("model.from={}", at("bare").display()), "model.classes=5".into()];
    let tokenizer = format!("data.tokenizer={}", at("tokenizer.json").display());
    let by_recipe =
        recipes::resolve("text-classify", &[], &[&words[..], &[tokenizer]].concat()).expect("a config");
    assert_eq!(by_recipe.model.decoder().pooling.name(), "cls", "the recipe's is another model's");
    let mean =
        config(scratch.path(), &at("bare"), &["model.classes=5", "model.pooling=mean", "train.steps=1"])
            .expect("a config");
    let refused = pretrained::check(&mean, &mut |_| {}).unwrap_err().0;
    assert!(refused.contains("a BertForSequenceClassification pools by cls"), "{refused}");
    let refused = config(scratch.path(), &at("bare"), &["model.head=tokens"]).unwrap_err();
    assert!(refused.contains("is an encoder, which predicts no next token"), "{refused}");

    let mut lacking = bare.clone();
    lacking.remove("encoder.layer.0.output.dense.bias");
    folder(&at("lacking"), "bert", "BertModel", &lacking);
    let lacking = config(scratch.path(), &at("lacking"), &more).expect("a config");
    let refused = pretrained::check(&lacking, &mut |_| {}).unwrap_err().0;
    assert!(refused.contains("lacks `bert.encoder.layer.0.output.dense.bias`"), "{refused}");
}

/// Every family trains on pairs, and its export computes what the run does.
#[test]
fn runs_from_encoders_are_exported_and_read_back() {
    let scratch = tempfile::tempdir().expect("a folder");
    let device = Device::cpu();
    for (name, class) in [
        ("bert", "BertForSequenceClassification"),
        ("roberta", "RobertaForSequenceClassification"),
        ("distilbert", "DistilBertForSequenceClassification"),
    ] {
        let at = |what: &str| scratch.path().join(format!("{name}-{what}"));
        let config =
            config(scratch.path(), &family(name), &["train.steps=3", "lr=1e-2", "model.dropout=0.1"])
                .expect("a config");
        let table = pairs(29);
        run_in(&at("run"), &config, &(table.clone(), table.clone()));
        let open = |what: &str| Loaded::open(&at(what), &[]).expect("a model");
        let wanted =
            Export { to: at("out"), dtype: Width::F32, shard_bytes: 1 << 30, force: false, adapter: false };
        assert_eq!(export(&mut open("run"), &wanted).expect("a folder").architecture, class);
        let of = |what: &str, table: &ExampleTable| {
            logits(&mut open(what), &device, table).expect("logits").concat()
        };
        let ours = of("run", &table);
        assert!(relative(&of("out", &table), &ours) < 1e-6, "{name}");
        // Only BERT has two token types.
        let mut untyped = ExampleTable::default();
        table.iter().for_each(|example| untyped.push(example));
        let off = relative(&of("run", &untyped), &ours);
        assert_eq!(off > 1e-3, name == "bert", "{name}: types move logits by {off:.1e}");
        let (before, after) = (tensors(&family(name)), tensors(&at("out")));
        assert!(before.keys().eq(after.keys()), "{name} has the tensors it came with");
        let moved = before.iter().filter(|(name, tensor)| after[*name] != **tensor).count();
        assert!(moved > before.len() - 4, "{name}: {moved} of {} tensors were trained", before.len());
    }
}

/// RoBERTa's positions begin after the padding index, whatever the length of rows is.
#[test]
fn fewer_positions_are_the_first_of_a_text() {
    let scratch = tempfile::tempdir().expect("a folder");
    let config =
        config(scratch.path(), &family("roberta"), &["model.context=9", "train.steps=1"]).expect("a config");
    let first = begun(&config).read_f32("positions.weight").expect("positions");
    let all = tensors(&family("roberta"));
    let (shape, bytes) = &all["roberta.embeddings.position_embeddings.weight"];
    let rows: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
    assert_eq!((shape[0], first), (29, rows[2 * 12..11 * 12].to_vec()));
}
