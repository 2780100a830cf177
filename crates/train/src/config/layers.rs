//! Layers of config values: the recipes that a recipe extends, the recipe, presets, the command line. Later layers win key by key, and
//! every key is checked to be known and well typed before it is set.

mod loaded;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use flatout_models::config::{ModelKind, Tower};
use toml::{Table, Value};

use super::check::SetKey;
use super::schema::{self, Meaning, QualifiedKey};
use super::value::{self, Written};
use super::{Config, foreign, nearest, text};
use crate::UserError;
use crate::refuse;
use crate::switches::Compile;
use crate::switches::compile::COMPILE;

/// Pairs of keys that are alternatives: setting one removes what a lower layer set with the other.
const ALTERNATIVES: [(&str, &str); 4] = [
    ("eval.every", EVERY_EPOCHS),
    (STEPS, "train.epochs"),
    (MICRO_BATCH, ACCUMULATE),
    ("schedule.warmup_steps", "schedule.warmup_share"),
];

const EVERY_EPOCHS: &str = "eval.every_epochs";
const STEPS: &str = "train.steps";
const HORIZON: &str = "schedule.horizon_steps";
/// Parts of a schedule that are counted in updates.
const SPANS: [&str; 2] = ["schedule.warmup_steps", "schedule.decay_steps"];
const BATCH: &str = "train.batch";
const MICRO_BATCH: &str = "train.micro_batch";
const ACCUMULATE: &str = "train.accumulate";
const KIND: &str = "model.kind";
const TOWER: &str = "model.vision.kind";
const TOWER_FROM: &str = "model.vision.from";
const CLASSES: &str = "model.classes";
const VOCAB: &str = "model.vocab";

/// Keys that `flatout resume` may change, or beginnings of keys. Those of sharding are among them because state is divided again at
/// every start, and another number of ranks may need to divide more.
const MAY_CHANGE: [&str; 12] = [
    "train.steps",
    "train.epochs",
    "train.on_nonfinite",
    "train.max_skipped",
    "train.patience",
    "eval.",
    "checkpoint.",
    "log.",
    "samples.",
    "track.",
    "mesh.",
    "switches.shard",
];

/// Whether a key, by its full path, may have another value when a run is resumed.
pub(crate) fn may_change(path: &str) -> bool {
    MAY_CHANGE.iter().any(|allowed| path.starts_with(allowed))
}

#[derive(Clone, Default)]
pub(crate) struct Layers {
    values: BTreeMap<String, LayerValue>,
    /// Number of the layer that is being added.
    layer: usize,
    /// Number of the last layer that is an embedded recipe.
    embedded: usize,
    /// Numbers of the layers whose keys the user gave, rather than a recipe of the program or a file with all keys.
    given: Vec<usize>,
    recipe: String,
    description: String,
}

#[derive(Clone)]
struct LayerValue {
    value: Value,
    layer: usize,
    /// Whether a lower layer set the key to another value.
    changes_another: bool,
    /// Whether the layer first gave another value, as when words are appended to a command.
    changes_itself: bool,
}

/// Parses a TOML file, or says in a sentence with file and line what is wrong.
pub fn parse(text: &str, origin: &str) -> Result<Table, UserError> {
    toml::from_str(text).map_err(|error| {
        let line =
            error.span().map(|span| format!(" line {}", line_at(text, span.start))).unwrap_or_default();
        UserError(format!("{origin}{line}: {}", error.message().replace('\n', ", ")))
    })
}

impl Layers {
    /// Adds a file as a layer.
    pub fn file(&mut self, text: &str, origin: &str) -> Result<(), UserError> {
        let table = parse(text, origin)?;
        self.table(table, text, origin)
    }

