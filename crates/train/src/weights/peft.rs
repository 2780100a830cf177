//! Adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`, one folder an adapter.
//!
//! Its tensors are named after the modules of the library's model: A is `lora_A.weight`, B `lora_B.weight`, and DoRA's
//! magnitude `lora_magnitude_vector`. What was trained of the model itself lies beside them under its own name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use flatout_ir::passes::adapter::SCOPE;
use flatout_ir::passes::adapters::adaptable;
use flatout_ir::{Adapter, Class, Init, TensorType};
use flatout_models::config::{DecoderConfig, Head};
use flatout_models::library::huggingface;
use flatout_models::registry::Family;
use flatout_models::vision;
use flatout_runtime::Session;
use serde_json::{Map, Value, json};

use crate::Failure;
use crate::UserError;
use crate::config::{self, AdapterGroup, AdapterGroups, AdapterKind, Config};
use crate::refuse;
use crate::run::checkpoint::{Dtype, TensorFile, header};
use crate::run::state::held;
use crate::weights::adapters::also_trains;
use crate::weights::export::target::METADATA;
use crate::weights::pretrained::{Place, Weights, parameters};
use flatout_data::durable;

pub const CONFIG: &str = "adapter_config.json";
pub const TENSORS: &str = "adapter_model.safetensors";
/// What stands before the name of a module.
const BASE: &str = "base_model.model.";
const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";
const MAGNITUDE: &str = "lora_magnitude_vector";

/// The library's module of every weight that can have an adapter, in the order of the model.
pub(crate) fn modules(model: &DecoderConfig) -> Result<Vec<(String, String)>, String> {
    let shapes = parameters(&model.clone().into());
    let graph = model.build(model.least());
    let weights: BTreeSet<&str> = adaptable(&graph).into_iter().map(|(path, _)| path).collect();
    let mut modules = vec![];
    for stored in huggingface::stored(model, |path| shapes[path].0.dims.clone())? {
        if !weights.contains(stored.ours.as_str()) {
            continue;
        }
        if !stored.is_whole() {
            // Of a tower q, k and v are parts of one tensor; its other weights can have adapters there.
            if is_of_tower(&stored.ours) {
                continue;
            }
            return Err(format!(
                "`{}` is part of `{}` there, or lies the other way round",
                stored.ours, stored.theirs
            ));
        }
        let module = stored.theirs.strip_suffix(".weight").unwrap_or(&stored.theirs);
        modules.push((stored.ours, module.to_string()));
    }
    Ok(modules)
}

fn is_of_tower(weight: &str) -> bool {
    weight.split('.').next() == Some(vision::SCOPE)
}

/// An adapter that was found: what it is, and where its tensors lie.
#[derive(Debug)]
pub struct Peft {
    /// Kind, rank, alpha, paths and groups.
    pub adapter: config::Adapter,
    weights: Weights,
    /// Our paths and types of all its tensors.
    tensors: BTreeMap<String, TensorType>,
}

/// One weight's adapter in a folder.
struct Beside {
    weight: String,
    rank: usize,
    alpha: f64,
}

