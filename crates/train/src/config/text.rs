//! The config as TOML text, as runs save it and `recipes show` prints it; it parses back into the same config.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::schema::{self, QualifiedKey};
use super::{Config, Layers};
use crate::UserError;

impl Config {
    /// All sections and keys in the schema's order. `Config::parse` returns an equal config.
    pub fn to_toml(&self) -> String {
        let written = flatten(self);
        let mut out = String::new();
        for (name, text) in [("recipe", &self.recipe), ("description", &self.description)] {
            if !text.is_empty() {
                out += &format!("{name} = {}\n", value(&Value::String(text.clone())));
            }
        }
        let keys = schema::of_kind(self.model.kind());
        for (section, _) in schema::sections() {
            out += &section_text(section, keys, &written);
        }
        out.trim_start().to_string()
    }

    /// Every key that has a value, by its full path, as written in TOML.
    pub fn values(&self) -> BTreeMap<String, String> {
        let keys = flatten(self).into_iter().map(|(path, held)| (path, value(&held)));
        keys.chain([("recipe".to_string(), self.recipe.clone())]).collect()
    }

    /// Like [`Config::values`], for display: URLs without the signatures in their queries.
    pub fn shown_values(&self) -> BTreeMap<String, String> {
        self.values().into_iter().map(|(key, value)| (key, without_signatures(&value))).collect()
    }

    /// Parses a config that `to_toml` wrote. `origin` is the file, for error messages.
    pub fn parse(text: &str, origin: &str) -> Result<Config, UserError> {
        let mut layers = Layers::default();
        layers.file(text, origin)?;
        layers.finish()
    }
}

/// Cuts URLs in a value at their question marks: a signature after that is a secret while it is valid.
fn without_signatures(value: &str) -> String {
    let is_address = |part: &&str| part.starts_with("https://") || part.starts_with("http://");
    let quoted = value.split('"').map(|part| match is_address(&part) {
        true => flatout_data::remote::shown(part),
        false => part,
    });
    quoted.collect::<Vec<&str>>().join("\"")
}

/// The text of a section: its values in the order of its keys, then those of each table within it.
pub(super) fn section_text(
    section: &str,
    keys: &[QualifiedKey],
    written: &BTreeMap<String, Value>,
) -> String {
    let keys: Vec<&QualifiedKey> = keys.iter().filter(|found| found.section == section).collect();
    let lines_of = |tables: &[&str]| -> String {
        let own = keys.iter().filter(|found| found.tables == tables);
        let lines = own.filter_map(|found| {
            let held = written.get(&found.path)?;
            Some(format!("{} = {}\n", found.key.name, value(held)))
        });
        lines.collect()
    };
    let lines = lines_of(&[]);
    // An empty section is left out.
    let mut out = if lines.is_empty() { String::new() } else { format!("\n[{section}]\n{lines}") };
    let mut within: Vec<&[&str]> = vec![];
    for found in keys.iter().filter(|found| !found.tables.is_empty()) {
        if !within.contains(&&found.tables[..]) {
            within.push(&found.tables);
        }
    }
    for tables in within {
        let lines = lines_of(tables);
        if !lines.is_empty() {
            out += &format!("\n[{section}.{}]\n{lines}", tables.join("."));
        }
    }
    out
}

/// The values of the config by full path.
pub(super) fn flatten(config: &Config) -> BTreeMap<String, Value> {
    let written = Value::try_from(config).expect("the tree has a TOML form");
    let mut values = BTreeMap::new();
    for (section, held) in written.as_table().expect("a struct is a table") {
        collect(section, held.as_table(), &mut values);
    }
    values
}

/// Collects the values below a path. No key has a table as its value, so a table is a section.
fn collect(path: &str, table: Option<&Table>, values: &mut BTreeMap<String, Value>) {
    for (key, held) in table.into_iter().flatten() {
        let path = format!("{path}.{key}");
        match held {
            Value::Table(inner) => collect(&path, Some(inner), values),
            value => drop(values.insert(path, value.clone())),
        }
    }
}

/// Formats a value on one line. Floats have their shortest exact form.
pub(super) fn value(held: &Value) -> String {
    match held {
        Value::Float(number) => format!("{number:?}"),
        Value::Array(elements) => {
            format!("[{}]", elements.iter().map(value).collect::<Vec<_>>().join(", "))
        }
        Value::Table(fields) => {
            let fields: Vec<_> =
                fields.iter().map(|(name, held)| format!("{name} = {}", value(held))).collect();
            format!("{{ {} }}", fields.join(", "))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Count, Group, Groups, SourceKind};
    use crate::recipes;

    #[test]
    fn addresses_are_shown_without_their_signatures() {
        let given = r#"["https://a.example/x.parquet?sig=1", "b?.jsonl"]"#;
        assert_eq!(without_signatures(given), r#"["https://a.example/x.parquet", "b?.jsonl"]"#);
    }

    #[test]
    fn every_recipe_reads_back_equal() {
        for recipe in recipes::list() {
            let config = recipes::resolve(recipe.name, &[], &[]).unwrap();
            let text = config.to_toml();
            assert_eq!(Config::parse(&text, "config.toml").unwrap(), config, "{text}");
        }
    }

    #[test]
    fn unusual_values_read_back_equal() {
        let mut config = recipes::resolve("tiny", &[], &[]).unwrap();
        config.description = "quotes \" and \\ and\nlines, é".into();
        config.optimizer.lr = 0.1 + 0.2;
        config.optimizer.eps = 1e-300;
        config.model.decoder_mut().rope_theta = 1e16;
        config.data.source = SourceKind::Text;
        config.data.path = Some(crate::config::Paths(vec!["a b/\"c\".txt".into()]));
        config.train.batch = 32;
        config.train.micro_batch = Count::Given(8);
        config.train.freeze = vec!["embed".into(), "layers.*.norm".into()];
        let paths = vec!["head".into()];
        let group = Group { paths, lr_scale: 0.1, weight_decay: Some(0.0), ..Group::default() };
        config.train.groups =
            Groups(vec![group, Group { paths: vec!["x".into()], lr: Some(1e-3), ..Group::default() }]);
        let text = config.to_toml();
        assert_eq!(Config::parse(&text, "config.toml").unwrap(), config, "{text}");
        assert!(text.contains("fuse.qkv = \"on\"\n"), "{text}");
        assert!(text.contains("eps = 1e-300\n"), "{text}");
    }
}