    /// Adds a parsed file as a layer; lines in errors are counted in `text`.
    pub fn table(&mut self, mut table: Table, text: &str, origin: &str) -> Result<(), UserError> {
        self.layer += 1;
        let located = |path: &[String], sentence: String| {
            let line = line_of(text, path).map(|line| format!(" line {line}")).unwrap_or_default();
            UserError(format!("{origin}{line}: {sentence}"))
        };
        for (name, field) in [("recipe", &mut self.recipe), ("description", &mut self.description)] {
            match table.remove(name) {
                Some(Value::String(text)) => *field = text,
                Some(_) => return Err(located(&[name.to_string()], format!("`{name}` must be a text"))),
                None => {}
            }
        }
        let given = table.get("model").and_then(|model| model.get("kind")).and_then(Value::as_str);
        let keys = schema::of_kind(given.and_then(|kind| kind.parse().ok()).unwrap_or(self.kind()));
        let mut leaves = Vec::new();
        collect_leaves(&mut Vec::new(), &table, keys, &mut leaves);
        // `compile` sets other switches. One that is given beside it wins.
        leaves.sort_by_key(|(path, _)| path.join(".") != COMPILE.path());
        for (path, given) in leaves {
            let name = path.join(".");
            let Some(found) = keys.iter().find(|found| found.path == name) else {
                let given = given.as_str().map_or_else(|| text::value(&given), String::from);
                return Err(located(&path, unknown(keys, &name, Some(&given))));
            };
            let read = value::read(&name, &found.key.kind, &given, Written::InFile);
            let set = read.and_then(|value| self.set(found, value));
            set.map_err(|sentence| located(&path, sentence))?;
        }
        let accumulate: Vec<String> = ACCUMULATE.split('.').map(String::from).collect();
        self.multiply_batch().map_err(|sentence| located(&accumulate, sentence))
    }

    /// Adds `key=value` arguments, in order, as one layer.
    pub fn overrides(&mut self, arguments: &[String]) -> Result<(), UserError> {
        self.layer += 1;
        self.note_given();
        let mut pairs = arguments.iter().filter_map(|argument| argument.split_once('='));
        let given = pairs.rfind(|(key, _)| [KIND, "kind"].contains(&key.trim()));
        let kind = given.and_then(|(_, kind)| kind.trim().parse().ok()).unwrap_or(self.kind());
        for argument in arguments {
            let (found, text) = parse_override_of(kind, argument)?;
            if found.key.optional && text == "none" {
                self.values.remove(&found.path);
                continue;
            }
            let given = Value::String(text.to_string());
            let value =
                value::read(&found.path, &found.key.kind, &given, Written::AsText).map_err(|sentence| {
                    match foreign::value_here(&found.path, text) {
                        Some(here) => format!("{sentence}; here that is {here}"),
                        None => sentence,
                    }
                })?;
            self.set(&found, value)?;
        }
        Ok(self.multiply_batch()?)
    }

    /// Adds `key=value` arguments whose keys begin with one of `allowed`; `when` says in the error when other keys cannot change.
    pub fn overrides_of(
        &mut self,
        arguments: &[String],
        allowed: &[&str],
        when: &str,
    ) -> Result<(), UserError> {
        for argument in arguments {
            let (found, _) = parse_override_of(self.kind(), argument)?;
            if !allowed.iter().any(|allowed| found.path.starts_with(allowed)) {
                let allowed = allowed.join(", ");
                refuse!("`{}` cannot change {when}; only keys that begin with {allowed} can", found.path);
            }
        }
        self.overrides(arguments)
    }

    /// The config without its adapter, which may not be known yet.
    pub fn sketch(&self) -> Result<Config, UserError> {
        let mut known = self.clone();
        known.values.retain(|path, _| !path.starts_with("adapter."));
        known.finish()
    }

    /// Sets a key in the current layer, and adjusts the keys of lower layers that depend on it.
    fn set(&mut self, found: &QualifiedKey, value: Value) -> Result<(), String> {
        if found.path == COMPILE.path() {
            let mode: Compile = value.as_str().expect("a choice is a text").parse()?;
            for (path, value) in mode.settings() {
                self.put(path, Value::String(value.to_string()));
            }
            return Ok(());
        }
        for (a, b) in ALTERNATIVES {
            let other = match found.path.as_str() {
                path if path == a => b,
                path if path == b => a,
                _ => continue,
            };
            let Some(held) = self.values.get(other) else { continue };
            if held.layer < self.layer {
                self.values.remove(other);
            } else if a != MICRO_BATCH && ![&held.value, &value].into_iter().any(is_unset) {
                return Err(format!("`{a}` and `{b}` are both given: give one of them"));
            }
        }
        if let Some(steps) = value.as_integer().filter(|_| found.path == STEPS) {
            self.shorten_schedule(steps);
            self.count_evaluations(steps);
        }
        self.put(found.path.clone(), value);
        if found.path == EVERY_EPOCHS {
            // Otherwise the default of eval.every would apply beside it.
            self.put("eval.every".into(), Value::Integer(0));
        }
        Ok(())
    }

