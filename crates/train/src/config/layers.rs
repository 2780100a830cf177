//! Layers of values: the recipe's ancestors, the recipe, what is laid over it, the command line. Later layers
//! win key by key, and every key is known and well typed before it is laid down.

use std::collections::BTreeMap;

use flatout_models::config::{Model, ModelKind};
use flatout_models::registry::Asked;
use toml::{Table, Value};

use super::schema::{self, Found, Meaning};
use super::value::{self, Written};
use super::{Adapter, Config, foreign, nearest, text};
use crate::UserError;
use crate::refuse;
use crate::switches::Compile;
use crate::switches::compile::COMPILE;

/// Keys that say the same thing in two ways: giving one puts aside what a lower layer said with the other.
const INSTEAD: [(&str, &str); 4] = [
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
const CLASSES: &str = "model.classes";

/// What `flatout resume` may change.
const MAY_CHANGE: [&str; 8] = [
    "train.steps",
    "train.epochs",
    "train.on_nonfinite",
    "train.max_skipped",
    "train.patience",
    "eval.",
    "checkpoint.",
    "log.",
];

/// Whether a key, by its full path, may have another value when a run goes on.
pub(crate) fn may_change(path: &str) -> bool {
    MAY_CHANGE.iter().any(|allowed| path.starts_with(allowed))
}

#[derive(Clone, Default)]
pub(crate) struct Layers {
    values: BTreeMap<String, Held>,
    /// Number of the layer being laid.
    layer: usize,
    recipe: String,
    description: String,
}

#[derive(Clone)]
struct Held {
    value: Value,
    layer: usize,
}

/// The tables of a TOML file, or a sentence with file and line.
pub fn parse(text: &str, origin: &str) -> Result<Table, UserError> {
    toml::from_str(text).map_err(|error| {
        let line =
            error.span().map(|span| format!(" line {}", line_at(text, span.start))).unwrap_or_default();
        UserError(format!("{origin}{line}: {}", error.message().replace('\n', ", ")))
    })
}

impl Layers {
    /// Lays a file's values over those there are.
    pub fn file(&mut self, text: &str, origin: &str) -> Result<(), UserError> {
        let table = parse(text, origin)?;
        self.table(table, text, origin)
    }

    /// Lays a parsed file's values; `text` is where lines are counted.
    pub fn table(&mut self, mut table: Table, text: &str, origin: &str) -> Result<(), UserError> {
        self.layer += 1;
        let located = |path: &[String], sentence: String| {
            let line = line_of(text, path).map(|line| format!(" line {line}")).unwrap_or_default();
            UserError(format!("{origin}{line}: {sentence}"))
        };
        for (name, place) in [("recipe", &mut self.recipe), ("description", &mut self.description)] {
            match table.remove(name) {
                Some(Value::String(said)) => *place = said,
                Some(_) => return Err(located(&[name.to_string()], format!("`{name}` wants a text"))),
                None => {}
            }
        }
        let said = table.get("model").and_then(|model| model.get("kind")).and_then(Value::as_str);
        let keys = schema::of_kind(said.and_then(|kind| kind.parse().ok()).unwrap_or(self.kind()));
        let mut leaves = Vec::new();
        collect_leaves(&mut Vec::new(), &table, &keys, &mut leaves);
        // `compile` stands for other switches, which may be given beside it and then win.
        leaves.sort_by_key(|(path, _)| path.join(".") != COMPILE.path());
        for (path, given) in leaves {
            let name = path.join(".");
            let Some(found) = keys.iter().find(|found| found.path == name) else {
                let said = given.as_str().map_or_else(|| text::value(&given), String::from);
                return Err(located(&path, unknown(&keys, &name, Some(&said))));
            };
            let read = value::read(&name, &found.key.kind, &given, Written::InFile);
            let laid = read.and_then(|value| self.lay(found, value));
            laid.map_err(|sentence| located(&path, sentence))?;
        }
        let place: Vec<String> = ACCUMULATE.split('.').map(String::from).collect();
        self.multiply_batch().map_err(|sentence| located(&place, sentence))
    }

    /// Lays `key=value` arguments, in order, as one layer.
    pub fn overrides(&mut self, arguments: &[String]) -> Result<(), UserError> {
        self.layer += 1;
        let mut said = arguments.iter().filter_map(|argument| argument.split_once('='));
        let said = said.rfind(|(key, _)| [KIND, "kind"].contains(&key.trim()));
        let kind = said.and_then(|(_, kind)| kind.trim().parse().ok()).unwrap_or(self.kind());
        for argument in arguments {
            let (found, said) = parse_override_of(kind, argument)?;
            if found.key.optional && said == "none" {
                self.values.remove(&found.path);
                continue;
            }
            let given = Value::String(said.to_string());
            let value =
                value::read(&found.path, &found.key.kind, &given, Written::AsText).map_err(|sentence| {
                    match foreign::value_here(&found.path, said) {
                        Some(here) => format!("{sentence}; here that is {here}"),
                        None => sentence,
                    }
                })?;
            self.lay(&found, value)?;
        }
        Ok(self.multiply_batch()?)
    }

    /// Lays `key=value` arguments whose keys begin with one of `allowed`; others cannot change `when`.
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
                refuse!("`{}` cannot change {when}; what can begins with {allowed}", found.path);
            }
        }
        self.overrides(arguments)
    }

    /// What `model.from` says, where it is given.
    pub fn from(&self) -> Option<&str> {
        self.values.get("model.from").and_then(|held| held.value.as_str())
    }

    /// Lays the model of `model.from`: it takes the place of what lower layers say, and what is said beside or above
    /// must agree.
    pub fn model(&mut self, model: &Model, whence: &str) -> Result<(), UserError> {
        /// Keys of training, which a description of a model does not have.
        const NOT_THE_MODELS: [&str; 9] = [
            "from",
            "context",
            "dropout",
            "head_dropout",
            "init_std",
            "init_residual",
            "image_size",
            "image_height",
            "drop_path",
        ];
        /// Keys of a model that may be used otherwise than it was made, by whatever layer says so.
        const MAY_DIFFER: [&str; 4] = ["attention", "head", "classes", "pooling"];
        let of_source = self.values.get("model.from").map_or(usize::MAX, |held| held.layer);
        let facts = Value::try_from(model).expect("a section has a TOML form");
        // A recipe for a model of another kind says nothing of this one.
        let kind = self.values.get(KIND).filter(|held| held.layer >= of_source);
        if kind.is_none() && self.kind() != model.kind() {
            let held = std::mem::take(&mut self.values);
            let of_others = |path: &str| path.starts_with("model.") && path != "model.from";
            self.values = held.into_iter().filter(|(p, h)| !of_others(p) || h.layer >= of_source).collect();
        }
        let has_head = model.brings_head();
        for Found { path, name, tables, key, .. } in schema::of_section("model", Model::keys()) {
            if NOT_THE_MODELS.contains(&&name[..]) {
                continue;
            }
            // Of a head for images that is there, what a recipe below says of another is put aside.
            let is_kept = |held: &Held| !has_head || held.layer >= of_source;
            if MAY_DIFFER.contains(&&name[..]) && self.values.get(&path).is_some_and(is_kept) {
                continue;
            }
            let table = tables.iter().try_fold(&facts, |held, table| held.get(table));
            let fact = table.and_then(|table| table.get(key.name));
            let said = self.values.get(&path).filter(|held| held.layer >= of_source);
            match (said, fact) {
                (Some(held), fact) if Some(&held.value) != fact => refuse!(
                    "`{path}` is {} and the model of {whence} has {}: leave it out",
                    text::value(&held.value),
                    fact.map_or("none".into(), text::value)
                ),
                (_, Some(fact)) => self.put(path, fact.clone()),
                (_, None) => drop(self.values.remove(&path)),
            }
        }
        if let (Some(classes), Some(held)) = (model.classes(), self.values.get("model.classes"))
            && held.value.as_integer() != Some(classes as i64)
        {
            refuse!(
                "`model.classes` is {} and the model of {whence} has a head of {classes}: leave it out",
                text::value(&held.value)
            );
        }
        let value = |key: &str| {
            let held = self.values.get(&format!("model.{key}"))?;
            Some((serde_json::to_value(&held.value).ok()?, held.layer >= of_source))
        };
        for (key, size) in model.input_sizes(&Asked { whence, value: &value }).map_err(UserError)? {
            let path = format!("model.{key}");
            match size {
                Some(size) => self.put(path, Value::Integer(size as i64)),
                None => drop(self.values.remove(&path)),
            }
        }
        Ok(())
    }

    /// Whether the number of classes is the data's to say: nobody says it, or only a layer below the one that names the
    /// data.
    pub fn leaves_classes_to_data(&self) -> bool {
        let layer = |path: &str| self.values.get(path).map(|held| held.layer);
        let data = layer("data.path").max(layer("data.classes"));
        layer(CLASSES).is_none_or(|said| data.is_some_and(|data| said < data))
    }

    pub fn says_classes(&self) -> bool {
        self.values.contains_key(CLASSES)
    }

    pub fn lay_classes(&mut self, classes: usize) {
        self.put(CLASSES.into(), Value::Integer(classes as i64));
    }

    /// What `adapter.from` says, where it is given.
    pub fn adapter_from(&self) -> Option<&str> {
        self.values.get("adapter.from").and_then(|held| held.value.as_str())
    }

    /// Lays the adapter of `adapter.from`: what is said beside or above must agree. How much of its input is dropped is a
    /// matter of training.
    pub fn adapter(&mut self, adapter: &Adapter, whence: &str) -> Result<(), UserError> {
        let of_source = self.values.get("adapter.from").map_or(usize::MAX, |held| held.layer);
        let facts = Value::try_from(adapter).expect("a section has a TOML form");
        for key in ["kind", "rank", "alpha", "paths", "groups"] {
            let path = format!("adapter.{key}");
            let said = self.values.get(&path).filter(|held| held.layer >= of_source);
            let Some(fact) = facts.get(key) else { continue };
            if let Some(held) = said.filter(|held| held.value != *fact) {
                refuse!(
                    "`{path}` is {} and the adapter in {whence} has {}: leave it out",
                    text::value(&held.value),
                    text::value(fact)
                );
            }
            self.put(path, fact.clone());
        }
        Ok(())
    }

    /// The tree without its adapter, which may not be known yet.
    pub fn sketch(&self) -> Result<Config, UserError> {
        let mut known = self.clone();
        known.values.retain(|path, _| !path.starts_with("adapter."));
        known.finish()
    }

    fn lay(&mut self, found: &Found, value: Value) -> Result<(), String> {
        if found.path == COMPILE.path() {
            let mode: Compile = value.as_str().expect("a choice is a text").parse()?;
            for (path, value) in mode.settings() {
                self.put(path, Value::String(value.to_string()));
            }
            return Ok(());
        }
        for (a, b) in INSTEAD {
            let other = match found.path.as_str() {
                path if path == a => b,
                path if path == b => a,
                _ => continue,
            };
            let Some(held) = self.values.get(other) else { continue };
            if held.layer < self.layer {
                self.values.remove(other);
            } else if a != MICRO_BATCH && ![&held.value, &value].into_iter().any(says_nothing) {
                return Err(format!("`{a}` and `{b}` are both given: give one of them"));
            }
        }
        if let Some(steps) = value.as_integer().filter(|_| found.path == STEPS) {
            self.shorten_schedule(steps);
            self.count_evaluations(steps);
        }
        self.put(found.path.clone(), value);
        if found.path == EVERY_EPOCHS {
            // Its default is not what anybody asked for.
            self.put("eval.every".into(), Value::Integer(0));
        }
        Ok(())
    }

    /// Shortens what lower layers say of the schedule in proportion where a run of so many steps has no room for it.
    fn shorten_schedule(&mut self, steps: i64) {
        let whole = |path: &str| self.values.get(path).and_then(|held| held.value.as_integer());
        let lower = |path: &&str| self.values.get(*path).is_some_and(|held| held.layer < self.layer);
        let spans: Vec<&str> = SPANS.into_iter().filter(lower).collect();
        let needed: i64 = spans.iter().filter_map(|path| whole(path)).fold(0, i64::saturating_add);
        if needed <= steps || whole(HORIZON).is_some() {
            return;
        }
        // Of a run counted in epochs nobody knows the steps yet: a tenth of it.
        let before = whole(STEPS).unwrap_or(needed.saturating_mul(10)).max(needed);
        let shorter = |span: i64| (span as f64 * steps as f64 / before as f64).round() as i64;
        let spans: Vec<(&str, i64)> =
            spans.into_iter().filter_map(|path| Some((path, shorter(whole(path)?)))).collect();
        for (path, span) in spans {
            self.put(path.into(), Value::Integer(span));
        }
    }

    /// Evaluations that a lower layer counts in passes over the data become ten in a run that is counted in steps.
    fn count_evaluations(&mut self, steps: i64) {
        if self.values.get(EVERY_EPOCHS).is_some_and(|held| held.layer < self.layer) {
            self.values.remove(EVERY_EPOCHS);
            self.put("eval.every".into(), Value::Integer((steps / 10).max(1)));
        }
    }

    /// Rows at once and how often, both said in this layer, are the rows of an update.
    fn multiply_batch(&mut self) -> Result<(), String> {
        let said = |path: &str| {
            let held = self.values.get(path).filter(|held| held.layer == self.layer)?;
            held.value.as_integer()
        };
        let (Some(rows), Some(times)) = (said(MICRO_BATCH), said(ACCUMULATE)) else { return Ok(()) };
        if times == 0 {
            return Err(format!("`{ACCUMULATE}` is 0 and must be at least 1"));
        }
        let batch = rows.saturating_mul(times);
        match said(BATCH) {
            Some(said) if said != batch => Err(format!(
                "`{MICRO_BATCH}` = {rows} times `{ACCUMULATE}` = {times} is {batch}, and `{BATCH}` is {said}: leave one \
                 of them out"
            )),
            _ => {
                self.put(BATCH.into(), Value::Integer(batch));
                self.values.remove(ACCUMULATE);
                Ok(())
            }
        }
    }

    /// The kind of the model, as far as it is said.
    fn kind(&self) -> ModelKind {
        let said = self.values.get(KIND).and_then(|held| held.value.as_str());
        said.and_then(|kind| kind.parse().ok()).unwrap_or_default()
    }

    /// Whether every key of the model is one of its kind, and those that it must have are there.
    fn check_kind(&self, kind: ModelKind) -> Result<(), UserError> {
        let own = schema::of_section("model", kind.keys());
        for path in self.values.keys().filter(|path| *path != KIND) {
            let Some(name) = path.strip_prefix("model.") else { continue };
            if !own.iter().any(|found| found.name == name) {
                let kinds = ModelKind::with(|leaf| leaf.name() == name);
                let kinds: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
                refuse!(
                    "`{path}` is of model.kind={}, and `model.kind` is {kind}: leave it out",
                    kinds.join(" or ")
                );
            }
        }
        match missing(&own, |path| self.values.contains_key(path)) {
            Some(found) => refuse!("`{}` is missing: it wants {}", found.path, found.key.kind),
            None => Ok(()),
        }
    }

    fn put(&mut self, path: String, value: Value) {
        self.values.insert(path, Held { value, layer: self.layer });
    }

    /// Names the recipe, whatever its files say.
    pub fn name(&mut self, recipe: &str) {
        self.recipe = recipe.to_string();
    }

    /// The tree, complete and valid.
    pub fn finish(self) -> Result<Config, UserError> {
        let kind = self.kind();
        self.check_kind(kind)?;
        let keys = schema::of_kind(kind);
        let others: Vec<Found> = keys.iter().filter(|found| found.section != "model").cloned().collect();
        if let Some(found) = missing(&others, |path| self.values.contains_key(path)) {
            refuse!("`{}` is missing: it wants {}", found.path, found.key.kind);
        }
        let mut tree = Table::new();
        for (section, _) in schema::sections() {
            tree.insert(section.to_string(), Value::Table(Table::new()));
        }
        for (path, held) in self.values {
            let found = keys.iter().find(|found| found.path == path).expect("what is laid is a key");
            // A lower layer may have meant the key of another kind.
            let value = value::read(&path, &found.key.kind, &held.value, Written::InFile)?;
            nest(&mut tree, found, value);
        }
        let model = tree["model"].as_table_mut().expect("sections are tables");
        model.insert("kind".into(), Value::String(kind.to_string()));
        tree.insert("recipe".into(), Value::String(self.recipe));
        tree.insert("description".into(), Value::String(self.description));
        let config: Config = Value::Table(tree).try_into().expect("checked values fit the tree");
        config.validate()?;
        Ok(config)
    }
}

