//! Pretrained models that are damaged, inconsistent or of another kind: one sentence with exit code 2 before any device work, and nothing
//! is written.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::program::{self, execute, small_train};

/// Copies the files of a complete model, as other tools write it.
fn copy_model(name: &str, to: &Path) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/checkpoints").join(name);
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a checkpoint").flatten() {
        let name = entry.file_name().into_string().expect("a name");
        if name.starts_with("model") || name == "config.json" {
            fs::copy(entry.path(), to.join(name)).expect("a file");
        }
    }
}

/// The header and the data of a safetensors file.
fn parts(path: &Path) -> (Value, Vec<u8>) {
    let bytes = fs::read(path).expect("a file");
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    (serde_json::from_slice(&bytes[8..header]).expect("a header"), bytes[header..].to_vec())
}

fn put(path: &Path, header: &str, data: &[u8]) {
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat();
    fs::write(path, bytes).expect("a file");
}

/// A `tokenizer.json` with this many words.
fn tokenizer(size: usize) -> String {
    let words =
        ["<s>", "</s>"].iter().map(|word| word.to_string()).chain((0..size - 2).map(|i| format!("w{i}")));
    let vocab: serde_json::Map<String, Value> = words.zip((0..).map(Value::from)).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "w0" },
    })
    .to_string()
}

/// Changes the header of the model's file.
fn header(model: &Path, change: impl Fn(&mut Value)) {
    let path = model.join("model.safetensors");
    let (mut header, data) = parts(&path);
    change(&mut header);
    put(&path, &header.to_string(), &data);
}

fn config(model: &Path, change: impl Fn(&mut Value)) {
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    change(&mut config);
    fs::write(path, config.to_string()).expect("a file");
}

fn index(model: &Path, change: impl Fn(&mut Value)) {
    let path = model.join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    change(&mut index);
    fs::write(path, index.to_string()).expect("a file");
}

const Q: &str = "model.layers.0.self_attn.q_proj.weight";
const NORM: &str = "model.norm.weight";
const FIRST: &str = "model-00001-of-00009.safetensors";
/// A Git LFS pointer, as a clone without its large files has in their place.
const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";

/// The damage done to a model, and words of the error.
type Case = (&'static str, fn(&Path), &'static str);

