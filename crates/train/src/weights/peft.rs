//! Adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`, one folder per adapter.
//!
//! Its tensors are named after the modules of the library's model: A is `lora_A.weight`, B `lora_B.weight`, and DoRA's magnitude
//! `lora_magnitude_vector`. Trained parameters of the model itself are stored under their own names, and an adapted embedding or
//! head also with its weight, as `base_layer.weight`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use flatout_ir::passes::adapter::{EMBED, HEAD, SCOPE, is_end};
use flatout_ir::{Adapter, Class, Init, TensorRange, TensorType};
use flatout_models::config::{DecoderConfig, Head};
use flatout_models::library::huggingface;
use flatout_models::library::stored::Stored;
use flatout_runtime::Session;
use regex::Regex;
use serde_json::{Map, Value, json};

use crate::Failure;
use crate::UserError;
use crate::config::{self, AdapterGroup, AdapterGroups, AdapterKind, Config};
use crate::refuse;
use crate::run::checkpoint::{Dtype, TensorFile, header};
use crate::run::state::held;
use crate::weights::adapters::also_trains;
use crate::weights::export::target::METADATA;
use crate::weights::pretrained::{TensorLocation, Weights, parameters};
use flatout_data::durable;
use flatout_data::pointer::{IS_POINTER, is_pointer};

mod modules;

use modules::ModuleAdapters;
pub(crate) use modules::{Module, modules};

pub const CONFIG: &str = "adapter_config.json";
pub const TENSORS: &str = "adapter_model.safetensors";
/// The prefix of a module's name.
const BASE: &str = "base_model.model.";
/// The unchanged embedding or head that the library writes beside its adapter.
const TABLE: &str = "base_layer.weight";
/// Suffixes of the copies that the library writes of a trained module and of its original, where a vocabulary grew.
const COPIES: [&str; 2] = [".modules_to_save.weight", ".original_module.weight"];

/// An adapter in a folder: its settings, and the locations of its tensors.
#[derive(Debug)]
pub struct Peft {
    /// Kind, rank, alpha, paths and groups.
    pub adapter: config::Adapter,
    weights: Weights,
    /// Paths in our model and types of all its tensors.
    tensors: BTreeMap<String, TensorType>,
    /// Weights of the model that must equal tables in the folder, with their names there.
    tables: Vec<(String, String)>,
}

/// The adapter of one weight in a folder.
struct WeightAdapter {
    weight: String,
    rank: usize,
    alpha: f64,
}

