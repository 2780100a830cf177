//! The list of all keys, from the declarations of the sections, for look-up, errors and help.

use std::sync::LazyLock;

use flatout_models::config::{Model, ModelKind};
use flatout_settings::{Key, Leaf, Section, ValueKind, leaves};

use super::{
    Adapter, Checkpoint, Config, Data, Eval, Loader, Log, Mesh, Optimizer, Preference, Samples, Schedule,
    Track, Train, text,
};
use crate::switches::Switches;

/// One key as help shows it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct SchemaKey {
    /// `section.key`.
    pub path: String,
    /// The values it takes, in words.
    pub wants: String,
    /// The named values it takes; empty if it takes any number or text.
    pub values: Vec<&'static str>,
    /// Its default as written in a recipe; `None` if it must be given or may be absent.
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
        ("mesh", Mesh::keys()),
        ("preference", Preference::keys()),
        ("adapter", Adapter::keys()),
        ("eval", Eval::keys()),
        ("optimizer", Optimizer::keys()),
        ("schedule", Schedule::keys()),
        ("checkpoint", Checkpoint::keys()),
        ("loader", Loader::keys()),
        ("log", Log::keys()),
        ("samples", Samples::keys()),
        ("track", Track::keys()),
        ("switches", Switches::keys()),
    ]
}

/// Every key with the values it takes, its default and its description.
pub fn schema() -> Vec<SchemaKey> {
    let of_kind = |kind: &ModelKind| text::flatten(&Config { model: kind.model(), ..Config::default() });
    let defaults: Vec<(ModelKind, _)> = ModelKind::ALL.iter().map(|kind| (*kind, of_kind(kind))).collect();
    let row = |found: QualifiedKey| {
        let kinds = kinds_of(&found);
        let of_kinds = defaults.iter().filter(|(kind, _)| kinds.contains(kind));
        let default = of_kinds.into_iter().find_map(|(_, values)| values.get(&found.path));
        SchemaKey {
            wants: found.key.kind.to_string(),
            values: names(&found.key.kind),
            default: default.filter(|_| !found.key.required).map(text::value),
            required: found.key.required,
            doc: doc(&kinds, found.key.doc),
            path: found.path,
        }
    };
    all().into_iter().map(row).collect()
}

/// The named values of a kind.
fn names(kind: &ValueKind) -> Vec<&'static str> {
    match kind {
        ValueKind::Bool => vec!["true", "false"],
        ValueKind::Choice(values) | ValueKind::WordOrNumbers(values) => values.to_vec(),
        ValueKind::WholeOrAuto => vec!["auto"],
        _ => vec![],
    }
}

/// The kinds of models that have this key, of the same type; all kinds for keys of other sections.
fn kinds_of(found: &QualifiedKey) -> Vec<ModelKind> {
    let kinds = match found.section {
        "model" => ModelKind::with(|leaf| leaf.name() == found.name && leaf.key.kind == found.key.kind),
        _ => vec![],
    };
    if kinds.is_empty() { ModelKind::ALL.to_vec() } else { kinds }
}

/// The description of a key, which begins with the kinds of models if not all kinds have the key.
fn doc(kinds: &[ModelKind], line: &str) -> String {
    if kinds.len() == ModelKind::ALL.len() {
        return line.to_string();
    }
    let kinds: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
    format!("{}: {line}", kinds.join(", "))
}

/// A key with its full path.
#[derive(Clone, Debug)]
pub struct QualifiedKey {
    pub path: String,
    pub section: &'static str,
    /// The path without the section.
    pub name: String,
    /// The tables between the section and the key.
    pub tables: Vec<&'static str>,
    /// The path of the innermost of these tables that may be absent.
    pub optional_table: Option<String>,
    pub key: Key,
}

/// The keys of a section that hold values, including those of sections within it.
pub(super) fn of_section(section: &'static str, keys: Vec<Key>) -> Vec<QualifiedKey> {
    let found = |leaf: Leaf| QualifiedKey {
        path: format!("{section}.{}", leaf.name()),
        section,
        name: leaf.name(),
        optional_table: leaf.optional_table.map(|table| format!("{section}.{table}")),
        tables: leaf.tables,
        key: leaf.key,
    };
    leaves(keys).into_iter().map(found).collect()
}

/// Every key. A key that has different types in different kinds of models is listed once per type.
pub(super) fn all() -> Vec<QualifiedKey> {
    let mut all: Vec<QualifiedKey> = vec![];
    for found in sections().into_iter().flat_map(|(section, keys)| of_section(section, keys)) {
        if !all.iter().any(|known| known.path == found.path && known.key.kind == found.key.kind) {
            all.push(found);
        }
    }
    all
}