const ONE_FILE: &[Case] = &[
    (
        "a header larger than the file",
        |m| {
            let path = m.join("model.safetensors");
            let mut bytes = fs::read(&path).unwrap();
            bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
            fs::write(path, bytes).unwrap();
        },
        "model.safetensors is broken: its header would be 18446744073709551615 bytes",
    ),
    (
        "a header that is not JSON",
        |m| put(&m.join("model.safetensors"), "{\"a\": ", &[]),
        "is not the format's JSON",
    ),
    (
        "a header that is no object",
        |m| put(&m.join("model.safetensors"), "[1, 2]", &[]),
        "is not the format's JSON",
    ),
    ("an empty file", |m| fs::write(m.join("model.safetensors"), "").unwrap(), "it has no header"),
    (
        "a file that was cut off",
        |m| {
            let path = m.join("model.safetensors");
            let bytes = fs::read(&path).unwrap();
            fs::write(path, &bytes[..bytes.len() - 9]).unwrap();
        },
        "it was cut off, so fetch or copy it again",
    ),
    (
        "a pointer of Git LFS for weights",
        |m| fs::write(m.join("model.safetensors"), POINTER).unwrap(),
        "model.safetensors is a pointer of Git LFS, and the file itself was not fetched",
    ),
    (
        "a pointer of Git LFS for the config",
        |m| fs::write(m.join("config.json"), POINTER).unwrap(),
        "config.json is a pointer of Git LFS",
    ),
    (
        "a weight that is not finite",
        |m| {
            let path = m.join("model.safetensors");
            let mut bytes = fs::read(&path).unwrap();
            let last = bytes.len() - 4;
            bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
            fs::write(path, bytes).unwrap();
        },
        "has values that are not finite",
    ),
    (
        "overlapping tensors",
        |m| {
            header(m, |h| {
                let other = h["model.layers.1.self_attn.q_proj.weight"]["data_offsets"].clone();
                h[Q]["data_offsets"] = other;
            })
        },
        "share bytes",
    ),
    ("offsets outside", |m| header(m, |h| h[Q]["data_offsets"] = json!([99_999_000, 99_999_000 + 2400])), Q),
    ("offsets that run backwards", |m| header(m, |h| h[NORM]["data_offsets"] = json!([80, 0])), NORM),
    ("offsets that are not the shape's", |m| header(m, |h| h[NORM]["shape"] = json!([7])), NORM),
    (
        "a shape that overflows",
        |m| header(m, |h| h[NORM]["shape"] = json!([u64::MAX, u64::MAX])),
        "model.safetensors is broken",
    ),
    ("a type that does not exist", |m| header(m, |h| h[NORM]["dtype"] = json!("F33")), "`F33`"),
    ("a type that is not read", |m| header(m, |h| h[NORM]["dtype"] = json!("I32")), "holds I32"),
    (
        "a tensor twice",
        |m| {
            let path = m.join("model.safetensors");
            let (header, data) = parts(&path);
            let again = format!("{{\"{NORM}\":{},{}", header[NORM], &header.to_string()[1..]);
            put(&path, &again, &data);
        },
        "`model.norm.weight` twice",
    ),
    ("another shape", |m| header(m, |h| h[NORM]["shape"] = json!([4, 5])), "has shape [4, 5], and [20]"),
    (
        "a tensor missing in the header",
        |m| header(m, |h| drop(h.as_object_mut().unwrap().remove(NORM))),
        "model.safetensors is broken: ",
    ),
    (
        "a tensor nobody knows",
        |m| {
            let path = m.join("model.safetensors");
            let (mut header, mut data) = parts(&path);
            header["model.layers.0.self_attn.q_proj.bias"] =
                json!({ "dtype": "F32", "shape": [1], "data_offsets": [data.len(), data.len() + 4] });
            data.extend([0; 4]);
            put(&path, &header.to_string(), &data);
        },
        "has `model.layers.0.self_attn.q_proj.bias`, which the model",
    ),
    (
        "a config of other widths",
        |m| config(m, |c| c["hidden_size"] = json!(24)),
        "is what config.json describes",
    ),
    (
        "a config of fewer layers",
        |m| config(m, |c| c["num_hidden_layers"] = json!(1)),
        "has `model.layers.1.",
    ),
    (
        "a config of more layers",
        |m| config(m, |c| c["num_hidden_layers"] = json!(3)),
        "and 6 more of the model",
    ),
    (
        "an adapter and no model",
        |m| fs::rename(m.join("config.json"), m.join("adapter_config.json")).unwrap(),
        "has an adapter and no model: give the model that it was trained with as model.from",
    ),
    ("no config", |m| fs::remove_file(m.join("config.json")).unwrap(), "neither config.toml nor config.json"),
    ("a broken config", |m| fs::write(m.join("config.json"), "{").unwrap(), "config.json is not JSON"),
    (
        "a config that is a list",
        |m| fs::write(m.join("config.json"), "[]").unwrap(),
        "it is not a JSON object",
    ),
    (
        "another architecture",
        |m| config(m, |c| c["model_type"] = json!("mixtral")),
        "`model_type` is \"mixtral\", which is a mixture of experts",
    ),
    (
        "a classifier",
        |m| config(m, |c| c["architectures"] = json!(["LlamaForTokenClassification"])),
        "LlamaForTokenClassification",
    ),
    (
        "quantised weights",
        |m| config(m, |c| c["quantization_config"] = json!({ "bits": 4 })),
        "`quantization_config`",
    ),
    (
        "weights in fp4",
        |m| {
            config(m, |c| {
                c["quantization_config"] = json!({ "quant_method": "bitsandbytes", "load_in_4bit": true })
            })
        },
        "has bnb_4bit_quant_type fp4, and of bitsandbytes' forms only nf4 is read",
    ),
    (
        "weights in eight bits",
        |m| {
            config(m, |c| {
                c["quantization_config"] = json!({ "quant_method": "bitsandbytes", "load_in_8bit": true })
            })
        },
        "has load_in_8bit",
    ),
    (
        "weights that are said to be in four bits",
        |m| {
            let result =
                json!({ "quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4" });
            config(m, |c| c["quantization_config"] = result.clone());
        },
        "has no quantised weight",
    ),
    (
        "only pickles",
        |m| fs::rename(m.join("model.safetensors"), m.join("pytorch_model.bin")).unwrap(),
        "only as pickles (pytorch_model.bin)",
    ),
    ("no weights", |m| fs::remove_file(m.join("model.safetensors")).unwrap(), "has no weights"),
    (
        "a tokenizer of another model",
        |m| fs::write(m.join("tokenizer.json"), tokenizer(62)).unwrap(),
        "has 62 tokens and the model 53: it belongs to another model",
    ),
    (
        "a tokenizer without the model's last token",
        |m| {
            fs::write(m.join("tokenizer.json"), tokenizer(30)).unwrap();
            config(m, |c| c["eos_token_id"] = json!(31));
        },
        "ends texts with token 31, and its tokenizer.json has only 30",
    ),
    (
        "a pointer of Git LFS for the tokenizer",
        |m| fs::write(m.join("tokenizer.json"), POINTER).unwrap(),
        "tokenizer.json is a pointer of Git LFS",
    ),
    (
        "a broken tokenizer",
        |m| fs::write(m.join("tokenizer.json"), "{").unwrap(),
        "not a usable tokenizer.json",
    ),
];

