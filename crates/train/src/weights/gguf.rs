//! A model as one GGUF file, which llama.cpp and what is built on it read: metadata, the tokeniser, and the weights in f32, f16, bf16 or
//! blocks of 8 bits.
//!
//! A run is written with its adapters merged, a folder in the Hugging Face layout as it is. The file is there whole or not at all.

mod elements;
mod target;
mod tokenizer;
mod write;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use flatout_ir::{Init, TensorType};
use flatout_models::config::DecoderConfig;
use flatout_models::library::gguf::{self as library, Metadata, Tensor, Value, Values};
use flatout_settings::choice;
use serde_json::Value as Json;

use crate::Failure;
use crate::UserError;
use crate::refuse;
use crate::weights::adapters::check_merge;
use crate::weights::export::tokenizer::{FILE, SETTINGS, Tokenizer};
use crate::weights::export::{Exported, template};
use crate::weights::loaded::Loaded;
use crate::weights::pretrained::{Weights, parameters};
use elements::{BLOCK, Elements};
use target::{Target, WRITTEN_BY};
use tokenizer::Frame;
use write::Entry;

choice! {
    /// Types of the matrices of a GGUF file; vectors are f32 always.
    pub enum Width { F32 = "f32", F16 = "f16", Bf16 = "bf16", Q8_0 = "q8_0" }
}

impl Width {
    fn elements(self) -> Elements {
        match self {
            Width::F32 => Elements::F32,
            Width::F16 => Elements::F16,
            Width::Bf16 => Elements::Bf16,
            Width::Q8_0 => Elements::Q8_0,
        }
    }
}

/// The file to write.
#[derive(Clone, Debug)]
pub struct Gguf {
    pub to: PathBuf,
    pub dtype: Width,
    /// Whether an earlier export that is there is replaced.
    pub force: bool,
}

/// Exports a model. Whatever is refused is refused before anything is written, but for values that f16 or a block cannot hold: they are
/// found as they are read.
pub fn export(loaded: &mut Loaded, wanted: &Gguf) -> Result<Exported, Failure> {
    let refused =
        |dir: &Path, why: String| UserError(format!("{} cannot be exported to GGUF: {why}", dir.display()));
    let dir = loaded.dir.clone();
    let Some(decoder) = loaded.config.model.as_decoder() else {
        let why =
            format!("`model.kind` is {}, and GGUF files are written of decoders", loaded.config.model.kind());
        return Err(refused(&dir, why).into());
    };
    let model = DecoderConfig { context: loaded.positions, ..decoder.clone() };
    let described = library::describe(&model).map_err(|why| refused(&dir, why))?;
    check_merge(&loaded.config.model, loaded.weights.adapters(), "GGUF files have merged weights alone")?;
    loaded.weights.keep_apart(false);
    let mut metadata = general(&dir, described.architecture, &described.metadata, wanted.dtype);
    metadata.extend(tokens(loaded, model.vocab)?.map_err(|why| refused(&dir, why))?);
    let types = parameters(&loaded.config.model);
    let entries: Vec<Entry> =
        described.tensors.iter().map(|tensor| entry(tensor, &types, wanted.dtype)).collect();
    let target = Target::new(&wanted.to, wanted.force)?;
    let head = write::head(&metadata, &entries);
    target.fill(|path| {
        let file = File::create(path).map_err(Failure::io(path.display()))?;
        let mut writer = BufWriter::with_capacity(4 << 20, file);
        writer.write_all(&head).map_err(Failure::io(path.display()))?;
        for (tensor, entry) in described.tensors.iter().zip(&entries) {
            let values = values(tensor, entry, &loaded.weights, &types)?;
            let bytes =
                entry.elements.encode(&values).map_err(|value| unfit(&entry.name, value, wanted.dtype))?;
            write::tensor(&mut writer, &bytes).map_err(Failure::io(path.display()))?;
        }
        let flushed = writer.into_inner().map_err(io::IntoInnerError::into_error);
        flushed.and_then(|file| file.sync_all()).map_err(Failure::io(path.display()))
    })?;
    let name = wanted.to.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Exported {
        architecture: described.architecture.to_string(),
        files: vec![name],
        parameters: entries.iter().map(|entry| entry.values() as u64).sum(),
        bytes: entries.iter().map(|entry| entry.bytes() as u64).sum(),
    })
}

fn unfit(tensor: &str, value: f32, dtype: Width) -> Failure {
    let sentence = match value.is_finite() {
        true => format!(
            "{tensor} has the value {value}, which is too large for {dtype}: export with --dtype bf16"
        ),
        false => format!(
            "{tensor} has the value {value}, and blocks of {dtype} hold finite values alone: export a checkpoint from before the weights were \
             spoiled, or with --dtype bf16 to keep them as they are"
        ),
    };
    UserError(sentence).into()
}