impl Peft {
    /// Opens a folder and checks every name, type and shape; no tensor is read yet.
    pub fn open(folder: &Path, model: &DecoderConfig) -> Result<Peft, UserError> {
        let shown = folder.display();
        let config = folder.join(CONFIG);
        let described = read_config(&config)?;
        let located = |why: String| UserError(format!("{}: {why}", config.display()));
        let modules = modules(model)
            .map_err(|why| UserError(format!("`adapter.from` cannot be used with this model: {why}")))?;
        let path = folder.join(TENSORS);
        let file = TensorFile::open(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound if folder.join("adapter_model.bin").is_file() => UserError(format!(
                "{shown} has its adapter only as a pickle, which can run any program and is never opened: convert it to \
                 safetensors, as PEFT's save_pretrained writes it"
            )),
            std::io::ErrorKind::InvalidData => UserError(error.to_string()),
            _ => UserError(format!(
                "{} cannot be read: {error}; `adapter.from` needs a folder as PEFT's save_pretrained writes it",
                path.display()
            )),
        })?;
        let is_dora = described["use_dora"].as_bool().unwrap_or(false);
        let shapes = parameters(&model.clone().into());
        let mut found: Vec<WeightAdapter> = vec![];
        let mut tensors: BTreeMap<String, TensorType> = BTreeMap::new();
        let mut places: Vec<(String, String, Option<Stored>)> = vec![];
        let mut tables: Vec<(String, String)> = vec![];
        let mut unused: BTreeSet<&str> = file.entries().keys().map(String::as_str).collect();
        for module in &modules {
            let name = |what: &str| format!("{BASE}{}.{what}", module.name);
            let first = name(module.first_tensor());
            let Some(a) = file.entries().get(&first) else { continue };
            let [rank, _] = a.shape[..] else {
                refuse!(
                    "{}: `{first}` has the shape {:?}, and PEFT's has two axes, the rank and the inputs: save the adapter again",
                    path.display(),
                    a.shape
                );
            };
            if is_dora && is_end(&module.parts[0].weight) {
                refuse!(
                    "{} has `{first}`, and its use_dora is true: the embedding and the head can only have LoRA adapters, so \
                     train it without them among target_modules",
                    path.display()
                );
            }
            check_rank(&described, &module.name, rank).map_err(located)?;
            let alpha = alpha_of(&described, &module.name, rank).map_err(located)?;
            let in_file = module.tensors(rank, is_dora);
            for tensor in &in_file {
                let theirs = name(tensor.name);
                check(&path, &file, &theirs, &tensor.dims)?;
                unused.remove(theirs.as_str());
            }
            for part in &module.parts {
                let adapter = named(&part.weight, rank, is_dora);
                let slots = adapter.parameters([part.rows, module.dims[1]]);
                for (slot, tensor) in slots.into_iter().zip(&in_file) {
                    let theirs = name(tensor.name);
                    let within = module.place(part, tensor, &slot.path, &theirs);
                    places.push((slot.path.clone(), theirs, within));
                    tensors.insert(slot.path, slot.ty);
                }
                found.push(WeightAdapter { weight: part.weight.clone(), rank, alpha });
            }
            let table = name(TABLE);
            if is_end(&module.parts[0].weight) && unused.remove(table.as_str()) {
                check(&path, &file, &table, &module.dims)?;
                let weight = if model.tied { EMBED } else { &module.parts[0].weight };
                tables.push((weight.to_string(), table));
            }
        }
        // Parts of the model that were trained with it. One of their tensors may hold several of our parameters.
        let own = huggingface::stored(model, |path| shapes[path].0.dims.clone()).unwrap_or_default();
        let named = |stored: &Stored| format!("{BASE}{}", stored.theirs);
        let present: BTreeSet<String> =
            own.iter().map(named).filter(|name| unused.contains(name.as_str())).collect();
        for stored in own {
            let theirs = named(&stored);
            if present.contains(&theirs) {
                unused.remove(theirs.as_str());
                let copies = COPIES.map(|copy| theirs.replace(".weight", copy));
                unused.retain(|name| !copies.iter().any(|copy| copy == name));
                check(&path, &file, &theirs, &stored.dims)?;
                tensors.insert(stored.ours.clone(), shapes[&stored.ours].0.clone());
                let within = (!stored.is_whole()).then(|| stored.clone());
                places.push((stored.ours, theirs, within));
            }
        }
        let own_head = head_module(&modules).filter(|_| model.tied && tensors.contains_key(EMBED));
        if let Some(module) = own_head {
            let is_tied = described["ensure_weight_tying"] == true;
            let head = format!("{BASE}{}.weight", module.name);
            match unused.remove(head.as_str()).then_some(head) {
                Some(head) => {
                    check(&path, &file, &head, &module.dims)?;
                    let copies = COPIES.map(|copy| head.replace(".weight", copy));
                    unused.retain(|name| !copies.iter().any(|copy| copy == name));
                    tables.push((EMBED.to_string(), head));
                }
                None if is_tied => {}
                None => refuse!(
                    "{} has a trained embedding and not the head, which is the same table in this model: PEFT keeps the \
                     head as it was; train it there with modules_to_save for both, or with ensure_weight_tying",
                    path.display()
                ),
            }
        }
        if described["ensure_weight_tying"] == true && found.iter().any(|found| is_end(&found.weight)) {
            return Err(located(
                "ensure_weight_tying is true and there are adapters of the embedding or the head, which this model does not \
                 tie: set it to false if they were trained apart"
                    .into(),
            ));
        }
        if let Some(name) = unused.first() {
            refuse!(
                "{} has `{name}`, which belongs to no weight of the model that can have an adapter: give the model that the \
                 adapter was trained with as model.from",
                path.display()
            );
        }
        if found.is_empty() {
            refuse!(
                "{} has no adapter of the model's weights: give the model that it was trained with as model.from",
                path.display()
            );
        }
        let mut weights = Weights::of_files(vec![(path, file)]);
        for (ours, name, within) in places {
            weights.place(ours, TensorLocation { file: 0, name, within, expect: None, nf4: None });
        }
        for (_, name) in &tables {
            weights.place(
                name.clone(),
                TensorLocation { file: 0, name: name.clone(), within: None, expect: None, nf4: None },
            );
        }
        let kind = if is_dora { AdapterKind::Dora } else { AdapterKind::Lora };
        let all: Vec<&str> =
            modules.iter().flat_map(|module| &module.parts).map(|part| part.weight.as_str()).collect();
        Ok(Peft { adapter: section(kind, &found, &all), weights, tensors, tables })
    }

    /// Checks that a config trains everything the adapter contains.
    pub fn check(&self, config: &Config) -> Result<(), UserError> {
        let is_trained = |path: &str| path.starts_with(SCOPE) || also_trains(config, path);
        match self.tensors.keys().find(|path| !is_trained(path)) {
            Some(path) => refuse!(
                "the adapter of `adapter.from` comes with `{path}`, which is not trained here: name it in adapter.also_train"
            ),
            None => Ok(()),
        }
    }

    /// Writes the tensors into a session of a model with these adapters.
    pub fn load(&mut self, session: &mut Session) -> Result<(), Failure> {
        let saved: BTreeSet<String> = session.plans().saved().into_iter().map(|(path, _)| path).collect();
        if let Some(path) = self.tensors.keys().find(|path| !saved.contains(*path)) {
            return Err(Failure::Environment(format!("there is no slot `{path}` that is trained")));
        }
        let pieces = held(session, Class::is_parameter);
        for piece in &pieces {
            let Some(ty) = self.tensors.get(&piece.path) else { continue };
            let (wide, _) = self.weights.read(&piece.path, ty, &Init::Zeros)?;
            let size = size_of::<f32>();
            session.write_range(
                &piece.slot,
                piece.at,
                &wide[size * piece.range.start..size * piece.range.end],
            )?;
        }
        // Tables stored with it must equal the model's, and a tied head is the embedding.
        for (weight, name) in &self.tables {
            for piece in pieces.iter().filter(|piece| piece.path == *weight) {
                let theirs = self.weights.piece(&TensorRange { path: name.clone(), ..piece.clone() })?;
                if session.read_range(&piece.slot, piece.within())? != theirs {
                    return Err(Failure::User(UserError(format!(
                        "the adapter of `adapter.from` comes with `{name}`, which is not `{weight}` of this model: it belongs \
                         to another one, or was trained apart from it; give the model that it was trained with as model.from"
                    ))));
                }
            }
        }
        Ok(())
    }
}