const SHARDS: &[Case] = &[
    ("a shard missing", |m| fs::remove_file(m.join(FIRST)).unwrap(), "00001-of-00009.safetensors is missing"),
    (
        "an index that leads outside",
        |m| index(m, |i| i["weight_map"][NORM] = json!("../model.safetensors")),
        "into \"../model.safetensors\": a shard is",
    ),
    (
        "an absolute path",
        |m| index(m, |i| i["weight_map"][NORM] = json!("/etc/model.safetensors")),
        "into \"/etc/model.safetensors\": a shard is",
    ),
    (
        "an index of pickles",
        |m| index(m, |i| i["weight_map"][NORM] = json!("pytorch_model.bin")),
        "into \"pytorch_model.bin\": a shard is",
    ),
    ("an index of numbers", |m| index(m, |i| i["weight_map"][NORM] = json!(3)), "is 3, and must be a name"),
    (
        "an index without a map",
        |m| index(m, |i| drop(i.as_object_mut().unwrap().remove("weight_map"))),
        "`weight_map`",
    ),
    (
        "a broken index",
        |m| fs::write(m.join("model.safetensors.index.json"), "{\"weight_map\": {").unwrap(),
        "index.json is not JSON",
    ),
    (
        "an index that lies about a shard",
        |m| index(m, |i| i["weight_map"][NORM] = json!(FIRST)),
        "has `model.norm.weight`, but it does not",
    ),
    (
        "a tensor in two shards",
        |m| {
            fs::copy(m.join(FIRST), m.join("more.safetensors")).unwrap();
            index(m, |i| i["weight_map"]["another"] = json!("more.safetensors"));
        },
        "twice: in model-00001-of-00009.safetensors and in more.safetensors",
    ),
];

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).expect("a folder").map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Asserts that every command that would use the model refuses it with the same sentence and leaves nothing behind.
fn refused(dir: &Path, what: &str, words: &str) {
    let before = names(dir);
    let from = "model.from=bad";
    let training = small_train_from(from);
    for command in [&["logits", "bad", "--ids", "ids.json", "--out", "out.safetensors"][..], &training] {
        program::refused(dir, command, words);
    }
    assert_eq!(names(dir), before, "{what} left something behind");
}

fn small_train_from(from: &str) -> Vec<&str> {
    vec![
        "train",
        "tiny",
        "train.steps=1",
        "warmup_steps=0",
        "eval.rows=0",
        "data.path=book.txt",
        "backend=cpu",
        from,
    ]
}

fn each(model: &str, cases: &[Case]) {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    fs::write(dir.join("ids.json"), "[[1, 2, 3]]").expect("a file");
    fs::write(dir.join("book.txt"), "w1 w2 w3 w4 w5 w6\n".repeat(400)).expect("a file");
    for (what, change, words) in cases {
        copy_model(model, &dir.join("bad"));
        fs::write(dir.join("bad/tokenizer.json"), tokenizer(53)).expect("a file");
        change(&dir.join("bad"));
        refused(dir, what, words);
        fs::remove_dir_all(dir.join("bad")).expect("a folder");
    }
}

#[test]
fn models_in_one_file() {
    each("llama", ONE_FILE);
}

#[test]
fn models_in_shards() {
    each("llama-bf16-shards", SHARDS);
}

#[test]
fn ids_that_are_not_the_models() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    copy_model("llama", &dir.join("model"));
    for (ids, words) in [
        ("[[1, 53]]", "row 0 has token 53, and the model's vocabulary is 53"),
        ("[[1], []]", "row 1 has no tokens"),
        ("[]", "has no rows"),
        ("[[-1]]", "must hold rows of token ids"),
        ("{", "must hold rows of token ids"),
    ] {
        fs::write(dir.join("ids.json"), ids).expect("a file");
        let result = execute(dir, &["logits", "model", "--ids", "ids.json", "--out", "out.safetensors"]);
        result.assert_refused(&[words]);
        assert!(!dir.join("out.safetensors").exists());
    }
    let long = format!("[[{}]]", vec!["1"; 65].join(","));
    fs::write(dir.join("ids.json"), long).expect("a file");
    let result = execute(dir, &["logits", "model", "--ids", "ids.json", "--out", "out.safetensors"]);
    assert!(result.err.contains("row 0 has 65 tokens, and the model was made for 64"), "{result:?}");
}

#[test]
fn keys_that_contradict_the_model() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    copy_model("llama", &dir.join("model"));
    for (word, words) in [
        ("model.width=64", "`model.width` is 64 and the model of model has 20: leave it out"),
        ("model.vocab=53", ""),
        ("model.from=nowhere", "there is no such folder or run"),
        ("model.from=./org/name", "there is no such folder or run"),
    ] {
        let result = execute(dir, &["plan", "tiny", "model.from=model", word]);
        let code = if words.is_empty() { 0 } else { 2 };
        assert!(result.code == Some(code) && result.err.contains(words), "{word}: {result:?}");
    }
    // Without a tokeniser the model cannot read text.
    fs::write(dir.join("book.txt"), "Some text.\n".repeat(500)).expect("a file");
    let result = execute(dir, &["train", "tiny", "model.from=model", "data.path=book.txt"]);
    result.assert_refused(&["model has no tokenizer.json"]);
    let result = execute(dir, &["generate", "model", "--prompt", "a"]);
    result.assert_refused(&["has no tokenizer.json"]);
    let result = execute(dir, &small_train(&["model.from=model"]));
    result.assert_refused(&["leave it out"]);
}