    /// Shortens warm-up and decay of lower layers in proportion if they do not fit into a run of this many steps.
    fn shorten_schedule(&mut self, steps: i64) {
        let whole = |path: &str| self.values.get(path).and_then(|held| held.value.as_integer());
        let lower = |path: &&str| self.values.get(*path).is_some_and(|held| held.layer < self.layer);
        let spans: Vec<&str> = SPANS.into_iter().filter(lower).collect();
        let needed: i64 = spans.iter().filter_map(|path| whole(path)).fold(0, i64::saturating_add);
        if needed <= steps || whole(HORIZON).is_some() {
            return;
        }
        // The steps of a run that is counted in epochs are not known yet: its schedule is taken to be a tenth of it.
        let before = whole(STEPS).unwrap_or(needed.saturating_mul(10)).max(needed);
        let shorter = |span: i64| (span as f64 * steps as f64 / before as f64).round() as i64;
        let spans: Vec<(&str, i64)> =
            spans.into_iter().filter_map(|path| Some((path, shorter(whole(path)?)))).collect();
        for (path, span) in spans {
            self.put(path.into(), Value::Integer(span));
        }
    }

    /// Replaces evaluations that a lower layer counts in epochs by ten evaluations, in a run that is counted in steps.
    fn count_evaluations(&mut self, steps: i64) {
        if self.values.get(EVERY_EPOCHS).is_some_and(|held| held.layer < self.layer) {
            self.values.remove(EVERY_EPOCHS);
            self.put("eval.every".into(), Value::Integer((steps / 10).max(1)));
        }
    }

    /// Sets the batch to the product of micro_batch and accumulate, if this layer sets both.
    fn multiply_batch(&mut self) -> Result<(), String> {
        let given = |path: &str| {
            let held = self.values.get(path).filter(|held| held.layer == self.layer)?;
            held.value.as_integer()
        };
        let (Some(rows), Some(times)) = (given(MICRO_BATCH), given(ACCUMULATE)) else { return Ok(()) };
        if times == 0 {
            return Err(format!("`{ACCUMULATE}` is 0 and must be at least 1"));
        }
        let batch = rows.saturating_mul(times);
        match given(BATCH) {
            Some(given) if given != batch => Err(format!(
                "`{MICRO_BATCH}` = {rows} times `{ACCUMULATE}` = {times} is {batch}, and `{BATCH}` is {given}: leave one \
                 of them out"
            )),
            _ => {
                self.put(BATCH.into(), Value::Integer(batch));
                self.values.remove(ACCUMULATE);
                Ok(())
            }
        }
    }

    /// The kind of the model, or the default if none is set.
    fn kind(&self) -> ModelKind {
        let set = self.values.get(KIND).and_then(|held| held.value.as_str());
        set.and_then(|kind| kind.parse().ok()).unwrap_or_default()
    }

    /// Checks that every key of the model belongs to its kind, and that no required key is missing.
    fn check_kind(&self, kind: ModelKind) -> Result<(), UserError> {
        let own = schema::of_section("model", kind.keys());
        for path in self.values.keys().filter(|path| *path != KIND) {
            let Some(name) = path.strip_prefix("model.") else { continue };
            if !own.iter().any(|found| found.name == name) {
                let kinds = ModelKind::with(|leaf| leaf.name() == name);
                let kinds: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
                refuse!(
                    "`{path}` is a key of model.kind={}, and `model.kind` is {kind}: leave it out",
                    kinds.join(" or ")
                );
            }
        }
        match missing(&own, |path| self.values.contains_key(path)) {
            Some(found) => refuse!("`{}` is missing: give {}", found.path, found.key.kind),
            None => self.check_tower(),
        }
    }