/// The module of the head.
fn head_module(modules: &[Module]) -> Option<&Module> {
    modules.iter().find(|module| module.parts[0].weight == HEAD)
}

/// The adapter under which a folder's tensors are loaded.
fn named(weight: &str, rank: usize, dora: bool) -> Adapter {
    let (name, weight) = (config::DEFAULT_ADAPTER.to_string(), weight.to_string());
    Adapter { name, weight, rank, scale: 1.0, dropout: 0.0, dora }
}

/// Reads and validates the config: everything that makes the computation differ from ours is refused.
fn read_config(path: &Path) -> Result<Value, UserError> {
    let shown = path.display();
    let bytes = fs::read(path).map_err(|error| {
        UserError(format!("`adapter.from` needs a folder with an adapter in PEFT's layout: {shown}: {error}"))
    })?;
    if is_pointer(&bytes) {
        refuse!("{shown} {IS_POINTER}");
    }
    let value: Value = serde_json::from_slice(&bytes)
        .map_err(|error| UserError(format!("{shown} is not JSON: {error}; fetch it again")))?;
    if value["peft_type"] != "LORA" {
        refuse!(
            "{shown} has peft_type {}, and only LORA can be read: merge the adapter into its model with PEFT, and give that as \
             model.from",
            value["peft_type"]
        );
    }
    let is_default =
        |key: &str| matches!(&value[key], Value::Null | Value::Bool(false)) || value[key] == json!({});
    for key in [
        "fan_in_fan_out",
        "lora_bias",
        "layer_replication",
        "use_qalora",
        "use_bdlora",
        "alora_invocation_tokens",
        "trainable_token_indices",
    ] {
        if !is_default(key) {
            refuse!(
                "{shown} has {key} {}, which cannot be read: merge the adapter into its model with PEFT, and give that as model.from",
                value[key]
            );
        }
    }
    // These took a part out of the model's own weights, and an adapter is trained beside what was left.
    let init = &value["init_lora_weights"];
    let took = ["pissa", "olora", "corda", "loftq", "lora_ga"];
    if init.as_str().is_some_and(|init| took.iter().any(|start| init.to_lowercase().starts_with(start))) {
        refuse!(
            "{shown} has init_lora_weights {init}, which changes the weights that the adapter lies beside: save it as a plain \
             one, with path_initial_model_for_weight_conversion in PEFT"
        );
    }
    if !matches!(value["bias"].as_str(), None | Some("none")) {
        refuse!(
            "{shown} has bias {}, and only adapters without trained biases can be read: merge the adapter into its model with \
             PEFT, and give that as model.from",
            value["bias"]
        );
    }
    Ok(value)
}

