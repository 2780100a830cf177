//! Parses the value of a key according to its kind, or says in a sentence which values it takes.

use flatout_settings::ValueKind;
use toml::{Table, Value};

use super::text;

/// Where a value comes from: in a file it has a TOML type, on the command line it is plain text.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Written {
    InFile,
    AsText,
}

/// Converts a value to the key's kind.
pub(super) fn read(path: &str, kind: &ValueKind, given: &Value, written: Written) -> Result<Value, String> {
    let wrong = || {
        let shown = match given {
            Value::String(text) => text.clone(),
            other => text::value(other),
        };
        format!("`{path}` must be {kind}, not `{shown}`")
    };
    let bare = given.as_str().filter(|_| written == Written::AsText);
    match kind {
        ValueKind::Bool => match (given, given.as_str()) {
            (Value::Boolean(_), _) => Ok(given.clone()),
            (_, Some("on" | "true")) => Ok(Value::Boolean(true)),
            (_, Some("off" | "false")) => Ok(Value::Boolean(false)),
            _ => Err(wrong()),
        },
        ValueKind::Whole => whole(given, bare).ok_or_else(wrong),
        ValueKind::Number => match (given, bare) {
            (Value::Integer(number), _) => Ok(Value::Float(*number as f64)),
            (Value::Float(number), _) if number.is_finite() => Ok(Value::Float(*number)),
            (_, Some(text)) => {
                text.parse().ok().filter(|x: &f64| x.is_finite()).map(Value::Float).ok_or_else(wrong)
            }
            _ => Err(wrong()),
        },
        ValueKind::Text => match given {
            Value::String(text) if written == Written::AsText => Ok(Value::String(unquoted(text).into())),
            Value::String(_) => Ok(given.clone()),
            _ => Err(wrong()),
        },
        ValueKind::Choice(values) => {
            let text = match given {
                Value::Boolean(on) => (if *on { "on" } else { "off" }).to_string(),
                Value::String(text) => unquoted(text).to_ascii_lowercase(),
                _ => return Err(wrong()),
            };
            let text = match text.as_str() {
                "true" => "on",
                "false" => "off",
                other => other,
            };
            values.contains(&text).then(|| Value::String(text.into())).ok_or_else(wrong)
        }
        ValueKind::WholeOrAuto if given.as_str() == Some("auto") => Ok(given.clone()),
        ValueKind::WholeOrAuto => {
            whole(given, bare).filter(|n| n.as_integer().is_some_and(|n| n >= 1)).ok_or_else(wrong)
        }
        ValueKind::WordOrNumbers(words) => match given.as_str().map(unquoted) {
            Some(word) if words.contains(&word) => Ok(Value::String(word.into())),
            _ => {
                let numbers = ValueKind::List(Box::new(ValueKind::Number), None);
                read(path, &numbers, given, written).map_err(|_| wrong())
            }
        },
        ValueKind::List(of, length) => {
            let elements = match (given, bare) {
                (Value::Array(elements), _) => elements.clone(),
                (_, Some(text)) => elements_of(text),
                (single, _) => vec![single.clone()],
            };
            if length.is_some_and(|length| length != elements.len()) {
                return Err(wrong());
            }
            let read = |element| read(path, of, element, written).map_err(|_| wrong());
            elements.iter().map(read).collect::<Result<_, _>>().map(Value::Array)
        }
        ValueKind::Tables(keys) => {
            let tables = match bare {
                Some(text) => {
                    let parsed: Result<Table, _> = toml::from_str(&format!("v = {text}"));
                    parsed.ok().and_then(|mut table| table.remove("v")).ok_or_else(wrong)?
                }
                None => given.clone(),
            };
            let Value::Array(tables) = tables else { return Err(wrong()) };
            let mut read_tables = Vec::new();
            for table in &tables {
                let Value::Table(fields) = table else { return Err(wrong()) };
                let mut read_fields = Table::new();
                for (name, held) in fields {
                    let Some(key) = keys.iter().find(|key| key.name == name) else {
                        return Err(format!("`{path}` must be {kind}, and one of them has `{name}`"));
                    };
                    let field = read(&format!("{path}.{name}"), &key.kind, held, Written::InFile)?;
                    read_fields.insert(name.clone(), field);
                }
                if let Some(key) = keys.iter().find(|key| key.required && !fields.contains_key(key.name)) {
                    return Err(format!("`{path}` has a table without `{}`", key.name));
                }
                read_tables.push(Value::Table(read_fields));
            }
            Ok(Value::Array(read_tables))
        }
        // The keys of a section are set one by one.
        ValueKind::Section(_) => Err(wrong()),
    }
}

