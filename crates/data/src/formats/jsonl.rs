//! JSONL: one object per line, one of whose keys has the text.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::fault::{Fault, ReadError, Reason};
use super::field::{Field, Fields};
use super::stream_format::{Documents, RawDocument, Row, Rows, StreamFormat};
use super::window::Window;

pub(super) const JSONL: StreamFormat = StreamFormat {
    documents: |window, options| Box::new(Jsonl::new(window, &options.field, options.most_bytes())),
    rows: Some(|window, options| Box::new(Jsonl::new(window, "", options.most_row_bytes()))),
    texts: |_, options| {
        let field = options.field.clone();
        Ok(Box::new(move |bytes| text_of(&bytes, &field).ok().flatten()))
    },
};

struct Jsonl {
    window: Window,
    field: String,
    max_line_bytes: usize,
    /// Number of the next line, from 1.
    line: u64,
    /// Whether the window is inside a line that is too long.
    skipping: bool,
}

impl Jsonl {
    fn new(window: Window, field: &str, max_line_bytes: usize) -> Self {
        Self { window, field: field.into(), max_line_bytes, line: 1, skipping: false }
    }

    fn next_line<T>(
        &mut self,
        take: impl Fn(&[u8], &str) -> Result<Option<T>, (Reason, String)>,
    ) -> Result<Option<Line<T>>, ReadError> {
        loop {
            if self.skipping && !self.skip_line()? {
                return Ok(None);
            }
            let Some(len) = self.line_len()? else { return Ok(None) };
            let (at, line) = (self.window.offset(), self.line);
            let found = take(&self.window.bytes()[..len], &self.field);
            self.window.consume(len);
            self.line += 1;
            match found {
                Ok(Some(found)) => return Ok(Some(Line { found, line, at, len })),
                Ok(None) => {}
                Err((reason, message)) => return Err(Fault::at_line(reason, line, at, message).into()),
            }
        }
    }

    /// The length of the next line with its line break; `None` at the end of the file.
    fn line_len(&mut self) -> Result<Option<usize>, ReadError> {
        let mut searched = 0;
        loop {
            let bytes = self.window.bytes();
            let end = memchr::memchr(b'\n', &bytes[searched..]).map(|at| searched + at + 1);
            searched = end.unwrap_or(bytes.len());
            if searched > self.max_line_bytes {
                let message = format!("the line is longer than {} bytes", self.max_line_bytes);
                let fault = Fault::at_line(Reason::TooLong, self.line, self.window.offset(), message);
                self.skipping = true;
                return Err(fault.into());
            }
            if end.is_some() || !self.window.more()? {
                return Ok((searched > 0).then_some(searched));
            }
        }
    }

    /// Skips the line without buffering it; false at the end of the file.
    fn skip_line(&mut self) -> Result<bool, ReadError> {
        loop {
            let bytes = self.window.bytes();
            match memchr::memchr(b'\n', bytes) {
                Some(at) => {
                    self.window.consume(at + 1);
                    self.line += 1;
                    self.skipping = false;
                    return Ok(true);
                }
                None => self.window.consume(bytes.len()),
            }
            if !self.window.more()? {
                return Ok(false);
            }
        }
    }
}

impl Documents for Jsonl {
    /// Skips blank lines, which are not documents and not errors.
    fn next(&mut self) -> Result<Option<RawDocument>, ReadError> {
        let found = self.next_line(text_of)?;
        Ok(found.map(|Line { found, line, at, len }| RawDocument {
            text: found,
            line: Some(line),
            row: None,
            at,
            len: len as u32,
        }))
    }

    fn position(&self) -> Option<(u64, u64)> {
        Some((self.line, self.window.offset()))
    }
}

impl Rows for Jsonl {
    /// The next object with all its fields.
    fn next(&mut self) -> Result<Option<Row>, ReadError> {
        let found = self.next_line(|line, _| object_of(line))?;
        Ok(found.map(|Line { found, line, at, .. }| Row { fields: found, line: Some(line), row: None, at }))
    }
}

/// The outcome of reading a line, with the line's place.
struct Line<T> {
    found: T,
    line: u64,
    at: u64,
    len: usize,
}

