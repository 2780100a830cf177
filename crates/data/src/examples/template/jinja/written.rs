//! Values as text in Python's notation: `str`, `repr` and `json.dumps`.

use std::fmt::Write;
use std::sync::LazyLock;

use super::meter::spend;
use super::value::{ListKind, TextBuilder, Value, deeper, sort_order};
use super::{Args, Error, failed};
use crate::characters::Ranges;

/// Characters that `repr` escapes, and the space.
static UNPRINTABLE: LazyLock<Ranges> = LazyLock::new(|| Ranges::of(r"[\p{C}\p{Z}]"));

/// Appends the output of `{{ value }}`.
pub(super) fn write_text(value: &Value, out: &mut TextBuilder) -> Result<(), Error> {
    match value {
        Value::Undefined(_) => Ok(()),
        Value::Text(text) => out.push(text),
        other => write_repr(other, 0, out),
    }
}

/// Python's `str`.
pub(super) fn text(value: &Value) -> Result<Value, Error> {
    if let Value::Text(_) = value {
        return Ok(value.clone());
    }
    let mut out = TextBuilder::default();
    write_text(value, &mut out)?;
    Ok(out.value())
}

/// Python's `repr`.
pub(super) fn repr(value: &Value) -> Result<Value, Error> {
    let mut out = TextBuilder::default();
    write_repr(value, 0, &mut out)?;
    Ok(out.value())
}

/// Appends the `repr` of a value at nesting `depth`.
pub(super) fn write_repr(value: &Value, depth: usize, out: &mut TextBuilder) -> Result<(), Error> {
    spend(1)?;
    let depth = deeper(depth)?;
    match value {
        Value::Undefined(_) => out.push("Undefined"),
        Value::None => out.push("None"),
        Value::Bool(value) => out.push(if *value { "True" } else { "False" }),
        Value::Int(value) => out.push(&value.to_string()),
        Value::Float(value) => out.push(&float(*value)),
        Value::Text(text) => write_quoted(text, out),
        Value::List(list) => {
            let (open, close) = match list.kind() {
                ListKind::List => ("[", "]"),
                ListKind::Tuple => ("(", ")"),
                ListKind::Group => ("(", ")"),
                ListKind::View("items") => ("dict_items([", "])"),
                ListKind::View("keys") => ("dict_keys([", "])"),
                ListKind::View(_) => ("dict_values([", "])"),
                ListKind::Range(start, stop, 1) => return out.push(&format!("range({start}, {stop})")),
                ListKind::Range(start, stop, step) => {
                    return out.push(&format!("range({start}, {stop}, {step})"));
                }
                ListKind::Generator => return out.push("<generator object>"),
            };
            out.push(open)?;
            for (at, item) in list.iter().enumerate() {
                if at > 0 {
                    out.push(", ")?;
                }
                write_repr(item, depth, out)?;
            }
            if list.is_tuple() && list.len() == 1 {
                out.push(",")?;
            }
            out.push(close)
        }
        Value::Dict(dict) => {
            write_pairs(dict.iter().map(|(key, value)| (key.clone(), value.clone())), depth, out)
        }
        Value::Namespace(namespace) => {
            let fields: Vec<_> = namespace.fields.borrow().clone();
            out.push("<Namespace ")?;
            write_pairs(fields.into_iter().map(|(name, value)| (Value::Text(name), value)), depth, out)?;
            out.push(">")
        }
        Value::Loop(state) => {
            out.push(&format!("<LoopContext {}/{}>", state.at.get() + 1, state.items.len()))
        }
        Value::Macro(value) => {
            out.push("<Macro ")?;
            write_quoted(&value.definition.name, out)?;
            out.push(">")
        }
        Value::Function(name) => out.push(&format!("<function {name}>")),
        Value::Method(method) => out.push(&format!("<built-in method {}>", method.1)),
    }
}

fn write_pairs(
    pairs: impl Iterator<Item = (Value, Value)>,
    depth: usize,
    out: &mut TextBuilder,
) -> Result<(), Error> {
    out.push("{")?;
    for (at, (key, value)) in pairs.enumerate() {
        if at > 0 {
            out.push(", ")?;
        }
        write_repr(&key, depth, out)?;
        out.push(": ")?;
        write_repr(&value, depth, out)?;
    }
    out.push("}")
}

fn write_quoted(text: &str, out: &mut TextBuilder) -> Result<(), Error> {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push_char(quote)?;
    for character in text.chars() {
        match character {
            '\\' => out.push("\\\\")?,
            '\n' => out.push("\\n")?,
            '\r' => out.push("\\r")?,
            '\t' => out.push("\\t")?,
            same if same == quote => {
                out.push("\\")?;
                out.push_char(same)?;
            }
            other if other != ' ' && UNPRINTABLE.contains(other) => out.push(&match u32::from(other) {
                code @ ..0x100 => format!("\\x{code:02x}"),
                code @ ..0x10000 => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            })?,
            other => out.push_char(other)?,
        }
    }
    out.push_char(quote)
}