impl Config {
    /// The same config with `key=value` overrides laid over it.
    pub fn with(&self, overrides: &[String]) -> Result<Config, UserError> {
        let mut layers = Layers::default();
        layers.file(&self.to_toml(), "config.toml")?;
        layers.overrides(overrides)?;
        layers.finish()
    }

    /// The same config with a preset's values laid over it.
    pub fn with_file(&self, text: &str, origin: &str) -> Result<Config, UserError> {
        let mut layers = Layers::default();
        layers.file(&self.to_toml(), "config.toml")?;
        layers.file(text, origin)?;
        layers.description.clone_from(&self.description);
        layers.finish()
    }

    /// The config of a run that is continued: the same but for what may change on the way. Where the number of
    /// steps changes, the schedule keeps the horizon it began with.
    pub fn resumed(&self, overrides: &[String]) -> Result<Config, UserError> {
        for argument in overrides {
            let (found, _) = parse_override(argument)?;
            if !may_change(&found.path) {
                refuse!(
                    "`{}` cannot change when a run is resumed; what can is train.steps, train.epochs, \
                     train.on_nonfinite, train.max_skipped, train.patience, eval.*, checkpoint.* and log.*",
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

/// Whether a value leaves it to the key that may be given instead: none, or a count that is chosen here.
fn says_nothing(value: &Value) -> bool {
    value.as_str() == Some("auto") || value.as_integer() == Some(0)
}

/// The keys that `key=value` arguments set, by their full paths, of whatever kind of model they are.
pub fn keys_of(arguments: &[String]) -> Result<Vec<String>, UserError> {
    let path = |argument: &String| {
        let of_kind = |kind: &ModelKind| parse_override_of(*kind, argument).ok();
        let found = ModelKind::ALL.iter().find_map(of_kind).map_or_else(|| parse_override(argument), Ok)?;
        Ok(found.0.path)
    };
    arguments.iter().map(path).collect()
}

/// What another tool's name is here, as the second half of a sentence.
pub fn answer(name: &str) -> Option<String> {
    foreign::answer(name, None)
}

/// The sentence for an option that no command has where it is a key, of ours or of another tool. `next` is the word
/// after it.
pub fn option_as_key(option: &str, next: Option<&str>) -> Option<String> {
    let (option, given) = option.split_once('=').map_or((option, None), |(name, said)| (name, Some(said)));
    let said = given.or(next.filter(|word| !word.starts_with("--") && !word.contains('=')));
    let name = option.trim_start_matches('-').replace('-', "_");
    let answer = match schema::lookup(&name) {
        Meaning::One(_) => {
            format!("keys are given without dashes, as in `{name}={}`", said.unwrap_or("VALUE"))
        }
        Meaning::Several(paths) => {
            format!("keys are given without dashes, here {}=VALUE", paths.join("=VALUE or "))
        }
        Meaning::Nothing => foreign::answer(&name, said)?,
    };
    Some(format!("there is no option `{option}`; {answer}"))
}

pub fn parse_override(argument: &str) -> Result<(Found, &str), UserError> {
    parse_override_of(ModelKind::default(), argument)
}

/// The same where a key of the model means what it does in this kind.
fn parse_override_of(kind: ModelKind, argument: &str) -> Result<(Found, &str), UserError> {
    let Some((name, said)) = argument.split_once('=') else {
        refuse!("`{argument}` is neither a recipe nor key=value");
    };
    let keys = schema::of_kind(kind);
    match schema::lookup_among(&keys, name.trim()) {
        Meaning::One(found) => Ok((found, said.trim())),
        Meaning::Several(paths) => refuse!("`{name}` may be {}: give it in full", paths.join(" or ")),
        Meaning::Nothing => Err(UserError(unknown(&keys, name.trim(), Some(said)))),
    }
}

/// The first key that must be given and is not; one of a table that may be absent must be where anything of that is.
fn missing(keys: &[Found], is_given: impl Fn(&str) -> bool) -> Option<&Found> {
    let is_there = |table: &String| {
        let within = |found: &&Found| found.path.starts_with(&format!("{table}."));
        keys.iter().filter(within).any(|found| is_given(&found.path))
    };
    let must_be = |found: &&Found| found.key.required && found.optional_table.as_ref().is_none_or(is_there);
    keys.iter().filter(must_be).find(|found| !is_given(&found.path))
}

/// Puts a value into the tables its key lies in.
fn nest(tree: &mut Table, found: &Found, value: Value) {
    let mut table = tree;
    for name in [&[found.section], &found.tables[..]].concat() {
        let inner = table.entry(name).or_insert_with(|| Value::Table(Table::new()));
        table = inner.as_table_mut().expect("sections are tables");
    }
    table.insert(found.key.name.to_string(), value);
}

/// The sentence for a name that is no key: what it is called here, with the value that was said, or the nearest name.
fn unknown(keys: &[Found], name: &str, said: Option<&str>) -> String {
    if let Some(answer) = foreign::answer(name, said) {
        return format!("there is no key `{name}`; {answer}");
    }
    let in_section =
        name.split_once('.').filter(|(section, _)| keys.iter().any(|found| found.section == *section));
    let short = in_section.map_or(name, |(_, key)| key);
    if let Meaning::One(found) = schema::lookup_among(keys, short) {
        return format!("there is no key `{name}`; here that is `{}`", found.path);
    }
    // Names as they may have been meant, each with the path it stands for.
    let mut meant: Vec<(String, String)> = Vec::new();
    for found in keys {
        match in_section {
            Some((given, _)) if given != found.section => continue,
            Some(_) => meant.push((found.name.clone(), found.path.clone())),
            None => {
                let last = found.name.rsplit('.').next().unwrap_or(&found.name);
                let names = [found.path.clone(), found.name.clone(), last.to_string()];
                meant.extend(names.map(|name| (name, found.path.clone())));
            }
        }
    }
    let close = nearest(short, meant.iter().map(|(name, _)| name.as_str()));
    if let Some((_, path)) = close.and_then(|close| meant.iter().find(|(name, _)| name == close)) {
        return format!("there is no key `{name}`; did you mean `{path}`?");
    }
    match in_section {
        Some((section, _)) => {
            let keys: Vec<_> = meant.iter().map(|(key, _)| key.as_str()).collect();
            format!("there is no key `{name}`; `{section}` has {}", keys.join(", "))
        }
        None => format!("there is no key `{name}`; `flatout schema` lists them all"),
    }
}

/// Values by path. A table is gone into unless it is a known key's value, so dotted keys and nested tables are
/// the same thing; an empty table of a name that leads nowhere counts as a value, to be refused.
fn collect_leaves(
    path: &mut Vec<String>,
    table: &Table,
    keys: &[Found],
    leaves: &mut Vec<(Vec<String>, Value)>,
) {
    for (name, held) in table {
        path.push(name.clone());
        let joined = path.join(".");
        let leads_on = keys.iter().any(|found| found.path.starts_with(&format!("{joined}.")));
        let is_key = keys.iter().any(|found| found.path == joined);
        match held {
            Value::Table(inner) if !is_key && (leads_on || !inner.is_empty()) => {
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

#[cfg(test)]
mod tests {
    use flatout_models::config::DecoderConfig;
    use flatout_settings::Section;
    use flatout_settings::section;

    use super::*;
    use crate::config::{Count, SourceKind};
    use crate::recipes::resolve;
    use crate::switches::{Auto, Choose, Toggle};
    use flatout_ir::Precision;

    fn with(overrides: &[&str]) -> Result<Config, UserError> {
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        resolve("tiny", &[], &overrides)
    }

    fn refused(overrides: &[&str]) -> String {
        with(overrides).expect_err(&overrides.join(" ")).0
    }

    #[test]
    fn overrides_apply_in_order_by_long_and_short_names() {
        let config = with(&[
            "optimizer.lr=1e-3",
            "lr=2e-3",
            "betas=[0.8, 0.9]",
            "precision=bf16",
            "fuse.qkv=off",
            "switches.memory_plan=false",
            "micro_batch=8",
            "seed=7",
            "data.path=a=b.txt",
            "freeze=[embed, layers.*.norm]",
            "model.qk_norm=false",
            "workers=auto",
            "steps=1e3",
        ])
        .unwrap();
        assert_eq!(config.optimizer.lr, 2e-3);
        assert_eq!(config.optimizer.betas, [0.8, 0.9]);
        assert_eq!(config.switches.compute.precision, Auto::Given(Precision::BF16));
        assert_eq!((config.switches.fuse.qkv, config.switches.memory.plan), (Toggle::Off, Toggle::Off));
        assert_eq!((config.train.micro_batch, config.eval.micro_batch), (Count::Given(8), Count::Auto));
        assert_eq!((config.train.seed, config.train.steps), (7, Some(1000)));
        assert_eq!(config.data.path.as_ref().unwrap().0, ["a=b.txt"]);
        assert_eq!(config.data.source(), SourceKind::Text);
        assert_eq!(config.train.freeze, ["embed", "layers.*.norm"]);
        assert!(!config.model.decoder().qk_norm);
    }

    #[test]
    fn giving_one_of_a_pair_puts_the_recipes_other_aside() {
        let epochs = with(&["epochs=2"]).unwrap().train;
        assert_eq!((epochs.steps, epochs.epochs), (None, Some(2)));
        let accumulate = |overrides: &[&str]| {
            let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
            resolve("pretrain-226m", &[], &overrides).unwrap().train
        };
        let split = accumulate(&["accumulate=8"]);
        assert_eq!((split.micro_batch, split.micro_batch()), (Count::Auto, Some(8)));
        assert_eq!(accumulate(&["micro_batch=auto", "accumulate=32"]).micro_batch(), Some(2));
        assert_eq!(accumulate(&["accumulate=32", "micro_batch=auto"]).micro_batch(), Some(2));
        assert_eq!(accumulate(&["micro_batch=auto"]).micro_batch(), None);
        assert!(refused(&["epochs=1", "steps=2"]).contains("are both given"));
    }

    #[test]
    fn options_that_are_keys_are_answered_with_them() {
        for (words, sentence) in [
            ("--lr 1e-3", "there is no option `--lr`; keys are given without dashes, as in `lr=1e-3`"),
            ("--lr=1e-3", "there is no option `--lr`; keys are given without dashes, as in `lr=1e-3`"),
            ("--lr --json", "keys are given without dashes, as in `lr=VALUE`"),
            ("--model.layers 6", "as in `model.layers=6`"),
            (
                "--learning_rate 1e-3",
                "there is no option `--learning_rate`; here that is `optimizer.lr=1e-3`",
            ),
            ("--grad-accum-steps 12", "here that is `train.accumulate=12`"),
            ("--bf16", "here that is `precision=bf16`"),
            ("--load_in_4bit", "weights are never quantised here"),
            ("--every 5", "here eval.every=VALUE or checkpoint.every=VALUE or log.every=VALUE"),
        ] {
            let (option, next) = words.split_once(' ').map_or((words, None), |(a, b)| (a, Some(b)));
            let said = option_as_key(option, next).unwrap();
            assert!(said.contains(sentence), "{words}: {said:?} lacks {sentence:?}");
        }
        assert_eq!(option_as_key("--colour", None), None);
    }

    #[test]
    fn a_shorter_run_has_a_shorter_warm_up_unless_one_is_asked_for() {
        let warmup = |overrides: &[&str]| with(overrides).unwrap().schedule.warmup_steps;
        assert_eq!(warmup(&["train.steps=400"]), 50, "the recipe's, while it fits");
        assert_eq!(warmup(&["train.steps=40"]), 3, "50 of 800");
        assert_eq!(warmup(&["train.steps=5"]), 0);
        assert_eq!(warmup(&["train.steps=5", "warmup_steps=2"]), 2);
        assert!(refused(&["warmup_steps=11", "steps=10"]).contains("`schedule.warmup_steps` = 11 is more"));
        let of_epochs = resolve("bdh-cifar10", &[], &["train.steps=100".into()]).unwrap();
        assert_eq!(of_epochs.schedule.warmup_steps, 10);
        assert_eq!((of_epochs.eval.every, of_epochs.eval.every_epochs), (10, None));
        let resumed = with(&["steps=100", "warmup_steps=60"]).unwrap().resumed(&["steps=50".into()]).unwrap();
        assert_eq!(resumed.schedule.warmup_steps, 60, "the horizon of a run that goes on does not change");
    }

    #[test]
    fn rows_at_once_and_how_often_are_the_batch() {
        let train = |overrides: &[&str]| with(overrides).unwrap().train;
        for words in [["train.micro_batch=8", "train.accumulate=12"], ["accumulate=12", "micro_batch=8"]] {
            let train = train(&words);
            assert_eq!((train.batch, train.micro_batch(), train.accumulate), (96, Some(8), None));
        }
        let agreed = train(&["micro_batch=8", "batch=96", "accumulate=12"]);
        assert_eq!((agreed.batch, agreed.micro_batch()), (96, Some(8)));
        assert_eq!(
            refused(&["micro_batch=8", "batch=64", "accumulate=12"]),
            "`train.micro_batch` = 8 times `train.accumulate` = 12 is 96, and `train.batch` is 64: leave one of them out"
        );
        assert!(refused(&["micro_batch=8", "accumulate=0"]).contains("`train.accumulate` is 0"));

        let mut layers = Layers::default();
        layers.file(&with(&[]).unwrap().to_toml(), "tiny").unwrap();
        layers.file("[train]\nmicro_batch = 2\naccumulate = 6\n", "mine.toml").unwrap();
        assert_eq!(layers.clone().finish().unwrap().train.batch, 12);
        let contradiction = "[train]\nbatch = 3\nmicro_batch = 2\naccumulate = 6\n";
        let sentence = layers.file(contradiction, "mine.toml").unwrap_err().0;
        assert!(sentence.starts_with("mine.toml line 4: `train.micro_batch` = 2 times"), "{sentence}");
    }

    #[test]
    fn compile_is_laid_where_it_stands() {
        let switches = with(&["compile=off", "fuse.qkv=on"]).unwrap().switches;
        assert_eq!((switches.fuse.qkv, switches.fuse.norm), (Toggle::On, Toggle::Off));
        assert_eq!(switches.kernels.cuda_graphs, Choose::Off);
        let switches = with(&["fuse.qkv=on", "compile=off"]).unwrap().switches;
        assert_eq!(switches.fuse.qkv, Toggle::Off);
        assert_eq!(with(&["compile=reduce-overhead"]).unwrap().switches.kernels.cuda_graphs, Choose::On);

        let mut layers = Layers::default();
        layers.file(&with(&[]).unwrap().to_toml(), "base").unwrap();
        layers
            .file("[switches]\nattention = \"naive\"\nfuse.loss = true\ncompile = \"off\"\n", "over")
            .unwrap();
        let switches = layers.finish().unwrap().switches;
        assert_eq!(
            (switches.fuse.loss, switches.fuse.qkv),
            (Toggle::On, Toggle::Off),
            "beside it, the rest wins"
        );
    }

    #[test]
    fn unknown_keys_get_the_name_that_was_meant() {
        let cases = [
            ("optimiser.lr=1", "there is no key `optimiser.lr`; did you mean `optimizer.lr`?"),
            ("bathc=1", "there is no key `bathc`; did you mean `train.batch`?"),
            ("precison=bf16", "there is no key `precison`; did you mean `switches.precision`?"),
            ("fuse.qvk=on", "there is no key `fuse.qvk`; did you mean `switches.fuse.qkv`?"),
            ("qkv=on", "there is no key `qkv`; did you mean `switches.fuse.qkv`?"),
            ("num_workers=4", "there is no key `num_workers`; here that is `loader.workers=4`"),
            ("per_device_train_batch_size=4", "here that is `train.micro_batch=4`"),
            ("gradient_checkpointing=true", "here that is `recompute=full`"),
            ("gradient_checkpointing=false", "here that is `recompute=none`"),
            ("use_fp8=true", "here that is `precision=fp8`"),
            ("optimizer=adamw", "here that is `optimizer.name=adamw`"),
            ("optimizer=sgd", "here that is `optimizer.name` (adamw)"),
            (
                "optimizer.name=AdamW8bit",
                "wants adamw, and got `AdamW8bit`; here that is `optimizer.state=int8`",
            ),
            ("attention=sdpa", "and got `sdpa`; here that is `attention=flash`"),
            ("workers=0", "and got `0`; here that is `loader.workers=1`"),
            ("train.lr=1", "there is no key `train.lr`; here that is `optimizer.lr`"),
            ("model.precision=bf16", "there is no key `model.precision`; here that is `switches.precision`"),
            ("optimizer.momentum=1", "`optimizer` has name, lr, betas, eps, weight_decay, clip"),
            ("xyzzy=1", "`flatout schema` lists them all"),
            ("every=10", "`every` may be eval.every or checkpoint.every or log.every: give it in full"),
            ("lr", "`lr` is neither a recipe nor key=value"),
            ("=3", "there is no key ``"),
            ("lr=fast", "`optimizer.lr` wants a number, and got `fast`"),
            ("lr=", "`optimizer.lr` wants a number, and got ``"),
            ("precision=fp4", "`switches.precision` wants one of auto, fp32, tf32, bf16, fp8, and got `fp4`"),
            ("steps=-5", "`train.steps` wants a whole number of 0 or more, and got `-5`"),
            ("lr=NaN", "`optimizer.lr` wants a number, and got `NaN`"),
            ("lr=none", "`optimizer.lr` wants a number, and got `none`"),
            ("groups=[{path='a'}]", "one of them has `path`"),
            ("groups=[{lr_scale=0.5}]", "`train.groups` has a table without `paths`"),
            ("groups=[{paths=['a'],lr_scale='x'}]", "`train.groups.lr_scale` wants a number"),
        ];
        for (argument, words) in cases {
            let sentence = refused(&[argument]);
            assert!(sentence.contains(words), "{argument}: {sentence:?} lacks {words:?}");
        }
    }

    #[test]
    fn files_are_refused_with_file_and_line() {
        let cases = [
            (
                "[model]\nwidth = 8\nwidht = 9\n",
                "mine.toml line 3: there is no key `model.widht`; did you mean `model.width`?",
            ),
            (
                "[train]\nbatch = 8\nsteps = \"many\"\n",
                "mine.toml line 3: `train.steps` wants a whole number of 0 or more, and got `many`",
            ),
            ("lr = 1\n", "mine.toml line 1: there is no key `lr`; here that is `optimizer.lr`"),
            (
                "\n[training]\nmax_steps = 5\n",
                "mine.toml line 3: there is no key `training.max_steps`; here that is `train.steps=5`",
            ),
            ("[train]\nsteps = 1\nepochs = 1\n", "`train.steps` and `train.epochs` are both given"),
            ("\n\n[nothing]\n", "mine.toml line 3: there is no key `nothing`"),
            ("[train]\nsteps = \n", "mine.toml line 2: "),
            ("[train]\nbatch = 1\nbatch = 2\n", "mine.toml line 3: "),
            ("description = 5\n", "mine.toml line 1: `description` wants a text"),
            ("train = 5\n", "mine.toml line 1: there is no key `train`"),
            (
                "[[train.groups]]\npaths = \"a\"\nlr = 1\n",
                "mine.toml line 1: `train.groups` wants a list of tables",
            ),
            ("[train]\nbatch = 8\n", "`model.width` is missing: it wants a whole number"),
        ];
        for (text, words) in cases {
            let sentence = Config::parse(text, "mine.toml").unwrap_err().0;
            assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
            assert!(!sentence.contains('\n'), "{sentence:?}");
        }
    }

    #[test]
    fn a_loaded_model_replaces_the_recipes_and_must_agree_with_what_is_said() {
        let tiny = with(&[]).unwrap().model.decoder().clone();
        let model = DecoderConfig { width: 48, tied: false, context: 64, kv_heads: None, ..tiny };
        let laid = |overrides: &[&str]| {
            let mut layers = Layers::default();
            layers.file(&with(&[]).unwrap().to_toml(), "tiny").unwrap();
            let mut words = vec!["model.from=there".to_string()];
            words.extend(overrides.iter().map(|word| word.to_string()));
            layers.overrides(&words).unwrap();
            layers.model(&model.clone().into(), "there").and_then(|()| layers.finish())
        };
        let config = laid(&["lr=1e-4", "width=48", "dropout=0.25"]).unwrap();
        let wanted = DecoderConfig { from: Some("there".into()), dropout: 0.25, ..model.clone() };
        assert_eq!(
            *config.model.decoder(),
            wanted,
            "tiny's rows of 128 are cut to what the model was made for"
        );
        assert_eq!(laid(&["context=96"]).unwrap().model.decoder().context, 96, "unless more is asked for");
        for (word, sentence) in [
            ("width=128", "`model.width` is 128 and the model of there has 48: leave it out"),
            ("tied=true", "`model.tied` is true and the model of there has false"),
            ("kv_heads=2", "`model.kv_heads` is 2 and the model of there has none"),
        ] {
            let refused = laid(&[word]).unwrap_err().0;
            assert!(refused.contains(sentence), "{refused}");
        }
    }

    #[test]
    fn a_resumed_run_changes_only_what_may_change() {
        let config = with(&["steps=100", "warmup_steps=10"]).unwrap();
        let longer =
            config.resumed(&["steps=200".into(), "eval.every=7".into(), "log.every=5".into()]).unwrap();
        assert_eq!((longer.train.steps, longer.schedule.horizon_steps), (Some(200), Some(100)));
        assert_eq!((longer.eval.every, longer.log.every), (7, 5));
        let again = longer.resumed(&["steps=300".into()]).unwrap();
        assert_eq!(again.schedule.horizon_steps, Some(100), "the horizon is the first run's");
        for argument in ["lr=1", "precision=bf16", "compile=off", "batch=64", "horizon_steps=5"] {
            let sentence = config.resumed(&[argument.into()]).unwrap_err().0;
            assert!(sentence.contains("cannot change when a run is resumed"), "{sentence}");
        }
        assert!(config.resumed(&["stpes=5".into()]).unwrap_err().0.contains("did you mean `train.steps`?"));
    }

    section! {
        /// A part with a width of its own.
        pub struct Tower {
            /// Its width.
            pub width: usize,
            /// Its depth.
            pub layers: usize = 2,
        }
    }

    section! {
        /// A model that may have such a part.
        pub struct Seeing {
            /// Its width.
            pub width: usize,
            /// Its eyes.
            pub vision: Option<Tower>,
        }
    }

    #[test]
    fn nested_tables_are_laid_written_and_read_back() {
        let keys = schema::of_section("model", Seeing::keys());
        let mut values = BTreeMap::new();
        let file = parse("[model]\nwidth = 8\n[model.vision]\nwidth = 4\n", "mine.toml").unwrap();
        let mut leaves = vec![];
        collect_leaves(&mut vec![], &file, &keys, &mut leaves);
        for (path, given) in leaves {
            values.insert(path.join("."), given);
        }
        let Meaning::One(found) = schema::lookup_among(&keys, "model.vision.layers") else { panic!("a key") };
        values.insert(found.path, Value::Integer(3));
        let mut tree = Table::new();
        for (path, value) in &values {
            nest(&mut tree, keys.iter().find(|found| found.path == *path).unwrap(), value.clone());
        }
        let seeing: Seeing = tree["model"].clone().try_into().unwrap();
        assert_eq!(seeing, Seeing { width: 8, vision: Some(Tower { width: 4, layers: 3 }) });
        let text = text::section_text("model", &keys, &values);
        assert_eq!(text, "\n[model]\nwidth = 8\n\n[model.vision]\nwidth = 4\nlayers = 3\n");
        let again: Table = toml::from_str(&text).unwrap();
        assert_eq!(again, tree);
    }

    #[test]
    fn nested_keys_are_missed_only_where_their_table_is_and_unknown_ones_named() {
        let keys = schema::of_section("model", Seeing::keys());
        let missed =
            |given: &[&str]| missing(&keys, |path| given.contains(&path)).map(|found| &found.path[..]);
        assert_eq!(missed(&["model.width"]), None);
        assert_eq!(missed(&["model.width", "model.vision.layers"]), Some("model.vision.width"));
        assert_eq!(
            unknown(&keys, "model.vision.widht", None),
            "there is no key `model.vision.widht`; did you mean `model.vision.width`?"
        );
        assert_eq!(
            unknown(&keys, "model.vision.colour", None),
            "there is no key `model.vision.colour`; `model` has width, vision.width, vision.layers"
        );
    }
}