impl Peft {
    /// Opens a folder and checks every name, type and shape; no tensor is read yet.
    pub fn open(folder: &Path, model: &DecoderConfig) -> Result<Peft, UserError> {
        let shown = folder.display();
        let described = described(&folder.join(CONFIG))?;
        let modules = modules(model)
            .map_err(|why| UserError(format!("`adapter.from` cannot be used with this model: {why}")))?;
        let path = folder.join(TENSORS);
        let file = TensorFile::open(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound if folder.join("adapter_model.bin").is_file() => UserError(format!(
                "{shown} has its adapter only as a pickle, which can run any program and is never opened: convert it to \
                 safetensors"
            )),
            std::io::ErrorKind::InvalidData => UserError(error.to_string()),
            _ => UserError(format!("{} cannot be read: {error}", path.display())),
        })?;
        let is_dora = described["use_dora"].as_bool().unwrap_or(false);
        let shapes = parameters(&model.clone().into());
        let mut found: Vec<Beside> = vec![];
        let mut tensors: BTreeMap<String, TensorType> = BTreeMap::new();
        let mut places: Vec<(String, String)> = vec![];
        let mut unused: BTreeSet<&str> = file.entries().keys().map(String::as_str).collect();
        for (weight, module) in &modules {
            let name = |what: &str| format!("{BASE}{module}.{what}");
            let Some(a) = file.entries().get(&name(A)) else { continue };
            let [rank, _] = a.shape[..] else {
                refuse!(
                    "{}: `{}` has shape {:?}, and [rank, in] is wanted",
                    path.display(),
                    name(A),
                    a.shape
                );
            };
            check_rank(&described, module, rank)?;
            let alpha = alpha_of(&described, module, rank)?;
            let dims = &shapes[weight].0.dims;
            let adapter = named(weight, rank, is_dora);
            let theirs = [A, B, MAGNITUDE].map(name);
            for (slot, theirs) in adapter.parameters([dims[0], dims[1]]).into_iter().zip(theirs) {
                check(&path, &file, &theirs, &slot.ty.dims)?;
                unused.remove(theirs.as_str());
                places.push((slot.path.clone(), theirs));
                tensors.insert(slot.path, slot.ty);
            }
            found.push(Beside { weight: weight.clone(), rank, alpha });
        }
        // Parts of the model that were trained with it.
        let own = huggingface::stored(model, |path| shapes[path].0.dims.clone()).unwrap_or_default();
        for stored in own {
            let theirs = format!("{BASE}{}", stored.theirs);
            if unused.remove(theirs.as_str()) {
                check(&path, &file, &theirs, &stored.dims)?;
                tensors.insert(stored.ours.clone(), shapes[&stored.ours].0.clone());
                places.push((stored.ours, theirs));
            }
        }
        if let Some(name) = unused.first() {
            refuse!(
                "{} has `{name}`, which belongs to no linear weight of the model's layers",
                path.display()
            );
        }
        if found.is_empty() {
            refuse!("{} has no adapter of the model's layers", path.display());
        }
        let mut weights = Weights::of_files(vec![(path, file)]);
        for (ours, name) in places {
            weights.place(ours, Place { file: 0, name, within: None, expect: None });
        }
        let kind = if is_dora { AdapterKind::Dora } else { AdapterKind::Lora };
        Ok(Peft { adapter: section(kind, &found, &modules), weights, tensors })
    }

    /// Whether all it comes with is trained by a config.
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
        for piece in held(session, Class::is_parameter) {
            let Some(ty) = self.tensors.get(&piece.path) else { continue };
            let (wide, _) = self.weights.read(&piece.path, ty, &Init::Zeros)?;
            let size = size_of::<f32>();
            session.write_range(
                &piece.slot,
                piece.at,
                &wide[size * piece.range.start..size * piece.range.end],
            )?;
        }
        Ok(())
    }
}

/// The adapter a folder's tensors are loaded as.
fn named(weight: &str, rank: usize, dora: bool) -> Adapter {
    let (name, weight) = (config::DEFAULT_ADAPTER.to_string(), weight.to_string());
    Adapter { name, weight, rank, scale: 1.0, dropout: 0.0, dora }
}

/// Reads and judges the config: whatever would make it another computation than ours is refused.
fn described(path: &Path) -> Result<Value, UserError> {
    let shown = path.display();
    let bytes = fs::read(path).map_err(|error| {
        UserError(format!("`adapter.from` wants a folder with an adapter in PEFT's layout: {shown}: {error}"))
    })?;
    let value: Value =
        serde_json::from_slice(&bytes).map_err(|error| UserError(format!("{shown} is no JSON: {error}")))?;
    if value["peft_type"] != "LORA" {
        refuse!("{shown} has peft_type {}, and LORA is read", value["peft_type"]);
    }
    let is_unsaid =
        |key: &str| matches!(&value[key], Value::Null | Value::Bool(false)) || value[key] == json!({});
    for key in [
        "fan_in_fan_out",
        "lora_bias",
        "layer_replication",
        "use_qalora",
        "use_bdlora",
        "alora_invocation_tokens",
    ] {
        if !is_unsaid(key) {
            refuse!("{shown} has {key} {}, which is not supported", value[key]);
        }
    }
    if !matches!(value["bias"].as_str(), None | Some("none")) {
        refuse!("{shown} has bias {}, and adapters without biases are read", value["bias"]);
    }
    Ok(value)
}

/// The value of a key for a module: that of a pattern which names it, or the one of all modules. `None` where neither says.
fn said_of<'v>(
    described: &'v Value,
    key: &str,
    patterns: &str,
    module: &str,
) -> Result<Option<&'v Value>, UserError> {
    let mut said = described.get(key).filter(|value| !value.is_null());
    for (pattern, value) in described[patterns].as_object().into_iter().flatten() {
        if pattern.contains(|c: char| !c.is_ascii_alphanumeric() && !"._-".contains(c)) {
            refuse!("{CONFIG} has the {patterns} `{pattern}`: names of modules are read, and no expressions");
        }
        if module == pattern || module.ends_with(&format!(".{pattern}")) {
            said = Some(value);
        }
    }
    Ok(said)
}

