//! Exports a run in the Hugging Face layout: `config.json`, sharded safetensors with their index, the tokeniser and its configs,
//! the generation config, and the chat template of a model that has one. Other tools load the folder directly.
//!
//! The folder appears atomically.

pub mod target;
pub(crate) mod tokenizer;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use flatout_data::Vocabulary;
use flatout_data::examples::{Date, Questions, template_text};
use flatout_ir::{Adapter, Init, TensorType};
use flatout_models::config::{DecoderConfig, Model};
use flatout_models::library::stored::{Resampled, Stored};
use flatout_settings::choice;
use flatout_waits::{self as waits, Unit};
use serde_json::{Map, Value, json};

use crate::Failure;
use crate::UserError;
use crate::config::pattern::matches;
use crate::config::{DEFAULT_ADAPTER, Task};
use crate::refuse;
use crate::run::BESIDE;
use crate::run::checkpoint::{Dtype, header};
use crate::weights::adapters::{also_trains, check_merge};
use crate::weights::loaded::Loaded;
use crate::weights::peft::{self, AdapterExport};
use crate::weights::pretrained::folder::{CONFIG, GENERATION, INDEX, PROCESSOR, SINGLE};
use crate::weights::pretrained::{Weights, folder, narrow, parameters, processor_of};
use flatout_data::durable;
use target::{METADATA, Target};
use tokenizer::Tokenizer;

choice! {
    /// Layouts of exported models.
    pub enum Format { HuggingFace = "huggingface", Gguf = "gguf" }
}

choice! {
    /// Element types of exported weights. The run's own are f32.
    pub enum Width { F32 = "f32", Bf16 = "bf16" }
}

/// The requested export.
#[derive(Clone, Debug)]
pub struct Export {
    pub to: PathBuf,
    pub dtype: Width,
    /// The most bytes of tensors per file, except for a single tensor that is larger.
    pub shard_bytes: u64,
    /// Whether an existing export is replaced.
    pub force: bool,
    /// Exports only the adapters, in PEFT's layout, instead of the merged model.
    pub adapter: bool,
}

/// The result of an export.
#[derive(Clone, Debug, PartialEq)]
pub struct Exported {
    pub architecture: String,
    pub files: Vec<String>,
    pub parameters: u64,
    pub bytes: u64,
}

/// Exports a run. Refusals come before anything is written.
pub fn export(loaded: &mut Loaded, wanted: &Export) -> Result<Exported, Failure> {
    let target = |loaded: &Loaded| {
        // With and without the step or revision.
        let base = loaded.config.model.from().into_iter().flat_map(|from| {
            [from.as_str(), from.rsplit_once('@').map_or(from.as_str(), |(place, _)| place)]
        });
        let sources: Vec<&Path> = base.map(Path::new).chain([&*loaded.dir]).collect();
        Target::new(&wanted.to, wanted.force, &sources)
    };
    let written = if wanted.adapter {
        let adapters = Adapters::of(loaded)?;
        let tokenizer = Tokenizer::of(loaded);
        target(loaded)?.fill(|folder| adapters.write(loaded, wanted.dtype, &tokenizer, folder))
    } else {
        let described = describe(loaded, wanted.dtype)?;
        // Every weight is merged with its adapters.
        check_merge(&loaded.config.model, loaded.weights.adapters(), "export them with --adapter")?;
        loaded.weights.keep_apart(false);
        target(loaded)?.fill(|folder| write(loaded, wanted, &described, folder))
    };
    written.map_err(|failure| match failure {
        Failure::Environment(sentence) => {
            Failure::Environment(format!("the export to {} failed: {sentence}", wanted.to.display()))
        }
        other => other,
    })
}

/// The adapters of a run.
struct Adapters {
    /// By name, `default` first.
    named: Vec<(String, Vec<Adapter>)>,
    /// Parameters of the model that were trained with them.
    also: Vec<String>,
}

impl Adapters {
    fn of(loaded: &Loaded) -> Result<Adapters, UserError> {
        let all = loaded.weights.adapters();
        if all.is_empty() {
            refuse!("{} has no adapters: leave --adapter out to export its model", loaded.dir.display());
        }
        let Some(decoder) = loaded.config.model.as_decoder() else {
            refuse!(
                "the adapters in {} cannot be exported apart: those of text models can, and `model.kind` is {}; leave \
                 --adapter out to export the model they make",
                loaded.dir.display(),
                loaded.config.model.kind()
            );
        };
        peft::exportable(decoder, all)?;
        let mut named: Vec<(String, Vec<Adapter>)> = vec![];
        for adapter in all {
            match named.iter_mut().find(|(name, _)| *name == adapter.name) {
                Some((_, of_name)) => of_name.push(adapter.clone()),
                None => named.push((adapter.name.clone(), vec![adapter.clone()])),
            }
        }
        named.sort_by_key(|(name, _)| name != DEFAULT_ADAPTER);
        let config = &loaded.config;
        let is_frozen = |path: &str| config.train.freeze.iter().any(|pattern| matches(pattern, path));
        let paths = parameters(&config.model).into_keys();
        let also = paths.filter(|path| also_trains(config, path) && !is_frozen(path)).collect();
        Ok(Adapters { named, also })
    }