    /// The kind of the tower, or the default if none is set.
    fn tower(&self) -> Tower {
        let set = self.values.get(TOWER).and_then(|held| held.value.as_str());
        set.and_then(|kind| kind.parse().ok()).unwrap_or_default()
    }

    /// Checks that every key of the tower belongs to its kind.
    fn check_tower(&self) -> Result<(), UserError> {
        let (tower, own) = (self.tower(), self.tower().keys());
        for path in self.values.keys().filter(|path| *path != TOWER) {
            let Some(name) = path.strip_prefix("model.vision.") else { continue };
            if !own.iter().any(|key| key.name == name) {
                let having =
                    Tower::ALL.iter().filter(|tower| tower.keys().iter().any(|key| key.name == name));
                let having: Vec<&str> = having.map(|tower| tower.name()).collect();
                refuse!(
                    "`{path}` is a key of {TOWER}={}, and `{TOWER}` is {tower}: leave it out",
                    having.join(" or ")
                );
            }
        }
        Ok(())
    }

    fn put(&mut self, path: String, value: Value) {
        let lower = self.values.get(&path);
        let changes_another =
            lower.is_some_and(|held| held.changes_another || held.layer < self.layer && held.value != value);
        let changes_itself = lower.is_some_and(|held| held.layer == self.layer && held.value != value);
        self.values.insert(path, LayerValue { value, layer: self.layer, changes_another, changes_itself });
    }

    /// Notes that the last layer, like those below it, is an embedded recipe.
    pub fn note_embedded(&mut self) {
        self.embedded = self.layer;
    }

    /// Notes that the user chose the keys of the last layer.
    pub fn note_given(&mut self) {
        self.given.push(self.layer);
    }

    /// Whether `train.groups` comes from an embedded recipe, which also serves models with other parameters.
    pub fn has_embedded_groups(&self) -> bool {
        self.values.get("train.groups").is_some_and(|held| held.layer <= self.embedded)
    }

    /// Sets the recipe's name, whatever its files say.
    pub fn name(&mut self, recipe: &str) {
        self.recipe = recipe.to_string();
    }

    /// The complete config, validated.
    pub fn finish(self) -> Result<Config, UserError> {
        let (kind, tower) = (self.kind(), self.tower());
        self.check_kind(kind)?;
        let keys = schema::of_kind(kind);
        let others: Vec<QualifiedKey> =
            keys.iter().filter(|found| found.section != "model").cloned().collect();
        if let Some(found) = missing(&others, |path| self.values.contains_key(path)) {
            refuse!("`{}` is missing: give {}", found.path, found.key.kind);
        }
        let set_keys: BTreeMap<String, SetKey> = self
            .values
            .iter()
            .map(|(path, held)| {
                let LayerValue { layer, changes_another, changes_itself, .. } = *held;
                let is_given = self.given.contains(&layer);
                (path.clone(), SetKey { layer, is_given, changes_another, changes_itself })
            })
            .collect();
        let mut tree = Table::new();
        for (section, _) in schema::sections() {
            tree.insert(section.to_string(), Value::Table(Table::new()));
        }
        for (path, held) in self.values {
            let found = keys.iter().find(|found| found.path == path).expect("only known keys are set");
            // A lower layer may have set it as a key of another kind of model.
            let value = value::read(&path, &found.key.kind, &held.value, Written::InFile)?;
            nest(&mut tree, found, value);
        }
        let model = tree["model"].as_table_mut().expect("sections are tables");
        model.insert("kind".into(), Value::String(kind.to_string()));
        if let Some(vision) = model.get_mut("vision").and_then(Value::as_table_mut) {
            vision.insert("kind".into(), Value::String(tower.to_string()));
        }
        tree.insert("recipe".into(), Value::String(self.recipe));
        tree.insert("description".into(), Value::String(self.description));
        let config: Config = Value::Table(tree).try_into().expect("checked values fit the tree");
        config.validate()?;
        config.refuse_unread(&set_keys)?;
        Ok(config)
    }
}