/// Whether the rank that the config says is the one that the tensors have: the library divides alpha by the former.
fn check_rank(described: &Value, module: &str, rank: usize) -> Result<(), UserError> {
    // Expressions name modules that the tensors alone tell.
    match said_of(described, "r", "rank_pattern", module).unwrap_or_default() {
        Some(said) if said.as_u64() != Some(rank as u64) => {
            refuse!("{CONFIG} says that the rank (r) of `{module}` is {said}, and its tensors have {rank}")
        }
        _ => Ok(()),
    }
}

/// The scale of a module's product, times its rank.
fn alpha_of(described: &Value, module: &str, rank: usize) -> Result<f64, UserError> {
    let alpha = match said_of(described, "lora_alpha", "alpha_pattern", module)? {
        None => 8.0,
        Some(said) => match said.as_f64() {
            Some(alpha) => alpha,
            None => refuse!("{CONFIG} has the lora_alpha {said} for `{module}`, which is no number"),
        },
    };
    let ranked = described["use_rslora"].as_bool().unwrap_or(false);
    Ok(if ranked { alpha * (rank as f64).sqrt() } else { alpha })
}

fn check(path: &Path, file: &TensorFile, name: &str, dims: &[usize]) -> Result<(), UserError> {
    let Some(entry) = file.entries().get(name) else {
        refuse!("{} lacks `{name}`", path.display());
    };
    if entry.shape != dims || !matches!(entry.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
        refuse!(
            "{}: `{name}` is {} {:?}, and {dims:?} of F32, F16 or BF16 is what the model wants",
            path.display(),
            entry.dtype,
            entry.shape
        );
    }
    Ok(())
}