    /// The default adapter is written to the folder itself, others to subfolders of their names.
    fn write(
        &self,
        loaded: &mut Loaded,
        dtype: Width,
        tokenizer: &Tokenizer,
        folder: &Path,
    ) -> Result<Exported, Failure> {
        let dtype = if dtype == Width::F32 { Dtype::F32 } else { Dtype::Bf16 };
        let mut made =
            Exported { architecture: "PEFT adapter".into(), files: vec![], parameters: 0, bytes: 0 };
        let decoder = loaded.config.model.decoder().clone();
        let model = DecoderConfig { context: loaded.positions, ..decoder };
        for (name, adapters) in &self.named {
            let within = if name == DEFAULT_ADAPTER { String::new() } else { format!("{name}/") };
            let into = folder.join(&within);
            fs::create_dir_all(&into).map_err(Failure::io(into.display()))?;
            let trained = AdapterExport {
                model: &model,
                weights: &mut loaded.weights,
                adapters,
                also: &self.also,
                from: loaded.config.model.from().map(String::as_str),
            };
            let (parameters, bytes) = peft::write(trained, dtype, &into)?;
            made.parameters += parameters;
            made.bytes += bytes;
            made.files.extend([peft::CONFIG, peft::TENSORS].map(|file| format!("{within}{file}")));
        }
        // The base model's tokeniser lacks the new tokens that the adapter was trained with.
        let has_grown = !tokenizer.added.is_empty();
        for (name, bytes) in tokenizer.files(loaded.positions).into_iter().filter(|_| has_grown) {
            let path = folder.join(name);
            durable::write(&path, &bytes).map_err(Failure::io(path.display()))?;
            made.files.push(name.to_string());
        }
        Ok(made)
    }
}

/// The configs of the exported model.
struct ModelConfigs {
    config: Value,
    positions: usize,
    /// Present for a model that generates text.
    generation: Option<Value>,
    /// The image processor's config; present for a model that reads images.
    processor: Option<Value>,
    tokenizer: Tokenizer,
}

fn describe(loaded: &mut Loaded, dtype: Width) -> Result<ModelConfigs, UserError> {
    let dir = loaded.dir.clone();
    if !loaded.is_run {
        refuse!("{} is in the Hugging Face layout already: a run is what can be exported", dir.display());
    }
    let mut model = loaded.config.model.clone();
    if let Model::Decoder(decoder) = &mut model {
        decoder.context = loaded.positions;
    }
    let beside = dir.join(BESIDE);
    let source = beside.join(CONFIG).is_file().then(|| folder::describe(&beside)).transpose()?;
    let tokenizer = Tokenizer::of(loaded);
    let own = |token: fn(&Vocabulary) -> u32| tokenizer.vocabulary.iter().map(token).collect::<Vec<u32>>();
    let (mut bos, mut eos) = (own(Vocabulary::bos), own(Vocabulary::eos));
    if let Some(source) = source.filter(|_| tokenizer.beside.is_some()) {
        (bos, eos) = (source.bos, source.eos);
    }
    let dtype = if dtype == Width::F32 { "float32" } else { "bfloat16" };
    let mut config = model
        .published()
        .and_then(|published| published.write(dtype, &bos, &eos))
        .map_err(|why| UserError(format!("{} cannot be exported: {why}", dir.display())))?;
    let names = &loaded.config.data.classes;
    if model.classes() == Some(names.len()) {
        let labels = model.published().map(|published| published.label_fields(names)).unwrap_or_default();
        config.as_object_mut().expect("a config is an object").extend(labels);
    }
    let generation = model.vocab().map(|_| {
        let ends = eos
            .iter()
            .copied()
            .chain(answer_end(loaded, tokenizer.vocabulary.as_ref()).filter(|end| !eos.contains(end)));
        let ends: Vec<u32> = ends.collect();
        json!({
            "_from_model_config": true,
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": if ends.len() > eos.len() { json!(ends) } else { config["eos_token_id"].clone() },
        })
    });
    let mut processor = processor_of(&loaded.config);
    if let (true, Some([height, width])) = (processor.resize.is_empty(), processor.size) {
        let shorter = height.min(width) as f64 / loaded.config.data.centre_crop;
        processor.resize = vec![shorter.round() as usize];
    }
    if let Ok(published) = model.published() {
        published.describe_processor(&mut config, &processor);
    }
    Ok(ModelConfigs {
        config,
        positions: model.tokens(),
        generation,
        processor: model.published().ok().and_then(|published| published.processor(&processor)),
        tokenizer,
    })
}

