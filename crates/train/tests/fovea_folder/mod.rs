//! Writes the tiny foveated model in its authors' format, with the tokeniser and the chat template of the tiny Qwen3-VL.

use std::fs;
use std::path::Path;

use flatout_train::run::checkpoint::{Dtype, TensorFile, header};
use serde_json::{Value, json};

/// Tokens of the tokeniser; the fixture's embedding has fewer rows, so its first rows are repeated.
const WORDS: usize = 97;

/// Writes the model and the files beside it.
pub fn write(folder: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden");
    fs::create_dir_all(folder).expect("a folder");
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"] {
        fs::copy(golden.join("qwen3-vl-generate").join(file), folder.join(file)).expect("a copy");
    }
    let text = fs::read_to_string(golden.join("fovea.json")).expect("a file");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    config["text_config"]["vocab_size"] = json!(WORDS);
    fs::write(folder.join("config.json"), config.to_string()).expect("a file");
    let file = TensorFile::open(&golden.join("fovea-weights.safetensors")).expect("weights");
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = vec![];
    for (name, entry) in file.entries() {
        let mut bytes = vec![0; entry.shape.iter().product()];
        file.read_into(name, &mut bytes).expect("a tensor");
        let is_factor = name.ends_with("lambda1") || name.contains("norm") && name.ends_with("weight");
        let offset = if is_factor { 1.0 } else { 0.0 };
        let values = bytes.iter().map(|byte| (*byte as f32 - 128.0) / 128.0 + offset);
        let mut shape = entry.shape.clone();
        if name == "llm.model.embed_tokens.weight" {
            shape[0] = WORDS;
        }
        let values = values.collect::<Vec<_>>().into_iter().cycle().take(shape.iter().product()).collect();
        tensors.push((name.clone(), shape, values));
    }
    let described: Vec<_> =
        tensors.iter().map(|(name, shape, _)| (name.as_str(), Dtype::F32, shape.as_slice())).collect();
    let mut written = header(&described, &[("format", "pt")]).expect("a header");
    tensors.iter().for_each(|(.., values)| written.extend(values.iter().flat_map(|x| x.to_le_bytes())));
    fs::write(folder.join("model.safetensors"), written).expect("a file");
}
