//! Reads a folder in the Hugging Face layout: `config.json` beside `model.safetensors`, or beside shards and their index.
//!
//! Everything is checked before a byte of a weight is read: the description, the index, every header, and the names, types and
//! shapes of all tensors. Pickled weights are never opened.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use flatout_data::pointer::{IS_POINTER, is_pointer};
use flatout_ir::passes::base;
use flatout_models::config::Model;
use flatout_models::decoder::HEAD;
use flatout_models::library::{self, Described, gemma, processor};
use serde_json::Value;

use super::bitsandbytes;
use super::weights::{TensorLocation, Weights, parameters};
use crate::UserError;
use crate::refuse;
use crate::run::checkpoint::{Dtype, TensorFile};

pub const CONFIG: &str = "config.json";
/// Settings for generating text.
pub const GENERATION: &str = "generation_config.json";
/// Settings for preprocessing images.
pub const PROCESSOR: &str = "preprocessor_config.json";
/// The same, under `image_processor`, among settings for other inputs.
const PROCESSORS: &str = "processor_config.json";
pub const SINGLE: &str = "model.safetensors";
pub const INDEX: &str = "model.safetensors.index.json";

/// An index names a few thousand tensors; a larger file is refused.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// The model that the folder's `config.json` describes.
pub fn describe(folder: &Path) -> Result<Described, UserError> {
    let path = folder.join(CONFIG);
    let (config, _) = config_of(&path)?;
    let mut described = library::read(&config).map_err(|why| cannot(&path, why))?;
    let (has_size, has_tower) = (described.model.image_size().is_some(), described.model.has_tower());
    let has_size = has_size || described.model.as_fovea().is_some();
    if !has_size && !has_tower {
        return Ok(described);
    }
    if let Some((beside, settings)) = image_processor(folder)? {
        described.model.normalise(&settings).map_err(|why| cannot(&beside, why))?;
        // Images beside a text have any size, within limits of their area.
        let read = if has_size { processor::read } else { processor::read_area };
        described.processor = read(&settings).map_err(|why| cannot(&beside, why))?;
    }
    Ok(described)
}

/// A `config.json` as it would be without quantised weights, and the quantisation settings if it has supported ones.
fn config_of(path: &Path) -> Result<(Value, Option<bitsandbytes::Settings>), UserError> {
    let mut config = json(path)?;
    let settings = bitsandbytes::settings(&config).map_err(|why| cannot(path, why))?;
    if settings.is_some()
        && let Some(fields) = config.as_object_mut()
    {
        fields.remove(bitsandbytes::FIELD);
    }
    Ok((config, settings))
}

/// The file of a folder with the preprocessing of images, and its contents. As in the library, `processor_config.json` takes
/// precedence.
fn image_processor(folder: &Path) -> Result<Option<(PathBuf, Value)>, UserError> {
    let shared = folder.join(PROCESSORS);
    if shared.is_file()
        && let Some(settings) = json(&shared)?.get_mut("image_processor").map(Value::take)
    {
        return Ok(Some((shared, settings)));
    }
    let own = folder.join(PROCESSOR);
    Ok(if own.is_file() { Some((own.clone(), json(&own)?)) } else { None })
}

/// The smallest and the largest area in pixels of an image beside a text, for the model in a folder: the published values if no
/// file has them.
pub fn image_areas(folder: &Path) -> Result<[u64; 2], UserError> {
    let area = match image_processor(folder)? {
        None => None,
        Some((path, settings)) => processor::read_area(&settings).map_err(|why| cannot(&path, why))?.area,
    };
    Ok(area.unwrap_or(processor::IMAGE_AREAS))
}

/// The tokens that end a text of the model in a folder: `generation_config.json` takes precedence over `config.json`.
pub fn ends(folder: &Path, described: &Described) -> Result<Vec<u32>, UserError> {
    let path = folder.join(GENERATION);
    if !path.is_file() {
        return Ok(described.eos.clone());
    }
    let ends = library::generation_ends(&json(&path)?).map_err(|why| cannot(&path, why))?;
    Ok(if ends.is_empty() { described.eos.clone() } else { ends })
}