/// The object in a line; `None` where the line is blank.
fn object_of(line: &[u8]) -> Result<Option<Fields>, (Reason, String)> {
    let line = line.trim_ascii();
    if line.is_empty() {
        return Ok(None);
    }
    match serde_json::from_slice::<Field>(line).map_err(|error| broken(line, &error))? {
        Field::Object(fields) => Ok(Some(fields)),
        _ => Err((Reason::NotAnObject, "this is JSON but not an object".into())),
    }
}

/// The reason why a line is not JSON.
fn broken(line: &[u8], error: &serde_json::Error) -> (Reason, String) {
    match std::str::from_utf8(line) {
        Err(error) => (Reason::NotUtf8, format!("byte {} of the line is not UTF-8", error.valid_up_to())),
        Ok(_) => {
            let message = error.to_string();
            let message = message.split(" at line ").next().unwrap_or(&message);
            (Reason::BrokenJson, format!("this is not JSON ({message}, at column {})", error.column()))
        }
    }
}

/// The text in a line; `None` where the line is blank.
pub(super) fn text_of(line: &[u8], field: &str) -> Result<Option<String>, (Reason, String)> {
    let line = line.trim_ascii();
    if line.is_empty() {
        return Ok(None);
    }
    let broken = |error: serde_json::Error| broken(line, &error);
    if line[0] != b'{' {
        serde_json::from_slice::<IgnoredAny>(line).map_err(broken)?;
        return Err((Reason::NotAnObject, "this is JSON but not an object".into()));
    }
    let mut json = serde_json::Deserializer::from_slice(line);
    let found = Object { field }.deserialize(&mut json).and_then(|found| json.end().map(|()| found));
    match found.map_err(broken)? {
        Some(Value::Text(text)) => Ok(Some(text)),
        Some(Value::Null) => Err((Reason::Null, format!("the field `{field}` is null"))),
        Some(Value::Other(kind)) => {
            Err((Reason::NotAString, format!("the field `{field}` is {kind}, not a string")))
        }
        None => Err((Reason::MissingField, format!("the object has no field `{field}`{}", others(line)))),
    }
}

/// The keys of the object, for error messages.
fn others(line: &[u8]) -> String {
    let keys: BTreeMap<String, IgnoredAny> = serde_json::from_slice(line).unwrap_or_default();
    let keys: Vec<String> = keys.keys().take(8).map(|key| format!("`{}`", key.escape_debug())).collect();
    if keys.is_empty() { String::new() } else { format!(", only {}", keys.join(", ")) }
}

/// Extracts one key of an object and skips the others without storing them. Of a repeated key the last value counts, as in most
/// readers.
struct Object<'f> {
    field: &'f str,
}

impl<'de> DeserializeSeed<'de> for Object<'_> {
    type Value = Option<Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<Value>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Object<'_> {
    type Value = Option<Value>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Option<Value>, M::Error> {
        let mut found = None;
        while let Some(is_field) = map.next_key_seed(KeyIs(self.field))? {
            if is_field {
                found = Some(map.next_value_seed(Value::Null)?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

struct KeyIs<'f>(&'f str);

impl<'de> DeserializeSeed<'de> for KeyIs<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyIs<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<bool, E> {
        Ok(key == self.0)
    }
}

/// The value of a field.
enum Value {
    Text(String),
    Null,
    Other(&'static str),
}

impl<'de> DeserializeSeed<'de> for Value {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::Text(text.into()))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Value, E> {
        Ok(Value::Other("true or false"))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Value, E> {
        Ok(Value::Other("a number"))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Value, E> {
        Ok(Value::Other("a number"))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Value, E> {
        Ok(Value::Other("a number"))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<Value, S::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Value::Other("a list"))
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Value, M::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Value::Other("an object"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_is_found_in_any_context() {
        let found = |line: &str| text_of(line.as_bytes(), "text").unwrap();
        for line in [
            r#"{"text":"a\nb"}"#,
            r#"  { "id" : 7, "meta": {"text": "no", "deep": [[[1.5e3, null, true]]]}, "text" : "a\u000ab" } "#,
            r#"{"text":"first","t\u0065xt":"a\nb","last":"\ud83e\udd8a"}"#,
        ] {
            assert_eq!(found(line).as_deref(), Some("a\nb"), "{line}");
        }
        assert_eq!(found(" \t\r\n"), None);
        assert_eq!(text_of(r#"{"päth":"x"}"#.as_bytes(), "päth").unwrap().as_deref(), Some("x"));
    }
}
