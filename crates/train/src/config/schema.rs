//! Every key there is: the sections' declarations put end to end, for look-up, errors and help.

use flatout_models::config::key::{Key, Kind, Section};
use flatout_models::config::{Model, ModelKind};

use super::{Adapter, Checkpoint, Config, Data, Eval, Loader, Log, Optimizer, Schedule, Train, text};
use crate::switches::Switches;

/// One key as help shows it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct SchemaKey {
    /// `section.key`.
    pub path: String,
    /// What it accepts, in words.
    pub wants: String,
    /// Its default as it would be written in a recipe; `None` where it must be given or may be absent.
    pub default: Option<String>,
    pub required: bool,
    pub doc: String,
}

/// The sections in the order they are printed, each with its keys.
pub(super) fn sections() -> Vec<(&'static str, Vec<Key>)> {
    vec![
        ("model", Model::keys()),
        ("data", Data::keys()),
        ("train", Train::keys()),
        ("adapter", Adapter::keys()),
        ("eval", Eval::keys()),
        ("optimizer", Optimizer::keys()),
        ("schedule", Schedule::keys()),
        ("checkpoint", Checkpoint::keys()),
        ("loader", Loader::keys()),
        ("log", Log::keys()),
        ("switches", Switches::keys()),
    ]
}

/// Every key with what it accepts, its default and one line on what it does.
pub fn schema() -> Vec<SchemaKey> {
    let mut defaults = text::flatten(&Config::default());
    for kind in ModelKind::ALL {
        let of_kind = text::flatten(&Config { model: kind.model(), ..Config::default() });
        for (path, value) in of_kind {
            defaults.entry(path).or_insert(value);
        }
    }
    let mut rows = Vec::new();
    for (section, keys) in sections() {
        for key in keys {
            let path = format!("{section}.{}", key.name);
            let default = defaults.get(&path).filter(|_| !key.required).map(text::value);
            rows.push(SchemaKey {
                wants: key.kind.to_string(),
                default,
                required: key.required,
                doc: doc(section, &key),
                path,
            });
        }
    }
    rows
}

/// Its line; a key that only some kinds of models have says which.
fn doc(section: &str, key: &Key) -> String {
    let kinds = if section == "model" { ModelKind::with(key.name) } else { vec![] };
    if kinds.is_empty() || kinds.len() == ModelKind::ALL.len() {
        return key.doc.to_string();
    }
    let kinds: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
    format!("{}: {}", kinds.join(", "), key.doc)
}

/// A key with its full path.
#[derive(Clone, Debug)]
pub struct Found {
    pub path: String,
    pub key: Key,
}

pub(super) fn all() -> Vec<Found> {
    let mut found = Vec::new();
    for (section, keys) in sections() {
        found.extend(keys.into_iter().map(|key| Found { path: format!("{section}.{}", key.name), key }));
    }
    found
}

/// What a short name can mean.
pub(super) enum Meaning {
    One(Found),
    Several(Vec<String>),
    Nothing,
}

/// The key a name on the command line means: a full path, else a switch, else a key of any section; where several
/// sections have it, `train` wins, then `model`.
pub(super) fn lookup(name: &str) -> Meaning {
    let mut keys = all();
    for wanted in [name.to_string(), format!("switches.{name}")] {
        if let Some(i) = keys.iter().position(|found| found.path == wanted) {
            return Meaning::One(keys.swap_remove(i));
        }
    }
    keys.retain(|found| found.key.name == name);
    for wanted in [format!("train.{name}"), format!("model.{name}")] {
        if let Some(i) = keys.iter().position(|found| found.path == wanted) {
            return Meaning::One(keys.swap_remove(i));
        }
    }
    match keys.len() {
        0 => Meaning::Nothing,
        1 => Meaning::One(keys.remove(0)),
        _ => Meaning::Several(keys.into_iter().map(|found| found.path).collect()),
    }
}

/// ` (auto, on, off)` for a choice, nothing for the rest: it follows a key's name in a sentence.
pub(super) fn values_in_brackets(kind: &Kind) -> String {
    match kind {
        Kind::Choice(values) => format!(" ({})", values.join(", ")),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path_of(name: &str) -> String {
        match lookup(name) {
            Meaning::One(found) => found.path,
            Meaning::Several(paths) => paths.join("|"),
            Meaning::Nothing => String::new(),
        }
    }

    #[test]
    fn short_names_find_their_key() {
        assert_eq!(path_of("optimizer.lr"), "optimizer.lr");
        assert_eq!(path_of("lr"), "optimizer.lr");
        assert_eq!(path_of("precision"), "switches.precision");
        assert_eq!(path_of("fuse.qkv"), "switches.fuse.qkv");
        assert_eq!(path_of("norm"), "model.norm", "fuse.norm is another name");
        assert_eq!(path_of("micro_batch"), "train.micro_batch", "train wins over eval");
        assert_eq!(path_of("every"), "eval.every|checkpoint.every|log.every");
        assert_eq!(path_of("width"), "model.width");
        assert_eq!(path_of("dropout"), "model.dropout", "model wins over adapter");
        assert_eq!(path_of("rank"), "adapter.rank");
        assert_eq!(path_of("r"), "");
    }

    #[test]
    fn the_schema_covers_the_tree_and_says_something_of_every_key() {
        let written = toml::Value::try_from(Config::default()).unwrap();
        let mut names: Vec<_> = written.as_table().unwrap().keys().map(String::as_str).collect();
        names.retain(|name| !["recipe", "description"].contains(name));
        let mut listed: Vec<_> = sections().iter().map(|(name, _)| *name).collect();
        listed.sort();
        assert_eq!(names, listed);

        let rows = schema();
        let row = |path: &str| rows.iter().find(|row| row.path == path).unwrap();
        assert!(rows.iter().all(|row| row.doc.ends_with('.') && !row.doc.contains('\n')));
        assert_eq!(row("optimizer.betas").default.as_deref(), Some("[0.9, 0.95]"));
        assert_eq!(row("optimizer.betas").wants, "a list of 2, each a number");
        assert_eq!(row("optimizer.eps").default.as_deref(), Some("1e-8"));
        assert_eq!(row("switches.fuse.qkv").default.as_deref(), Some("\"on\""));
        assert_eq!(row("train.micro_batch").wants, "auto or a whole number of 1 or more");
        assert!(row("model.width").required && row("model.width").default.is_none());
        assert!(!row("data.path").required && row("data.path").default.is_none());
    }
}