fn cannot(path: &Path, why: String) -> UserError {
    UserError(format!("{} cannot be used: {why}", path.display()))
}

fn json(path: &Path) -> Result<Value, UserError> {
    let shown = path.display();
    let read = fs::metadata(path).and_then(|facts| {
        if facts.len() > MAX_JSON_BYTES {
            return Err(std::io::Error::other(format!("it has {} bytes", facts.len())));
        }
        fs::read(path)
    });
    let bytes = read.map_err(|error| UserError(format!("{shown} cannot be read: {error}")))?;
    if is_pointer(&bytes) {
        refuse!("{shown} {IS_POINTER}");
    }
    serde_json::from_slice(&bytes).map_err(|error| UserError(format!("{shown} is not JSON: {error}")))
}

/// The locations of a folder's tensors, all checked against the model; a headless model has no head.
pub fn weights(folder: &Path, model: &Model, is_headless: bool) -> Result<Weights, UserError> {
    let (files, claimed) = if folder.join(SINGLE).is_file() {
        (vec![SINGLE.to_string()], None)
    } else if folder.join(INDEX).is_file() {
        let index = folder.join(INDEX);
        (shards(&index)?, Some(weight_map(&index)?))
    } else {
        let entries = fs::read_dir(folder)
            .map_err(|e| UserError(format!("{} cannot be read: {e}", folder.display())))?;
        let names: Vec<String> =
            entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        refuse!(
            "{} {}",
            folder.display(),
            without_weights(&names.iter().map(String::as_str).collect::<Vec<_>>())
        );
    };
    let mut opened = vec![];
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    for (number, name) in files.iter().enumerate() {
        let path = folder.join(name);
        let file = TensorFile::open(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                UserError(format!("{} is missing: {INDEX} names it", path.display()))
            }
            std::io::ErrorKind::InvalidData => UserError(error.to_string()),
            _ => UserError(format!("{} cannot be read: {error}", path.display())),
        })?;
        for tensor in file.entries().keys() {
            if let Some(other) = found.insert(tensor.clone(), number) {
                refuse!("{} has `{tensor}` twice: in {} and in {name}", folder.display(), files[other]);
            }
        }
        opened.push((path, file));
    }
    for (tensor, shard) in claimed.iter().flatten() {
        if found.get(tensor).is_none_or(|number| files[*number] != *shard) {
            refuse!("{INDEX} in {} says that {shard} has `{tensor}`, but it does not", folder.display());
        }
    }
    let mut weights = Weights::of_files(opened);
    let shapes = parameters(model);
    let unusable =
        |why: String| UserError(format!("{} cannot be used: {why}", folder.join(CONFIG).display()));
    let published = model.published().map_err(unusable)?;
    let stored = published.stored(&|path| shapes[path].0.dims.clone()).map_err(unusable)?;
    let (_, settings) = config_of(&folder.join(CONFIG))?;
    let linear = settings.map(|_| base::linear(&model.build(model.least()))).unwrap_or_default();
    let mut unused: BTreeSet<&String> = found.keys().collect();
    let mut missing = vec![];
    for stored in stored {
        if is_headless && stored.ours == HEAD {
            continue;
        }
        let others = published.other_names(&stored.theirs);
        let present = [&stored.theirs].into_iter().chain(&others).find_map(|name| found.get_key_value(name));
        let Some((name, number)) = present else {
            if !published.may_lack(&stored.theirs) {
                missing.push(stored.theirs);
            }
            continue;
        };
        unused.remove(name);
        let mut place =
            TensorLocation { file: *number, name: name.clone(), within: None, expect: None, nf4: None };
        let (path, file) = weights.file(&place);
        if let Some(settings) = settings.filter(|_| file.entries()[name].dtype == Dtype::U8) {
            if !linear.contains(&stored.ours) {
                refuse!(
                    "{}: `{name}` is quantised, and only weights of linear layers may be: take a checkpoint that keeps it \
                     as it was (llm_int8_skip_modules)",
                    path.display()
                );
            }
            place.nf4 = Some(bitsandbytes::parts(&weights, &found, &place, &stored, settings)?);
            for part in bitsandbytes::beside(name) {
                unused.remove(&part);
            }
            weights.place(stored.ours, place);
            continue;
        }
        check(&weights, &place, &stored.dims)?;
        let within = (!stored.is_whole()).then(|| stored.clone());
        weights.place(stored.ours, TensorLocation { within, ..place });
    }
    if settings.is_some() && weights.packed() == 0 && missing.is_empty() {
        refuse!(
            "{} has no quantised weight, and the `{}` of its {CONFIG} says that it has: take that out",
            folder.display(),
            bitsandbytes::FIELD
        );
    }
    missing.dedup();
    if !missing.is_empty() {
        refuse!("{} lacks {} of the model its {CONFIG} describes", folder.display(), listed(&missing));
    }
    unused.retain(|name| !published.is_redundant(name));
    let all = unused.len();
    unused.retain(|name| !gemma::is_of_images(name));
    weights.of_images = all - unused.len();
    if !unused.is_empty() {
        let unused: Vec<String> = unused.into_iter().cloned().collect();
        refuse!("{} has {}, which the model its {CONFIG} describes lacks", folder.display(), listed(&unused));
    }
    Ok(weights)
}