impl Config {
    /// The same config with `key=value` overrides.
    pub fn with(&self, overrides: &[String]) -> Result<Config, UserError> {
        let mut layers = Layers::default();
        layers.file(&self.to_toml(), "config.toml")?;
        layers.overrides(overrides)?;
        layers.finish()
    }

    /// The same config with a preset's values over it.
    pub fn with_file(&self, text: &str, origin: &str) -> Result<Config, UserError> {
        let mut layers = Layers::default();
        layers.file(&self.to_toml(), "config.toml")?;
        layers.file(text, origin)?;
        layers.description.clone_from(&self.description);
        layers.finish()
    }

    /// The config of a run that is resumed: the same except for the keys that may change. If the number of steps changes, the schedule
    /// keeps the horizon it began with.
    pub fn resumed(&self, overrides: &[String]) -> Result<Config, UserError> {
        for argument in overrides {
            let (found, _) = parse_override(argument)?;
            if !may_change(&found.path) {
                refuse!(
                    "`{}` cannot change when a run is resumed; keys that can are train.steps, train.epochs, \
                     train.on_nonfinite, train.max_skipped, train.patience, eval.*, checkpoint.*, log.*, samples.*, track.*, mesh.*, shard and shard_keep",
                    found.path
                );
            }
        }
        let mut layers = Layers::default();
        layers.file(&self.to_toml(), "config.toml")?;
        if self.schedule.horizon_steps.is_none()
            && let Some(steps) = self.train.steps
        {
            layers.put("schedule.horizon_steps".into(), Value::Integer(steps as i64));
        }
        layers.overrides(overrides)?;
        layers.finish()
    }
}

/// Whether a value, `auto` or 0, leaves the choice to the alternative key.
fn is_unset(value: &Value) -> bool {
    value.as_str() == Some("auto") || value.as_integer() == Some(0)
}

/// The full paths of the keys that `key=value` arguments set, for any kind of model.
pub fn keys_of(arguments: &[String]) -> Result<Vec<String>, UserError> {
    let path = |argument: &String| {
        let of_kind = |kind: &ModelKind| parse_override_of(*kind, argument).ok();
        let found = ModelKind::ALL.iter().find_map(of_kind).map_or_else(|| parse_override(argument), Ok)?;
        Ok(found.0.path)
    };
    arguments.iter().map(path).collect()
}

/// The second half of a sentence that answers a key of another tool with the key here.
pub fn answer(name: &str) -> Option<String> {
    foreign::answer(name, None)
}

/// The error for an unknown option that is a key here or in another tool. `next` is the word after it.
pub fn option_as_key(option: &str, next: Option<&str>) -> Option<String> {
    let (option, given) = option.split_once('=').map_or((option, None), |(name, text)| (name, Some(text)));
    let value = given.or(next.filter(|word| !word.starts_with("--") && !word.contains('=')));
    let name = option.trim_start_matches('-').replace('-', "_");
    let answer = match schema::lookup(&name) {
        Meaning::One(_) => {
            format!("keys are given without dashes, as in `{name}={}`", value.unwrap_or("VALUE"))
        }
        Meaning::Several(paths) => {
            format!("keys are given without dashes, here {}=VALUE", paths.join("=VALUE or "))
        }
        Meaning::Nothing => foreign::answer(&name, value)?,
    };
    Some(format!("there is no option `{option}`; {answer}"))
}

pub fn parse_override(argument: &str) -> Result<(QualifiedKey, &str), UserError> {
    parse_override_of(ModelKind::default(), argument)
}

/// Parses an override, with a key of the model understood as in this kind of model.
fn parse_override_of(kind: ModelKind, argument: &str) -> Result<(QualifiedKey, &str), UserError> {
    let Some((name, value)) = argument.split_once('=') else {
        refuse!("`{argument}` is neither a recipe nor key=value");
    };
    let keys = schema::of_kind(kind);
    match schema::lookup_among(keys, name.trim()) {
        Meaning::One(found) => Ok((found, value.trim())),
        Meaning::Several(paths) => refuse!("`{name}` may be {}: give it in full", paths.join(" or ")),
        Meaning::Nothing => Err(UserError(unknown(keys, name.trim(), Some(value)))),
    }
}