/// Every key once, with the type that it has in a kind of models.
pub(super) fn of_kind(kind: ModelKind) -> &'static [QualifiedKey] {
    // The list is built once, because reading a config looks up every one of its keys.
    static OF_KINDS: LazyLock<Vec<(ModelKind, Vec<QualifiedKey>)>> = LazyLock::new(|| {
        let all = all();
        let meant = |kind: &ModelKind| (*kind, meant_by(all.clone(), &of_section("model", kind.keys())));
        ModelKind::ALL.iter().map(meant).collect()
    });
    let of_kind = OF_KINDS.iter().find(|(known, _)| *known == kind);
    &of_kind.expect("every kind is among all").1
}

/// Every key once: as in `own` if that has it with another type, else the first one in `all`.
pub(super) fn meant_by(all: Vec<QualifiedKey>, own: &[QualifiedKey]) -> Vec<QualifiedKey> {
    let mut each: Vec<QualifiedKey> = vec![];
    for found in all {
        if !each.iter().any(|known| known.path == found.path) {
            let own = own.iter().find(|own| own.path == found.path && own.key.kind != found.key.kind);
            each.push(own.cloned().unwrap_or(found));
        }
    }
    each
}

/// The result of looking up a short name.
pub(super) enum Meaning {
    One(QualifiedKey),
    Several(Vec<String>),
    Nothing,
}

/// Looks up a name from the command line: a full path, else a switch, else a key of any section. If several sections have the key,
/// `train` wins, then `model`, and `samples` comes last.
pub(super) fn lookup(name: &str) -> Meaning {
    lookup_among(of_kind(ModelKind::default()), name)
}

/// Like [`lookup`], in a list of keys without repetitions.
pub(super) fn lookup_among(keys: &[QualifiedKey], name: &str) -> Meaning {
    let by_path = |path: String| keys.iter().find(|found| found.path == path);
    if let Some(found) = by_path(name.to_string()).or_else(|| by_path(format!("switches.{name}"))) {
        return Meaning::One(found.clone());
    }
    let mut named: Vec<&QualifiedKey> = keys.iter().filter(|found| found.name == name).collect();
    if named.iter().any(|found| found.section != "samples") {
        named.retain(|found| found.section != "samples");
    }
    let of = |section: &str| named.iter().find(|found| found.section == section);
    match (of("train").or_else(|| of("model")), &named[..]) {
        (Some(found), _) | (None, [found]) => Meaning::One((*found).clone()),
        (None, []) => Meaning::Nothing,
        (None, several) => Meaning::Several(several.iter().map(|found| found.path.clone()).collect()),
    }
}

/// The values of a choice, such as ` (auto, on, off)`, to follow a key's name in a sentence; empty for other kinds.
pub(super) fn values_in_brackets(kind: &ValueKind) -> String {
    match kind {
        ValueKind::Choice(values) => format!(" ({})", values.join(", ")),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use flatout_settings::section;

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
        assert_eq!(path_of("max_tokens"), "data.max_tokens", "not of samples");
        assert_eq!(path_of("temperature"), "samples.temperature");
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
    fn the_schema_covers_the_config_and_describes_every_key() {
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
        /// A model that has such a part.
        pub struct Seeing {
            /// Its width.
            pub width: usize,
            /// Its patches, as a number.
            pub patch: usize = 4,
            /// Its eyes.
            pub vision: Option<Tower>,
        }
    }

    section! {
        /// A model that means something else by a name.
        pub struct Hearing {
            /// Its width.
            pub width: usize,
            /// Its patches, as a text.
            pub patch: Option<String>,
        }
    }

    #[test]
    fn keys_of_nested_sections_have_paths_and_names() {
        let keys = of_section("model", Seeing::keys());
        let paths: Vec<&str> = keys.iter().map(|found| found.path.as_str()).collect();
        assert_eq!(paths, ["model.width", "model.patch", "model.vision.width", "model.vision.layers"]);
        assert_eq!(keys[2].optional_table.as_deref(), Some("model.vision"));
        let path_of = |name: &str| match lookup_among(&keys, name) {
            Meaning::One(found) => found.path,
            _ => String::new(),
        };
        assert_eq!(path_of("width"), "model.width", "the section's own");
        assert_eq!(path_of("vision.width"), "model.vision.width");
        assert_eq!(path_of("model.vision.layers"), "model.vision.layers");
        assert_eq!(path_of("layers"), "", "a part's key is not found by its last name");
    }

    #[test]
    fn a_key_has_the_type_of_the_models_kind() {
        let all: Vec<QualifiedKey> = [Seeing::keys(), Hearing::keys()]
            .into_iter()
            .flat_map(|keys| of_section("model", keys))
            .collect();
        let wants = |own: Vec<Key>| {
            let keys = meant_by(all.clone(), &of_section("model", own));
            assert_eq!(keys.iter().filter(|found| found.path == "model.patch").count(), 1);
            keys.into_iter().find(|found| found.name == "patch").unwrap().key.kind
        };
        assert_eq!((wants(Seeing::keys()), wants(Hearing::keys())), (ValueKind::Whole, ValueKind::Text));
    }
}