/// The keys of section `adapter` that say what was found: the first rank and alpha are the section's, others groups'.
fn section(kind: AdapterKind, found: &[Beside], modules: &[(String, String)]) -> config::Adapter {
    let mut shapes: Vec<(usize, f64)> = vec![];
    for beside in found {
        if !shapes.contains(&(beside.rank, beside.alpha)) {
            shapes.push((beside.rank, beside.alpha));
        }
    }
    let of_shape = |shape: (usize, f64)| {
        let with: Vec<&str> =
            found.iter().filter(|b| (b.rank, b.alpha) == shape).map(|b| b.weight.as_str()).collect();
        patterns(&with, modules)
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

/// Weights as few patterns: `layers.*.attn.wq` where every layer's is among them.
fn patterns(weights: &[&str], modules: &[(String, String)]) -> Vec<String> {
    let starred = |path: &str| -> String {
        let names: Vec<&str> = path.split('.').collect();
        let is_number = |name: &&str| name.bytes().all(|b| b.is_ascii_digit());
        names.iter().map(|name| if is_number(name) { "*" } else { *name }).collect::<Vec<_>>().join(".")
    };
    let mut patterns: Vec<String> = vec![];
    for weight in weights {
        let star = starred(weight);
        let is_whole =
            modules.iter().all(|(ours, _)| starred(ours) != star || weights.contains(&ours.as_str()));
        let pattern = if is_whole { star } else { weight.to_string() };
        if !patterns.contains(&pattern) {
            patterns.push(pattern);
        }
    }
    patterns
}

/// Where one adapter's tensors come from, and what they were trained beside.
pub struct Trained<'a> {
    pub model: &'a DecoderConfig,
    pub weights: &'a mut Weights,
    /// Adapters of one name.
    pub adapters: &'a [Adapter],
    /// Parameters of the model that were trained with them.
    pub also: &'a [String],
    /// What `model.from` said.
    pub from: Option<&'a str>,
}

/// Writes both files of an adapter into a folder; gives the parameters and the bytes of the tensors.
pub fn write(trained: Trained<'_>, dtype: Dtype, folder: &Path) -> Result<(u64, u64), Failure> {
    let Trained { model, weights, adapters, also, from } = trained;
    let modules = exportable(model, adapters)?;
    let module =
        |weight: &str| modules.iter().find(|(ours, _)| ours == weight).map(|(_, theirs)| theirs.as_str());
    let shapes = parameters(&model.clone().into());
    let mut named: Vec<(String, Vec<usize>, Vec<u8>)> = vec![];
    let mut put = |name: String, ty: &TensorType, wide: Vec<u8>| {
        let bytes = if dtype == Dtype::F32 { wide } else { crate::weights::pretrained::narrow(&wide) };
        named.push((name, ty.dims.clone(), bytes));
    };
    for adapter in adapters {
        let dims = &shapes[&adapter.weight].0.dims;
        let module = module(&adapter.weight).expect("adapters are of the model's weights");
        for (slot, what) in adapter.parameters([dims[0], dims[1]]).iter().zip([A, B, MAGNITUDE]) {
            let (wide, _) = weights.read(&slot.path, &slot.ty, &slot.init)?;
            put(format!("{BASE}{module}.{what}"), &slot.ty, wide);
        }
    }
    let stored = huggingface::stored(model, |path| shapes[path].0.dims.clone()).map_err(UserError)?;
    let mut whole = BTreeSet::new();
    for path in also {
        let (ty, init) = &shapes[path];
        let theirs =
            &stored.iter().find(|s| s.ours == *path).expect("every parameter has a name there").theirs;
        let (wide, _) = weights.read(path, ty, init)?;
        put(format!("{BASE}{theirs}"), ty, wide);
        // By its whole name: the library takes every module whose name ends with it.
        whole.insert(theirs.rsplit_once('.').map_or(theirs.as_str(), |(module, _)| module).to_string());
    }
    let path = folder.join(TENSORS);
    let heads: Vec<_> = named.iter().map(|(name, dims, _)| (name.as_str(), dtype, dims.as_slice())).collect();
    let mut file = header(&heads, &METADATA).map_err(Failure::io(path.display()))?;
    named.iter().for_each(|(_, _, bytes)| file.extend_from_slice(bytes));
    durable::write(&path, &file).map_err(Failure::io(path.display()))?;
    let config = described_by(model, adapters, &modules, &whole, from);
    let text = serde_json::to_vec_pretty(&config).expect("JSON has a text");
    durable::write(&folder.join(CONFIG), &text).map_err(Failure::io(folder.display()))?;
    let elements = named.iter().map(|(_, dims, _)| dims.iter().product::<usize>() as u64).sum();
    let size = named.iter().map(|(_, _, bytes)| bytes.len() as u64).sum();
    Ok((elements, size))
}

/// The names of modules, for an export of these adapters.
pub fn exportable(model: &DecoderConfig, adapters: &[Adapter]) -> Result<Vec<(String, String)>, UserError> {
    let cannot =
        |why: String| UserError(format!("the adapters cannot be exported apart: {why}; leave --adapter out"));
    let modules = modules(model).map_err(cannot)?;
    let is_named = |weight: &String| modules.iter().any(|(ours, _)| ours == weight);
    match adapters.iter().find(|adapter| !is_named(&adapter.weight)) {
        Some(adapter) => Err(cannot(format!("`{}` is part of a larger tensor there", adapter.weight))),
        None => Ok(modules),
    }
}

fn described_by(
    model: &DecoderConfig,
    adapters: &[Adapter],
    modules: &[(String, String)],
    whole: &BTreeSet<String>,
    from: Option<&str>,
) -> Value {
    let module =
        |a: &Adapter| &modules.iter().find(|(ours, _)| *ours == a.weight).expect("an adapter of the model").1;
    let last = |module: &str| module.rsplit('.').next().unwrap_or(module).to_string();
    let adapted: BTreeSet<&String> = adapters.iter().map(module).collect();
    // The last part of a name where it means no other module.
    let target = |module: &&String| {
        let same = modules.iter().filter(|(_, other)| last(other) == last(module));
        let is_whole = same.into_iter().all(|(_, other)| adapted.contains(other));
        // The tower's mergers have names that end as its blocks' do.
        let has_namesakes = module.starts_with("model.visual.");
        if is_whole && !has_namesakes { last(module) } else { module.to_string() }
    };
    let targets: BTreeSet<String> = adapted.iter().map(target).collect();
    let (rank, alpha) = (adapters[0].rank, alpha(&adapters[0]));
    let others = |differs: &dyn Fn(&Adapter) -> Option<Value>| -> Map<String, Value> {
        adapters.iter().filter_map(|a| Some((module(a).clone(), differs(a)?))).collect()
    };
    json!({
        "peft_type": "LORA",
        "task_type": if model.head == Head::Classes { "SEQ_CLS" } else { "CAUSAL_LM" },
        "base_model_name_or_path": from.map(|from| from.rsplit_once('@').map_or(from, |(repo, _)| repo)),
        "revision": Value::Null,
        "inference_mode": true,
        "r": rank,
        "lora_alpha": whole_number(alpha),
        "lora_dropout": adapters[0].dropout as f64,
        "target_modules": targets,
        "rank_pattern": others(&|a| (a.rank != rank).then(|| json!(a.rank))),
        "alpha_pattern": others(&|a| (self::alpha(a) != alpha).then(|| whole_number(self::alpha(a)))),
        "use_dora": adapters[0].dora,
        "use_rslora": false,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "modules_to_save": if whole.is_empty() { Value::Null } else { json!(whole) },
    })
}

fn alpha(adapter: &Adapter) -> f64 {
    adapter.scale * adapter.rank as f64
}

/// The library says alpha without a point where it has none.
fn whole_number(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}