/// The value of a key for a module: that of a pattern which matches it, or the common value; `None` if there is neither. A
/// pattern is a regular expression that matches the end of a module's name, beginning at a whole part.
fn value_for<'v>(
    described: &'v Value,
    key: &str,
    patterns: &str,
    module: &str,
) -> Result<Option<&'v Value>, String> {
    let mut found = described.get(key).filter(|value| !value.is_null());
    let mut by: Option<&str> = None;
    for (pattern, value) in described[patterns].as_object().into_iter().flatten() {
        let names = match Regex::new(&format!("^(?:.*\\.)?(?:{pattern})$")) {
            Ok(expression) => expression.is_match(module),
            Err(_) => {
                return Err(format!("`{pattern}` among {patterns} is not a regular expression: correct it"));
            }
        };
        if !names {
            continue;
        }
        // In the library the first matching pattern wins, and a JSON object has no order.
        if let Some(other) = by.filter(|_| found != Some(value)) {
            return Err(format!(
                "`{other}` and `{pattern}` among {patterns} say different things of `{module}`: leave one of them out"
            ));
        }
        (found, by) = (Some(value), Some(pattern.as_str()));
    }
    Ok(found)
}

/// Checks that the rank in the config equals that of the tensors: the library divides alpha by the former.
fn check_rank(described: &Value, module: &str, rank: usize) -> Result<(), String> {
    match value_for(described, "r", "rank_pattern", module)? {
        Some(found) if found.as_u64() != Some(rank as u64) => {
            let fault = format!("the rank (r) of `{module}` is {found}, and its tensors have {rank}");
            Err(format!("{fault}: correct it, because alpha is divided by it"))
        }
        _ => Ok(()),
    }
}

/// The scale of a module's product, times its rank.
fn alpha_of(described: &Value, module: &str, rank: usize) -> Result<f64, String> {
    let alpha = match value_for(described, "lora_alpha", "alpha_pattern", module)? {
        None => 8.0,
        Some(found) => match found.as_f64() {
            Some(alpha) => alpha,
            None => return Err(format!("the lora_alpha of `{module}` is {found} and must be a number")),
        },
    };
    let ranked = described["use_rslora"].as_bool().unwrap_or(false);
    Ok(if ranked { alpha * (rank as f64).sqrt() } else { alpha })
}

fn check(path: &Path, file: &TensorFile, name: &str, dims: &[usize]) -> Result<(), UserError> {
    let Some(entry) = file.entries().get(name) else {
        refuse!(
            "{} lacks `{name}`, without which its other tensors are of no use: fetch or save the adapter again",
            path.display()
        );
    };
    if entry.shape != dims || !matches!(entry.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
        refuse!(
            "{}: `{name}` is {} {:?}, and the model needs {dims:?} in F32, F16 or BF16: give the model that the adapter was \
             trained with as model.from",
            path.display(),
            entry.dtype,
            entry.shape
        );
    }
    Ok(())
}

/// The keys of section `adapter` for these adapters: the first rank and alpha become those of the section, others those of
/// groups.
fn section(kind: AdapterKind, found: &[WeightAdapter], all: &[&str]) -> config::Adapter {
    let mut shapes: Vec<(usize, f64)> = vec![];
    for beside in found {
        if !shapes.contains(&(beside.rank, beside.alpha)) {
            shapes.push((beside.rank, beside.alpha));
        }
    }
    let of_shape = |shape: (usize, f64)| {
        let with: Vec<&str> =
            found.iter().filter(|b| (b.rank, b.alpha) == shape).map(|b| b.weight.as_str()).collect();
        patterns(&with, all)
    };
    let group = |shape: &(usize, f64)| AdapterGroup {
        name: config::DEFAULT_ADAPTER.into(),
        paths: of_shape(*shape),
        rank: Some(shape.0),
        alpha: Some(shape.1),
        dropout: None,
    };
    config::Adapter {
        kind,
        rank: shapes[0].0,
        alpha: Some(shapes[0].1),
        paths: of_shape(shapes[0]),
        groups: AdapterGroups(shapes[1..].iter().map(group).collect()),
        ..Default::default()
    }
}

