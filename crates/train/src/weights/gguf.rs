//! Exports a model as one GGUF file for llama.cpp and programs built on it: metadata, the tokeniser, and the weights in f32, f16,
//! bf16 or 8-bit blocks.
//!
//! A run is written with its adapters merged, a folder in the Hugging Face layout unchanged. The file appears atomically.

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
use tokenizer::TokenFacts;
use write::Entry;

choice! {
    /// Element types of the matrices in a GGUF file; vectors are always f32.
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

/// The requested file.
#[derive(Clone, Debug)]
pub struct Gguf {
    pub to: PathBuf,
    pub dtype: Width,
    /// Whether an existing export is replaced.
    pub force: bool,
}

/// Exports a model. Refusals come before anything is written, except for values that f16 or a block cannot hold, which are found
/// while weights are read.
pub fn export(loaded: &mut Loaded, wanted: &Gguf) -> Result<Exported, Failure> {
    let refused =
        |dir: &Path, why: String| UserError(format!("{} cannot be exported to GGUF: {why}", dir.display()));
    let dir = loaded.dir.clone();
    let Some(decoder) = loaded.config.model.as_decoder() else {
        let why = format!(
            "`model.kind` is {}, and only decoders can be written to GGUF files",
            loaded.config.model.kind()
        );
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

/// The metadata except the tokeniser's. The first entry identifies the program that wrote the file.
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

/// The tokeniser's metadata, or the reason why there is none.
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
        // A file may have several named templates.
        Json::Array(all) => {
            let default = all.iter().find(|one| one["name"] == "default")?;
            default["template"].as_str().map(str::to_string)
        }
        _ => None,
    };
    let of_file = || tokenizer.kept("chat_template.jinja").and_then(|bytes| String::from_utf8(bytes).ok());
    // A token's text, or an object that contains it.
    let special = |name: &str| {
        let settings = parsed(SETTINGS)?;
        let setting = &settings[name];
        vocabulary.id(setting.as_str().or(setting["content"].as_str())?)
    };
    let learned = template(loaded, &tokenizer)?;
    let eos = vocabulary.eos();
    let facts = TokenFacts {
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
    Ok(tokenizer::describe(&file, &facts))
}

/// Every parameter with its type and initial values.
type Types = BTreeMap<String, (TensorType, Init)>;

/// Vectors are f32, which costs little. Matrices whose rows do not fill blocks are f16.
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

/// Whether some matrices are f16 because their rows do not fill blocks.
pub fn is_partly_f16(model: &DecoderConfig, dtype: Width) -> bool {
    let inner = [model.width, model.ffn, model.heads * model.head_size()];
    dtype == Width::Q8_0 && inner.iter().any(|extent| !extent.is_multiple_of(BLOCK))
}

/// Refuses a file name without the usual extension.
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