/// The metadata that is not the tokeniser's. The first says who wrote the file.
fn general(dir: &Path, architecture: &str, own: &Metadata, dtype: Width) -> Metadata {
    let text = |text: &str| Value::String(text.into());
    let name = dir.canonicalize().unwrap_or(dir.to_path_buf());
    let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (key, value) = WRITTEN_BY;
    let mut all: Metadata = vec![
        (key.into(), text(value)),
        ("general.architecture".into(), text(architecture)),
        ("general.type".into(), text("model")),
        ("general.name".into(), text(&name)),
        ("general.file_type".into(), Value::U32(dtype.elements().file_code())),
        ("general.quantization_version".into(), Value::U32(2)),
    ];
    all.extend(own.iter().cloned());
    all
}

/// The tokeniser's metadata, or why there is none.
fn tokens(loaded: &mut Loaded, rows: usize) -> Result<Result<Metadata, String>, Failure> {
    let tokenizer = Tokenizer::of(loaded);
    let parsed = |name: &str| {
        let files = tokenizer.files(loaded.positions);
        let bytes = files.into_iter().find(|(known, _)| *known == name).map(|(_, bytes)| bytes);
        bytes.and_then(|bytes| serde_json::from_slice::<Json>(&bytes).ok())
    };
    let (Some(vocabulary), Some(file)) = (&tokenizer.vocabulary, parsed(FILE)) else {
        return Ok(Err("it has no tokenizer.json, and a GGUF file has its tokeniser inside".into()));
    };
    let of_config = || match &parsed(SETTINGS)?["chat_template"] {
        Json::String(template) => Some(template.clone()),
        // Several have names.
        Json::Array(all) => {
            let default = all.iter().find(|one| one["name"] == "default")?;
            default["template"].as_str().map(str::to_string)
        }
        _ => None,
    };
    let of_file = || tokenizer.kept("chat_template.jinja").and_then(|bytes| String::from_utf8(bytes).ok());
    // A token's spelling, or an object that has it.
    let special = |name: &str| {
        let settings = parsed(SETTINGS)?;
        let said = &settings[name];
        vocabulary.id(said.as_str().or(said["content"].as_str())?)
    };
    let learned = template(loaded, &tokenizer)?;
    let eos = vocabulary.eos();
    let frame = Frame {
        rows,
        bos: vocabulary.bos(),
        eos,
        end_of_turn: loaded.stops.iter().copied().find(|stop| *stop != eos),
        unknown: file["model"]["unk_token"]
            .as_str()
            .and_then(|token| vocabulary.id(token))
            .or_else(|| special("unk_token")),
        padding: special("pad_token").or_else(|| u32::try_from(file["padding"]["pad_id"].as_u64()?).ok()),
        chat_template: learned.or_else(of_file).or_else(of_config),
    };
    Ok(tokenizer::describe(&file, &frame))
}

/// Every parameter with its type and first values.
type Types = BTreeMap<String, (TensorType, Init)>;

/// Vectors are f32, and so little that nobody misses the bytes. Rows that do not fill blocks are f16.
fn entry(tensor: &Tensor, types: &Types, dtype: Width) -> Entry {
    let dims = match &tensor.values {
        Values::Weight { path, .. } => types[path].0.dims.clone(),
        Values::Vector(values) => vec![values.len()],
    };
    let elements = match dtype.elements() {
        _ if dims.len() < 2 => Elements::F32,
        Elements::Q8_0 if !dims[dims.len() - 1].is_multiple_of(BLOCK) => Elements::F16,
        elements => elements,
    };
    Entry { name: tensor.name.clone(), dims, elements }
}

fn values(tensor: &Tensor, entry: &Entry, weights: &Weights, types: &Types) -> Result<Vec<f32>, Failure> {
    match &tensor.values {
        Values::Vector(values) => Ok(values.clone()),
        Values::Weight { path, change } => {
            let (ty, init) = &types[path];
            let (wide, _) = weights.read(path, ty, init)?;
            let values = wide.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
            Ok(change.apply(values, entry.dims[0]))
        }
    }
}

/// Whether some matrices stay f16 because their rows do not fill blocks.
pub fn is_partly_f16(model: &DecoderConfig, dtype: Width) -> bool {
    let inner = [model.width, model.ffn, model.heads * model.head_size()];
    dtype == Width::Q8_0 && inner.iter().any(|extent| !extent.is_multiple_of(BLOCK))
}

/// Refuses a name that nobody would take for such a file.
pub fn check_name(to: &Path) -> Result<(), UserError> {
    if to.extension().is_none_or(|end| !end.eq_ignore_ascii_case("gguf")) {
        refuse!(
            "--to names the file to make with --format gguf, and {} does not end in .gguf: call it {}.gguf",
            to.display(),
            to.display()
        );
    }
    Ok(())
}