fn check(weights: &Weights, place: &TensorLocation, shape: &[usize]) -> Result<(), UserError> {
    let (path, file) = weights.file(place);
    let (entry, name) = (&file.entries()[&place.name], &place.name);
    if !matches!(entry.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
        refuse!(
            "{}: `{name}` holds {}, and only F32, F16 and BF16 are supported",
            path.display(),
            entry.dtype
        );
    }
    if entry.shape != shape {
        refuse!(
            "{}: `{name}` has shape {:?}, and {shape:?} is what {CONFIG} describes",
            path.display(),
            entry.shape
        );
    }
    Ok(())
}

/// The distinct names of the shards that an index lists.
pub fn shards(index: &Path) -> Result<Vec<String>, UserError> {
    Ok(weight_map(index)?.into_values().collect::<BTreeSet<_>>().into_iter().collect())
}

/// The file of each tensor according to an index. A file must lie beside the index: a name that leads anywhere else is refused.
fn weight_map(index: &Path) -> Result<BTreeMap<String, String>, UserError> {
    let value = json(index)?;
    let Some(map) = value["weight_map"].as_object().filter(|map| !map.is_empty()) else {
        refuse!("{} has no `weight_map` of tensors to files", index.display());
    };
    let mut files = BTreeMap::new();
    for (tensor, file) in map {
        let Some(file) = file.as_str() else {
            refuse!("{}: the file of `{tensor}` is {file}, and must be a name", index.display());
        };
        let parts: Vec<Component<'_>> = Path::new(file).components().collect();
        let beside = matches!(parts.as_slice(), [Component::Normal(name)] if *name == file);
        if !beside || !file.ends_with(".safetensors") {
            refuse!(
                "{} puts `{tensor}` into {file:?}: a shard is a .safetensors file in the same folder",
                index.display()
            );
        }
        files.insert(tensor.clone(), file.to_string());
    }
    Ok(files)
}

/// The error for a folder that lists these files and has no supported weights.
pub fn without_weights(files: &[&str]) -> String {
    let pickled =
        |name: &&&str| [".bin", ".pt", ".pth", ".ckpt", ".pkl"].iter().any(|ending| name.ends_with(ending));
    match files.iter().find(pickled) {
        Some(name) => format!(
            "has its weights only as pickles ({name}), which can run any program and are never opened: convert them to \
             safetensors"
        ),
        None => format!("has no weights: there is neither {SINGLE} nor {INDEX}"),
    }
}

/// The first few names, and the number of the others.
fn listed(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(3).map(|name| format!("`{name}`")).collect();
    match names.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