/// The shortest form that parses to the same number, with Python's exponents.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let written = format!("{value:?}");
    match written.split_once('e') {
        None => written,
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

/// The filter `tojson`, with the arguments that transformers gives it: `json.dumps` with these.
pub(super) fn tojson(value: &Value, args: Args) -> Result<Value, Error> {
    let [ensure_ascii, indent, separators, sort_keys] =
        args.take("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"], 0)?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Text(text)) if text.len() <= 64 => Some(text.to_string()),
        Some(other) => match other.as_int() {
            Some(spaces) if spaces <= 64 => Some(" ".repeat(spaces.max(0) as usize)),
            _ => return failed("tojson's indent is not a small number"),
        },
    };
    let [item, key] = match separators {
        None | Some(Value::None) => [if indent.is_some() { "," } else { ", " }.to_string(), ": ".into()],
        Some(Value::List(pair)) => match &*pair {
            [Value::Text(item), Value::Text(key)] => [item.to_string(), key.to_string()],
            _ => return failed("tojson's separators are not two strings"),
        },
        Some(_) => return failed("tojson's separators are not two strings"),
    };
    let writer = Json {
        indent,
        item,
        key,
        ensure_ascii: ensure_ascii.is_some_and(|value| value.is_true()),
        sort_keys: sort_keys.is_some_and(|value| value.is_true()),
    };
    let mut out = TextBuilder::default();
    writer.write(value, 0, &mut out)?;
    Ok(out.value())
}

struct Json {
    indent: Option<String>,
    item: String,
    key: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Json {
    fn write(&self, value: &Value, depth: usize, out: &mut TextBuilder) -> Result<(), Error> {
        spend(1)?;
        match value {
            Value::None => out.push("null"),
            Value::Bool(value) => out.push(if *value { "true" } else { "false" }),
            Value::Int(value) => out.push(&value.to_string()),
            Value::Float(value) => out.push(match float(*value).as_str() {
                "nan" => "NaN",
                "inf" => "Infinity",
                "-inf" => "-Infinity",
                written => written,
            }),
            Value::Text(text) => self.string(text, out),
            Value::Dict(dict) => {
                let order = match self.sort_keys {
                    true => {
                        let keys: Vec<Value> = dict.iter().map(|(key, _)| key.clone()).collect();
                        sort_order(&keys, false)?
                    }
                    false => (0..dict.len()).collect(),
                };
                out.push("{")?;
                for (at, (key, value)) in order.into_iter().map(|place| &dict[place]).enumerate() {
                    self.between(at, depth + 1, out)?;
                    match key {
                        Value::Text(key) => self.string(key, out)?,
                        Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                            out.push("\"")?;
                            self.write(key, depth, out)?;
                            out.push("\"")?;
                        }
                        other => return failed(format!("{} cannot be a key of a JSON object", other.kind())),
                    }
                    out.push(&self.key)?;
                    self.write(value, depth + 1, out)?;
                }
                self.close(dict.len(), depth, out)?;
                out.push("}")
            }
            Value::List(list) if list.is_tuple() || list.kind() == ListKind::List => {
                out.push("[")?;
                for (at, item) in list.iter().enumerate() {
                    self.between(at, depth + 1, out)?;
                    self.write(item, depth + 1, out)?;
                }
                self.close(list.len(), depth, out)?;
                out.push("]")
            }
            other => failed(format!("tojson cannot write {}", other.kind())),
        }
    }

    fn between(&self, at: usize, depth: usize, out: &mut TextBuilder) -> Result<(), Error> {
        if at > 0 {
            out.push(&self.item)?;
        }
        self.new_line(depth, out)
    }

    fn close(&self, count: usize, depth: usize, out: &mut TextBuilder) -> Result<(), Error> {
        if count > 0 { self.new_line(depth, out) } else { Ok(()) }
    }

    fn new_line(&self, depth: usize, out: &mut TextBuilder) -> Result<(), Error> {
        let Some(indent) = &self.indent else { return Ok(()) };
        out.push("\n")?;
        out.repeat(indent, depth)
    }

    fn string(&self, text: &str, out: &mut TextBuilder) -> Result<(), Error> {
        out.push("\"")?;
        let is_escaped = |c: char| c < ' ' || matches!(c, '"' | '\\') || (self.ensure_ascii && !c.is_ascii());
        let mut rest = text;
        while let Some(at) = rest.find(is_escaped) {
            out.push(&rest[..at])?;
            let character = rest[at..].chars().next().expect("the search found a character");
            rest = &rest[at + character.len_utf8()..];
            match character {
                '"' => out.push("\\\"")?,
                '\\' => out.push("\\\\")?,
                '\n' => out.push("\\n")?,
                '\r' => out.push("\\r")?,
                '\t' => out.push("\\t")?,
                '\u{8}' => out.push("\\b")?,
                '\u{c}' => out.push("\\f")?,
                control => {
                    let mut code = String::new();
                    for unit in control.encode_utf16(&mut [0; 2]) {
                        let _ = write!(code, "\\u{unit:04x}");
                    }
                    out.push(&code)?;
                }
            }
        }
        out.push(rest)?;
        out.push("\"")
    }
}