/// Summarises weights by few patterns: `layers.*.attn.wq` if every layer's is among them.
fn patterns(weights: &[&str], all: &[&str]) -> Vec<String> {
    let starred = |path: &str| -> String {
        let names: Vec<&str> = path.split('.').collect();
        let is_number = |name: &&str| name.bytes().all(|b| b.is_ascii_digit());
        names.iter().map(|name| if is_number(name) { "*" } else { *name }).collect::<Vec<_>>().join(".")
    };
    let mut patterns: Vec<String> = vec![];
    for weight in weights {
        let star = starred(weight);
        let is_whole = all.iter().all(|other| starred(other) != star || weights.contains(other));
        let pattern = if is_whole { star } else { weight.to_string() };
        if !patterns.contains(&pattern) {
            patterns.push(pattern);
        }
    }
    patterns
}

/// The source of one exported adapter, and what was trained with it.
pub struct AdapterExport<'a> {
    pub model: &'a DecoderConfig,
    pub weights: &'a mut Weights,
    /// Adapters with one name.
    pub adapters: &'a [Adapter],
    /// Parameters of the model that were trained with them.
    pub also: &'a [String],
    /// The value of `model.from`.
    pub from: Option<&'a str>,
}

/// Writes both files of an adapter into a folder; returns the number of parameters and the bytes of the tensors.
pub fn write(trained: AdapterExport<'_>, dtype: Dtype, folder: &Path) -> Result<(u64, u64), Failure> {
    let AdapterExport { model, weights, adapters, also, from } = trained;
    let modules = exportable(model, adapters)?;
    let beside = ModuleAdapters::of(&modules, adapters).expect("checked to be exportable");
    let shapes = parameters(&model.clone().into());
    let mut named: Vec<(String, Vec<usize>, Vec<u8>)> = vec![];
    let mut put = |name: String, dims: &[usize], wide: Vec<u8>| {
        let bytes = if dtype == Dtype::F32 { wide } else { crate::weights::pretrained::narrow(&wide) };
        named.push((name, dims.to_vec(), bytes));
    };
    for beside in &beside {
        let first = beside.adapters[0];
        // The same tensor of each part.
        let mut each: [Vec<Vec<f32>>; 3] = Default::default();
        for adapter in &beside.adapters {
            let part = beside.module.parts.iter().find(|part| part.weight == adapter.weight);
            let dims = [part.expect("an adapter of the module").rows, beside.module.dims[1]];
            for (slot, each) in adapter.parameters(dims).iter().zip(&mut each) {
                each.push(floats(&weights.read(&slot.path, &slot.ty, &slot.init)?.0));
            }
        }
        let [a, b, magnitudes] = &each;
        let joined = [beside.join_a(a), beside.join_b(b), beside.join_magnitudes(magnitudes)];
        for (tensor, values) in beside.module.tensors(beside.rank(), first.dora).iter().zip(joined) {
            let wide = tensor.of_ours(values).into_iter().flat_map(f32::to_le_bytes).collect();
            put(format!("{BASE}{}.{}", beside.module.name, tensor.name), &tensor.dims, wide);
        }
    }
    let stored = huggingface::stored(model, |path| shapes[path].0.dims.clone()).map_err(UserError)?;
    let mut whole = BTreeSet::new();
    for path in also {
        let (ty, init) = &shapes[path];
        let at = stored.iter().find(|s| s.ours == *path).expect("every parameter has a name there");
        if !at.is_whole() {
            return Err(Failure::User(UserError(format!(
                "the adapters cannot be exported apart: `{path}` is trained with them and is part of `{}` there; leave \
                 --adapter out",
                at.theirs
            ))));
        }
        let theirs = &at.theirs;
        let (wide, _) = weights.read(path, ty, init)?;
        // The library has two modules for a tied table, and would keep the second one unchanged.
        if let Some(head) = head_module(&modules).filter(|_| model.tied && path == EMBED) {
            put(format!("{BASE}{}.weight", head.name), &ty.dims, wide.clone());
            whole.insert(head.name.clone());
        }
        put(format!("{BASE}{theirs}"), &ty.dims, wide);
        // By its full name, because the library selects every module whose name ends with it.
        let module = theirs.rsplit_once('.').map_or(theirs.as_str(), |(module, _)| module);
        // The library stores all parts of a module that is called a classifier.
        whole.insert(if module.starts_with("classifier.") { "classifier" } else { module }.to_string());
    }
    let path = folder.join(TENSORS);
    let heads: Vec<_> = named.iter().map(|(name, dims, _)| (name.as_str(), dtype, dims.as_slice())).collect();
    let mut file = header(&heads, &METADATA).map_err(Failure::io(path.display()))?;
    named.iter().for_each(|(_, _, bytes)| file.extend_from_slice(bytes));
    durable::write(&path, &file).map_err(Failure::io(path.display()))?;
    let config = adapter_config(model, &beside, &modules, &whole, from);
    let text = serde_json::to_vec_pretty(&config).expect("JSON has a text");
    durable::write(&folder.join(CONFIG), &text).map_err(Failure::io(folder.display()))?;
    let elements = named.iter().map(|(_, dims, _)| dims.iter().product::<usize>() as u64).sum();
    let size = named.iter().map(|(_, _, bytes)| bytes.len() as u64).sum();
    Ok((elements, size))
}