fn learned_conversations(loaded: &Loaded) -> bool {
    loaded.is_run && [Task::Chat, Task::VisualChat, Task::Preference].contains(&loaded.config.data.task)
}

/// The token that ends an answer of a run trained on conversations, if its template has one: generation in the library stops at
/// it.
fn answer_end(loaded: &Loaded, vocabulary: Option<&Vocabulary>) -> Option<u32> {
    let vocabulary = vocabulary.filter(|_| learned_conversations(loaded))?;
    let folders = [loaded.dir.join(BESIDE), loaded.dir.clone()];
    let data = &loaded.config.data;
    let date = data.date.as_deref().and_then(Date::parse);
    Questions::open(vocabulary, data.template.as_deref(), &folders, date).ok()?.end().ok()?
}

fn write(
    loaded: &mut Loaded,
    wanted: &Export,
    described: &ModelConfigs,
    folder: &Path,
) -> Result<Exported, Failure> {
    let (files, parameters, bytes) = write_weights(loaded, wanted, folder)?;
    let mut exported = Exported {
        architecture: described.config["architectures"][0].as_str().unwrap_or_default().to_string(),
        files,
        parameters,
        bytes,
    };
    let mut put = |name: &str, bytes: &[u8]| -> Result<(), Failure> {
        let path = folder.join(name);
        exported.files.push(name.to_string());
        durable::write(&path, bytes).map_err(Failure::io(path.display()))
    };
    let text = |value: &Value| serde_json::to_vec_pretty(value).expect("JSON has a text");
    put(CONFIG, &text(&described.config))?;
    let kept = |name: &str| described.tokenizer.kept(name);
    if let Some(generation) = &described.generation {
        let kept = kept(GENERATION);
        put(GENERATION, &kept.unwrap_or_else(|| text(generation)))?;
    }
    if let Some(processor) = &described.processor {
        put(PROCESSOR, &text(processor))?;
    }
    if let Some(template) = template(loaded, &described.tokenizer)? {
        put("chat_template.jinja", template.as_bytes())?;
    } else {
        for name in ["chat_template.jinja", "chat_template.json"] {
            kept(name).map_or(Ok(()), |bytes| put(name, &bytes))?;
        }
    }
    for (name, bytes) in described.tokenizer.files(described.positions) {
        put(name, &bytes)?;
    }
    exported.files.sort();
    Ok(exported)
}

/// The chat template that a run was trained with, if it is not the template of the model it began from.
pub(crate) fn template(loaded: &Loaded, tokenizer: &Tokenizer) -> Result<Option<String>, Failure> {
    if !learned_conversations(loaded) {
        return Ok(None);
    }
    let given = loaded.config.data.template.as_deref();
    let given = given.or(tokenizer.beside.is_none().then_some("chatml"));
    Ok(given.map(template_text).transpose()?)
}

/// A tensor of the export, and the parameters that it is made of.
struct OutTensor {
    name: String,
    dims: Vec<usize>,
    parts: Vec<Stored>,
    /// Learned positions resampled to another grid.
    resampled: Option<Resampled>,
}

impl OutTensor {
    fn elements(&self) -> u64 {
        self.dims.iter().product::<usize>() as u64
    }

    /// Its values as little-endian f32.
    fn read(&self, weights: &Weights, types: &Types) -> Result<Vec<u8>, Failure> {
        let learned = self.learned(weights, types)?;
        let Some(resampled) = &self.resampled else { return Ok(learned) };
        let width = self.dims[self.dims.len() - 1];
        let values: Vec<f32> =
            learned.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        Ok(resampled.apply(&values, width).into_iter().flat_map(f32::to_le_bytes).collect())
    }

    /// The values as trained.
    fn learned(&self, weights: &Weights, types: &Types) -> Result<Vec<u8>, Failure> {
        let read = |weights: &Weights, part: &Stored| {
            let (ty, init) = &types[&part.ours];
            weights.read(&part.ours, ty, init).map(|(wide, _)| wide)
        };
        if let [one] = self.parts.as_slice()
            && one.is_whole()
        {
            return read(weights, one);
        }
        let elements = self.parts[0].dims.iter().product();
        let mut whole = vec![[0; 4]; elements];
        for part in &self.parts {
            part.put(read(weights, part)?.as_chunks::<4>().0, &mut whole);
        }
        Ok(whole.into_flattened())
    }
}

