//! GGUF files, version 3: a header, metadata, an entry for each tensor, and the tensors, each at a multiple of 32 bytes.
//!
//! Everything before the tensors is known before any of them is read, so a file is written from front to back and one tensor is in
//! memory at a time.

use std::io::{self, Write};

use flatout_models::library::gguf::Value;

use super::elements::Elements;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// Readers take this for granted where the metadata says nothing.
const ALIGNMENT: usize = 32;

/// A tensor as its entry describes it. Extents are in our order, the innermost last.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub name: String,
    pub dims: Vec<usize>,
    pub elements: Elements,
}

impl Entry {
    pub fn values(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn bytes(&self) -> usize {
        self.elements.bytes(self.values())
    }
}

/// Everything before the tensors.
pub fn head(metadata: &[(String, Value)], entries: &[Entry]) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend((entries.len() as u64).to_le_bytes());
    head.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        string(&mut head, key);
        put(&mut head, value);
    }
    let mut offset = 0;
    for entry in entries {
        string(&mut head, &entry.name);
        head.extend((entry.dims.len() as u32).to_le_bytes());
        entry.dims.iter().rev().for_each(|extent| head.extend((*extent as u64).to_le_bytes()));
        head.extend(entry.elements.code().to_le_bytes());
        head.extend((offset as u64).to_le_bytes());
        offset += entry.bytes().next_multiple_of(ALIGNMENT);
    }
    head.resize(head.len().next_multiple_of(ALIGNMENT), 0);
    head
}

/// Writes a tensor and fills up to where the next one begins.
pub fn tensor(writer: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    writer.write_all(bytes)?;
    writer.write_all(&[0; ALIGNMENT][..bytes.len().next_multiple_of(ALIGNMENT) - bytes.len()])
}

/// The first bytes of a file whose first metadata is this, without the counts of tensors and metadata: the bytes before them and those
/// behind them.
pub fn beginning(key: &str, value: &Value) -> [Vec<u8>; 2] {
    let before = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
    let mut behind = vec![];
    string(&mut behind, key);
    put(&mut behind, value);
    [before, behind]
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A value with its type.
fn put(out: &mut Vec<u8>, value: &Value) {
    const ARRAY: u32 = 9;
    let (kind, len) = match value {
        Value::U32(_) => (4, None),
        Value::F32(_) => (6, None),
        Value::Bool(_) => (7, None),
        Value::String(_) => (8, None),
        Value::I32s(all) => (5, Some(all.len())),
        Value::F32s(all) => (6, Some(all.len())),
        Value::Bools(all) => (7, Some(all.len())),
        Value::Strings(all) => (8, Some(all.len())),
    };
    if len.is_some() {
        out.extend(ARRAY.to_le_bytes());
    }
    out.extend(u32::to_le_bytes(kind));
    out.extend(len.into_iter().flat_map(|len| (len as u64).to_le_bytes()));
    match value {
        Value::U32(number) => out.extend(number.to_le_bytes()),
        Value::F32(number) => out.extend(number.to_le_bytes()),
        Value::Bool(flag) => out.push(u8::from(*flag)),
        Value::String(text) => string(out, text),
        Value::I32s(all) => out.extend(all.iter().flat_map(|number| number.to_le_bytes())),
        Value::F32s(all) => out.extend(all.iter().flat_map(|number| number.to_le_bytes())),
        Value::Bools(all) => out.extend(all.iter().map(|flag| u8::from(*flag))),
        Value::Strings(all) => all.iter().for_each(|text| string(out, text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file that llama.cpp's own package writes: `golden/make_golden.py` makes it.
    #[test]
    fn files_are_those_of_llama_cpps_package() {
        let text = |text: &str| Value::String(text.into());
        let metadata = [
            ("general.architecture", text("llama")),
            ("llama.block_count", Value::U32(2)),
            ("llama.rope.freq_base", Value::F32(10000.0)),
            ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
            ("tokenizer.ggml.pre", text("gpt-2 \u{e9}")),
            ("tokenizer.ggml.token_type", Value::I32s(vec![1, 3, -1])),
            ("tokenizer.ggml.scores", Value::F32s(vec![0.5, -1.0])),
            ("gemma3.attention.sliding_window_pattern", Value::Bools(vec![true, false])),
            ("tokenizer.ggml.tokens", Value::Strings(["a", "\u{120}b", ""].map(String::from).to_vec())),
        ];
        let metadata = metadata.map(|(key, value)| (key.to_string(), value));
        let entry =
            |name: &str, dims: &[usize], elements| Entry { name: name.into(), dims: dims.to_vec(), elements };
        let entries = [
            entry("norm.weight", &[5], Elements::F32),
            entry("F16.weight", &[3, 32], Elements::F16),
            entry("BF16.weight", &[3, 32], Elements::Bf16),
            entry("Q8_0.weight", &[3, 32], Elements::Q8_0),
        ];
        let values: Vec<f32> = (0..96).map(|i| i as f32 - 48.0).collect();
        let mut file = head(&metadata, &entries);
        for entry in &entries {
            tensor(&mut file, &entry.elements.encode(&values[..entry.values()]).unwrap()).unwrap();
        }
        assert!(file == include_bytes!("golden/file.gguf"));
        let [before, behind] = beginning("general.architecture", &text("llama"));
        assert!(file.starts_with(&before) && file[before.len() + 16..].starts_with(&behind));
    }
}