/// The modules, if these adapters can be exported.
pub(crate) fn exportable(model: &DecoderConfig, adapters: &[Adapter]) -> Result<Vec<Module>, UserError> {
    let cannot =
        |why: String| UserError(format!("the adapters cannot be exported apart: {why}; leave --adapter out"));
    let modules = modules(model).map_err(cannot)?;
    let names: BTreeSet<&String> = adapters.iter().map(|adapter| &adapter.name).collect();
    for name in names {
        let of_name: Vec<Adapter> = adapters.iter().filter(|a| a.name == *name).cloned().collect();
        ModuleAdapters::of(&modules, &of_name).map_err(cannot)?;
    }
    Ok(modules)
}

/// Parses little-endian f32.
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

fn adapter_config(
    model: &DecoderConfig,
    beside: &[ModuleAdapters<'_>],
    modules: &[Module],
    whole: &BTreeSet<String>,
    from: Option<&str>,
) -> Value {
    let last = |module: &str| module.rsplit('.').next().unwrap_or(module).to_string();
    let adapted: BTreeSet<&String> = beside.iter().map(|beside| &beside.module.name).collect();
    // The last part of a name if it selects no other module.
    let target = |module: &&String| {
        let mut same = modules.iter().filter(|other| last(&other.name) == last(module));
        let is_whole = same.all(|other| adapted.contains(&other.name));
        // The names of the tower's mergers have the same ends as those of its blocks.
        let has_namesakes = module.starts_with("model.visual.");
        if is_whole && !has_namesakes { last(module) } else { module.to_string() }
    };
    let targets: BTreeSet<String> = adapted.iter().map(target).collect();
    let first = beside[0].adapters[0];
    let (rank, alpha) = (beside[0].rank(), beside[0].alpha());
    let others = |differs: &dyn Fn(&ModuleAdapters<'_>) -> Option<Value>| -> Map<String, Value> {
        beside.iter().filter_map(|beside| Some((beside.module.name.clone(), differs(beside)?))).collect()
    };
    json!({
        "peft_type": "LORA",
        "task_type": if model.head == Head::Classes { "SEQ_CLS" } else { "CAUSAL_LM" },
        "base_model_name_or_path": from.map(|from| from.rsplit_once('@').map_or(from, |(repo, _)| repo)),
        "revision": Value::Null,
        "inference_mode": true,
        "r": rank,
        "lora_alpha": whole_number(alpha),
        "lora_dropout": first.dropout as f64,
        "target_modules": targets,
        "rank_pattern": others(&|b| (b.rank() != rank).then(|| json!(b.rank()))),
        "alpha_pattern": others(&|b| (b.alpha() != alpha).then(|| whole_number(b.alpha()))),
        "use_dora": first.dora,
        "use_rslora": false,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "modules_to_save": if whole.is_empty() { Value::Null } else { json!(whole) },
    })
}

/// The library writes an integral alpha without a decimal point.
fn whole_number(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}
