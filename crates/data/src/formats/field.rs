//! The values of a row's fields in any format: JSON values, with objects in their own order, and bytes.

use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

#[derive(Debug, Clone, PartialEq, Default)]
pub enum Field {
    #[default]
    Null,
    Bool(bool),
    Whole(i128),
    Number(f64),
    Text(String),
    /// Bytes that are no text, such as an image in a parquet file. Shared, because rows are copied in parts.
    Bytes(Arc<[u8]>),
    List(Vec<Field>),
    Object(Fields),
}

/// Named fields in the order of the file, in which templates print them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Fields(pub Vec<(String, Field)>);

impl Fields {
    pub fn get(&self, name: &str) -> Option<&Field> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, field)| field)
    }

    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Sets a field. An existing one keeps its position, as in a Python dictionary.
    pub fn set(&mut self, name: &str, field: Field) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, held)) => *held = field,
            None => self.0.push((name.into(), field)),
        }
    }

    /// Total bytes of its texts and byte values.
    pub fn held_bytes(&self) -> usize {
        self.0.iter().map(|(_, field)| field.held_bytes()).sum()
    }

    /// The names of the fields, for error messages.
    pub fn names(&self) -> String {
        let names: Vec<String> =
            self.0.iter().take(12).map(|(name, _)| format!("`{}`", name.escape_debug())).collect();
        if names.is_empty() { "none".into() } else { names.join(", ") }
    }
}

impl Field {
    pub fn text(&self) -> Option<&str> {
        match self {
            Field::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Its kind, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Field::Null => "null",
            Field::Bool(_) => "true or false",
            Field::Whole(_) | Field::Number(_) => "a number",
            Field::Text(_) => "a string",
            Field::Bytes(_) => "bytes",
            Field::List(_) => "a list",
            Field::Object(_) => "an object",
        }
    }

    /// Total bytes of its texts and byte values, nested ones included.
    pub fn held_bytes(&self) -> usize {
        match self {
            Field::Null | Field::Bool(_) | Field::Whole(_) | Field::Number(_) => 0,
            Field::Text(text) => text.len(),
            Field::Bytes(bytes) => bytes.len(),
            Field::List(list) => list.iter().map(Field::held_bytes).sum(),
            Field::Object(fields) => fields.held_bytes(),
        }
    }

    /// Parses a JSON text.
    pub fn from_json(text: &str) -> Result<Field, serde_json::Error> {
        serde_json::from_str(text)
    }
}

impl From<&str> for Field {
    fn from(text: &str) -> Field {
        Field::Text(text.into())
    }
}

impl From<String> for Field {
    fn from(text: String) -> Field {
        Field::Text(text)
    }
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Field, D::Error> {
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fields, D::Error> {
        deserializer.deserialize_map(Named)
    }
}

struct Any;

impl<'de> Visitor<'de> for Any {
    type Value = Field;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Field, E> {
        Ok(Field::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Field, E> {
        Ok(Field::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Field, E> {
        Ok(Field::Whole(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Field, E> {
        Ok(Field::Whole(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Field, E> {
        Ok(Field::Number(value))
    }

    fn visit_str<E>(self, text: &str) -> Result<Field, E> {
        Ok(Field::Text(text.into()))
    }

    fn visit_string<E>(self, text: String) -> Result<Field, E> {
        Ok(Field::Text(text))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<Field, S::Error> {
        let mut list = Vec::new();
        while let Some(field) = seq.next_element()? {
            list.push(field);
        }
        Ok(Field::List(list))
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Field, M::Error> {
        Named.visit_map(map).map(Field::Object)
    }
}

struct Named;

impl<'de> Visitor<'de> for Named {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Fields, M::Error> {
        let mut fields = Fields::default();
        // The linear search by name is limited: an object of thousands of keys is not a row.
        while let Some((name, field)) = map.next_entry::<String, Field>()? {
            if fields.0.len() < LINEAR_KEYS { fields.set(&name, field) } else { fields.0.push((name, field)) }
        }
        Ok(fields)
    }
}

/// Up to this many keys, repeated names are detected, and the last value counts.
const LINEAR_KEYS: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_keeps_its_order_and_the_last_of_equal_keys() {
        let field = Field::from_json(r#"{"b":1,"a":[null,true,-2,1.5,"x"],"b":{"z":0,"y":[]}}"#).unwrap();
        let Field::Object(fields) = &field else { panic!("{field:?}") };
        assert_eq!(fields.names(), "`b`, `a`");
        let Some(Field::Object(inner)) = fields.get("b") else { panic!("{field:?}") };
        assert_eq!((inner.names().as_str(), inner.get("z")), ("`z`, `y`", Some(&Field::Whole(0))));
        let list = [Field::Null, Field::Bool(true), Field::Whole(-2), Field::Number(1.5), "x".into()];
        assert_eq!(fields.get("a"), Some(&Field::List(list.to_vec())));
    }
}
