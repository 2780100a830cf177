//! Damaged checkpoints of other programs: the result is a model or an error message, in bounded time and memory.

use std::fs;
use std::path::{Path, PathBuf};

use flatout_fuzz::{Limits, feed};
use flatout_train::weights::pretrained::folder;

const SHARD: &str = "model-00001-of-00009.safetensors";

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/checkpoints").join(name)
}

/// A copy of a checkpoint that may be damaged.
fn copy(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(golden(name)).expect("a checkpoint").flatten() {
        fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("a file");
    }
    copy
}

/// Feeds damaged forms of one file and reads its folder.
fn damaged(parser: &str, model: &str, file: &str, more: &[&[u8]]) {
    let folder = copy(model);
    let path = folder.path().join(file);
    let whole = fs::read(&path).expect("a file");
    let seeds: Vec<Vec<u8>> = [whole].into_iter().chain(more.iter().map(|seed| seed.to_vec())).collect();
    let read = || {
        let described = folder::describe(folder.path())?;
        folder::weights(folder.path(), &described.model, described.headless.is_some()).map(|_| ())
    };
    read().expect("the file as it is can be read");
    feed(parser, &seeds, Limits::default(), |bytes| {
        fs::write(&path, bytes).expect("a file");
        if let Err(error) = read() {
            let said = error.to_string();
            assert!(!said.is_empty() && !said.contains(char::is_control), "one sentence: {said}");
        }
    });
}

#[test]
fn a_header() {
    let lies = br#"{"model.norm.weight":{"dtype":"F32","shape":[20],"data_offsets":[0,80]}}"#;
    let lies = [&(lies.len() as u64).to_le_bytes()[..], lies, &[0; 80]].concat();
    damaged("safetensors", "llama", "model.safetensors", &[&lies]);
}

#[test]
fn a_shard() {
    damaged("shard", "llama-bf16-shards", SHARD, &[]);
}

#[test]
fn an_index() {
    let lies = br#"{"metadata":{},"weight_map":{"a":"../x.safetensors","b":"/x.safetensors","c":7}}"#;
    damaged("index", "llama-bf16-shards", "model.safetensors.index.json", &[lies]);
}

#[test]
fn a_config() {
    let older = fs::read(golden("qwen3-untied-shards").join("config.json")).expect("a file");
    damaged("config", "llama", "config.json", &[&older]);
}