/// Every parameter with its type and initial values.
type Types = BTreeMap<String, (TensorType, Init)>;

/// The tensors of the export, in the order of the model.
fn tensors(loaded: &Loaded, types: &Types) -> Vec<OutTensor> {
    let published = loaded.config.model.published().expect("a model that has a config.json is published");
    let stored = published.stored(&|path| types[path].0.dims.clone());
    let mut outs: Vec<OutTensor> = vec![];
    for part in stored.expect("a model that has a config.json has names") {
        let resampled = published.resampled().filter(|resampled| resampled.theirs == part.theirs);
        match outs.iter_mut().find(|out| out.name == part.theirs) {
            Some(out) => out.parts.push(part),
            None => {
                let dims = resampled.map_or(part.dims.clone(), |resampled| resampled.dims(&part.dims));
                outs.push(OutTensor { name: part.theirs.clone(), dims, parts: vec![part], resampled });
            }
        }
    }
    outs
}

/// Writes the shards and their index; returns the files, the number of parameters and the bytes of all tensors.
fn write_weights(
    loaded: &mut Loaded,
    wanted: &Export,
    folder: &Path,
) -> Result<(Vec<String>, u64, u64), Failure> {
    let dtype = if wanted.dtype == Width::F32 { Dtype::F32 } else { Dtype::Bf16 };
    let types = parameters(&loaded.config.model);
    let outs = tensors(loaded, &types);
    let bytes = |out: &OutTensor| out.elements() * dtype.bytes() as u64;
    let (parameters, total) = (outs.iter().map(OutTensor::elements).sum(), outs.iter().map(bytes).sum());
    let shards = cut(outs, wanted.shard_bytes, bytes);
    let count = shards.len();
    let name = |number: usize| match count {
        1 => SINGLE.to_string(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
    };
    let mut files = vec![];
    let mut weight_map = Map::new();
    let wait = waits::begin("writing weights", Unit::Bytes, Some(total));
    for (number, shard) in shards.iter().enumerate() {
        let file = name(number);
        let path = folder.join(&file);
        let described: Vec<_> =
            shard.iter().map(|out| (out.name.as_str(), dtype, out.dims.as_slice())).collect();
        let opened = File::create(&path).map_err(Failure::io(path.display()))?;
        let mut writer = BufWriter::with_capacity(4 << 20, opened);
        let head = header(&described, &METADATA);
        head.and_then(|head| writer.write_all(&head)).map_err(Failure::io(path.display()))?;
        for out in shard {
            let wide = out.read(&loaded.weights, &types)?;
            let bytes = if dtype == Dtype::F32 { wide } else { narrow(&wide) };
            writer.write_all(&bytes).map_err(Failure::io(path.display()))?;
            wait.add(bytes.len() as u64);
            weight_map.insert(out.name.clone(), json!(file));
        }
        let flushed =
            writer.into_inner().map_err(io::IntoInnerError::into_error).and_then(|file| file.sync_all());
        flushed.map_err(Failure::io(path.display()))?;
        files.push(file);
    }
    if count > 1 {
        let index = json!({ "metadata": { "total_size": total, "total_parameters": parameters }, "weight_map": weight_map });
        let path = folder.join(INDEX);
        durable::write(&path, &serde_json::to_vec_pretty(&index).expect("JSON has a text"))
            .map_err(Failure::io(path.display()))?;
        files.push(INDEX.to_string());
    }
    Ok((files, parameters, total))
}

/// Splits a list into runs of at most `most` bytes; a larger item is a run by itself.
fn cut<T>(all: Vec<T>, most: u64, bytes: impl Fn(&T) -> u64) -> Vec<Vec<T>> {
    let mut runs: Vec<Vec<T>> = vec![];
    let mut filled = 0;
    for one in all {
        let size = bytes(&one);
        match runs.last_mut() {
            Some(run) if filled + size <= most => run.push(one),
            _ => {
                runs.push(vec![one]);
                filled = 0;
            }
        }
        filled += size;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_hold_what_fits() {
        let cut = |most: u64| cut(vec![3, 3, 9, 1, 2, 3], most, |size| *size);
        assert_eq!(cut(6), vec![vec![3, 3], vec![9], vec![1, 2, 3]]);
        assert_eq!(cut(100), vec![vec![3, 3, 9, 1, 2, 3]]);
        assert_eq!(cut(1).len(), 6);
    }
}