/// The first required key that is not given. A key of an optional table is required only if another key of that table is given.
fn missing(keys: &[QualifiedKey], is_given: impl Fn(&str) -> bool) -> Option<&QualifiedKey> {
    let is_present = |table: &String| {
        let within = |found: &&QualifiedKey| found.path.starts_with(&format!("{table}."));
        keys.iter().filter(within).any(|found| is_given(&found.path))
    };
    let is_required =
        |found: &&QualifiedKey| found.key.required && found.optional_table.as_ref().is_none_or(is_present);
    keys.iter().filter(is_required).find(|found| !is_given(&found.path))
}

/// Inserts a value into the nested tables of its key.
fn nest(tree: &mut Table, found: &QualifiedKey, value: Value) {
    let mut table = tree;
    for name in [&[found.section], &found.tables[..]].concat() {
        let inner = table.entry(name).or_insert_with(|| Value::Table(Table::new()));
        table = inner.as_table_mut().expect("sections are tables");
    }
    table.insert(found.key.name.to_string(), value);
}

/// The error for an unknown key: its name and value here if it is another tool's, or the nearest name.
fn unknown(keys: &[QualifiedKey], name: &str, value: Option<&str>) -> String {
    if let Some(answer) = foreign::answer(name, value) {
        return format!("there is no key `{name}`; {answer}");
    }
    let in_section =
        name.split_once('.').filter(|(section, _)| keys.iter().any(|found| found.section == *section));
    let short = in_section.map_or(name, |(_, key)| key);
    if let Meaning::One(found) = schema::lookup_among(keys, short) {
        return format!("there is no key `{name}`; here that is `{}`", found.path);
    }
    // (a name that may have been meant, its path).
    let mut candidates: Vec<(String, String)> = Vec::new();
    for found in keys {
        match in_section {
            Some((given, _)) if given != found.section => continue,
            Some(_) => candidates.push((found.name.clone(), found.path.clone())),
            None => {
                let last = found.name.rsplit('.').next().unwrap_or(&found.name);
                let names = [found.path.clone(), found.name.clone(), last.to_string()];
                candidates.extend(names.map(|name| (name, found.path.clone())));
            }
        }
    }
    let close = nearest(short, candidates.iter().map(|(name, _)| name.as_str()));
    if let Some((_, path)) = close.and_then(|close| candidates.iter().find(|(name, _)| name == close)) {
        return format!("there is no key `{name}`; did you mean `{path}`?");
    }
    match in_section {
        Some((section, _)) => {
            let keys: Vec<_> = candidates.iter().map(|(key, _)| key.as_str()).collect();
            format!("there is no key `{name}`; `{section}` has {}", keys.join(", "))
        }
        None => format!("there is no key `{name}`; `flatout schema` lists them all"),
    }
}

/// Collects values by path. Tables are descended into unless they are the value of a known key, so dotted keys and nested tables are
/// equivalent. An empty table of an unknown name counts as a value, so that it is refused.
fn collect_leaves(
    path: &mut Vec<String>,
    table: &Table,
    keys: &[QualifiedKey],
    leaves: &mut Vec<(Vec<String>, Value)>,
) {
    for (name, held) in table {
        path.push(name.clone());
        let joined = path.join(".");
        let is_key = || keys.iter().any(|found| found.path == joined);
        let begins = format!("{joined}.");
        let has_keys = || keys.iter().any(|found| found.path.starts_with(&begins));
        match held {
            Value::Table(inner) if !is_key() && (!inner.is_empty() || has_keys()) => {
                collect_leaves(path, inner, keys, leaves);
            }
            other => leaves.push((path.clone(), other.clone())),
        }
        path.pop();
    }
}

/// Line of the key, counted from 1.
fn line_of(text: &str, path: &[String]) -> Option<usize> {
    let document = toml::de::DeTable::parse(text).ok()?;
    let mut table = document.get_ref();
    let mut line = None;
    for name in path {
        let (key, held) = table.iter().find(|(key, _)| key.get_ref() == name.as_str())?;
        line = Some(line_at(text, key.span().start));
        match held.get_ref().as_table() {
            Some(inner) => table = inner,
            None => break,
        }
    }
    line
}

fn line_at(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
}
