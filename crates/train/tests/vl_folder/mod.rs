//! Writes a tiny Qwen3-VL as the library stores it, with a tokeniser, a chat template and limits of images: the model that
//! `make_vl_generate.py` uses.

use std::fs;
use std::path::{Path, PathBuf};

use flatout_train::run::checkpoint::{Dtype, TensorFile, header};
use serde_json::Value;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden")
}

/// A picture that the prompts refer to.
pub fn picture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/pictures").join(name)
}

/// The prompts, and the library's tokens of each.
pub fn expected() -> Vec<Value> {
    let text = fs::read_to_string(golden().join("qwen3-vl-generate/expected.json")).expect("a file");
    serde_json::from_str(&text).expect("a list")
}

/// Writes the model and the files beside it.
pub fn write(folder: &Path) {
    fs::create_dir_all(folder).expect("a folder");
    for entry in fs::read_dir(golden().join("qwen3-vl-generate")).expect("a folder").flatten() {
        if entry.file_name() != "expected.json" {
            fs::copy(entry.path(), folder.join(entry.file_name())).expect("a copy");
        }
    }
    fs::copy(golden().join("qwen3-vl.json"), folder.join("config.json")).expect("a copy");
    let file = TensorFile::open(&golden().join("qwen3-vl-weights.safetensors")).expect("weights");
    let shapes: Vec<(String, Vec<usize>)> =
        file.entries().iter().map(|(name, entry)| (name.clone(), entry.shape.clone())).collect();
    let described: Vec<_> =
        shapes.iter().map(|(name, shape)| (name.as_str(), Dtype::F32, shape.as_slice())).collect();
    let mut written = header(&described, &[("format", "pt")]).expect("a header");
    for (name, shape) in &shapes {
        let mut bytes = vec![0; shape.iter().product()];
        file.read_into(name, &mut bytes).expect("a tensor");
        let offset = if name.contains("norm") && name.ends_with(".weight") { 1.0 } else { 0.0 };
        let values = bytes.iter().map(|byte| (*byte as f32 - 128.0) / 128.0 + offset);
        written.extend(values.flat_map(f32::to_le_bytes));
    }
    fs::write(folder.join("model.safetensors"), written).expect("a file");
}