/// Parses a whole number of 0 or more, which may be written as `1e6` or `1_000`.
fn whole(given: &Value, bare: Option<&str>) -> Option<Value> {
    /// Above this, not every whole number has a floating-point form.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let of_float = |x: f64| ((0.0..=EXACT).contains(&x) && x.fract() == 0.0).then_some(x as i64);
    let number = match (given, bare) {
        (Value::Integer(number), _) => Some(*number),
        (Value::Float(number), _) => of_float(*number),
        (_, Some(text)) => {
            let digits = text.replace('_', "");
            digits.parse().ok().or_else(|| digits.parse().ok().and_then(of_float))
        }
        _ => None,
    };
    number.filter(|n| *n >= 0).map(Value::Integer)
}

/// The elements of `[a, b]` or `a, b` as texts.
fn elements_of(text: &str) -> Vec<Value> {
    let inner = text.trim();
    let inner = inner.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(inner).trim();
    if inner.is_empty() {
        return Vec::new();
    }
    inner.split(',').map(|element| Value::String(element.trim().into())).collect()
}

fn unquoted(text: &str) -> &str {
    for quote in ['"', '\''] {
        if let Some(inner) = text.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote)) {
            return inner;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(kind: ValueKind, given: &str) -> Result<String, String> {
        read("k", &kind, &Value::String(given.into()), Written::AsText).map(|value| text::value(&value))
    }

    #[test]
    fn bare_text_becomes_a_value_of_the_kind() {
        assert_eq!(typed(ValueKind::Whole, "1_000").unwrap(), "1000");
        assert_eq!(typed(ValueKind::Whole, "3e4").unwrap(), "30000");
        assert_eq!(typed(ValueKind::Number, "1e-3").unwrap(), "0.001");
        assert_eq!(typed(ValueKind::Number, "2").unwrap(), "2.0");
        assert_eq!(typed(ValueKind::Text, "12").unwrap(), "\"12\"");
        assert_eq!(typed(ValueKind::Text, "'a b'").unwrap(), "\"a b\"");
        assert_eq!(typed(ValueKind::Bool, "off").unwrap(), "false");
        assert_eq!(typed(ValueKind::Choice(&["on", "off"]), "true").unwrap(), "\"on\"");
        assert_eq!(typed(ValueKind::Choice(&["fp32", "bf16"]), "BF16").unwrap(), "\"bf16\"");
        assert_eq!(typed(ValueKind::WholeOrAuto, "auto").unwrap(), "\"auto\"");
        assert_eq!(typed(ValueKind::WholeOrAuto, "4").unwrap(), "4");
        let pair = ValueKind::List(Box::new(ValueKind::Number), Some(2));
        assert_eq!(typed(pair.clone(), "[0.9,0.95]").unwrap(), "[0.9, 0.95]");
        assert_eq!(typed(pair, "0.9, 1").unwrap(), "[0.9, 1.0]");
        let texts = ValueKind::List(Box::new(ValueKind::Text), None);
        assert_eq!(typed(texts.clone(), "embed").unwrap(), "[\"embed\"]");
        assert_eq!(typed(texts, "[]").unwrap(), "[]");
    }

    #[test]
    fn errors_name_the_values_that_a_key_takes() {
        let whole = "`k` must be a whole number of 0 or more, not `";
        for given in ["-5", "1.5", "many", "", "nan", "1e300", "99999999999999999999"] {
            assert_eq!(typed(ValueKind::Whole, given).unwrap_err(), format!("{whole}{given}`"));
        }
        for given in ["nan", "inf", "-inf", "fast", ""] {
            assert_eq!(
                typed(ValueKind::Number, given).unwrap_err(),
                format!("`k` must be a number, not `{given}`")
            );
        }
        assert_eq!(typed(ValueKind::WholeOrAuto, "0").unwrap_err().matches("must be auto or").count(), 1);
        assert_eq!(
            typed(ValueKind::Choice(&["on", "off"]), "maybe").unwrap_err(),
            "`k` must be one of on, off, not `maybe`"
        );
        let pair = ValueKind::List(Box::new(ValueKind::Number), Some(2));
        assert_eq!(typed(pair, "[0.9]").unwrap_err(), "`k` must be a list of 2, each a number, not `[0.9]`");
        let in_file = read("k", &ValueKind::Whole, &Value::String("8".into()), Written::InFile);
        assert!(in_file.unwrap_err().contains("not `8`"), "a file has types");
    }
}
