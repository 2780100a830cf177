//! Jinja's tests, as in `value is defined`.

use super::meter::spend_characters;
use super::methods::has_case;
use super::operators::{arithmetic, contains, holds};
use super::syntax::{Comparison, Operator};
use super::value::{Value, equal, is_same};
use super::written::text;
use super::{Args, Error, failed, filters};

const NAMES: [&str; 39] = [
    "odd",
    "even",
    "divisibleby",
    "defined",
    "undefined",
    "filter",
    "test",
    "none",
    "boolean",
    "false",
    "true",
    "integer",
    "float",
    "lower",
    "upper",
    "string",
    "mapping",
    "number",
    "sequence",
    "iterable",
    "callable",
    "sameas",
    "escaped",
    "in",
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    "ge",
    ">=",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
];

pub(super) fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

/// Whether the test `name` holds for `value`.
pub(super) fn is(value: &Value, name: &str, args: Args) -> Result<bool, Error> {
    let comparison = match name {
        "==" | "eq" | "equalto" => Some(Comparison::Equal),
        "!=" | "ne" => Some(Comparison::NotEqual),
        ">" | "gt" | "greaterthan" => Some(Comparison::Greater),
        ">=" | "ge" => Some(Comparison::GreaterOrEqual),
        "<" | "lt" | "lessthan" => Some(Comparison::Less),
        "<=" | "le" => Some(Comparison::LessOrEqual),
        _ => None,
    };
    if comparison.is_some() || matches!(name, "divisibleby" | "sameas" | "in") {
        let [other] = args.take(name, ["other"], 1)?;
        let other = other.unwrap_or(Value::None);
        return match (comparison, name) {
            (Some(comparison), _) => holds(comparison, value, &other),
            (None, "divisibleby") => equal(&arithmetic(Operator::Remainder, value, &other)?, &Value::Int(0)),
            (None, "in") => contains(&other, value),
            (None, _) => Ok(is_same(value, &other)),
        };
    }
    args.take::<0>(name, [], 0)?;
    let remainder = || arithmetic(Operator::Remainder, value, &Value::Int(2));
    Ok(match name {
        "odd" => equal(&remainder()?, &Value::Int(1))?,
        "even" => equal(&remainder()?, &Value::Int(0))?,
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "filter" => value.as_str().is_some_and(filters::is_known),
        "test" => value.as_str().is_some_and(is_known),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "false" => matches!(value, Value::Bool(false)),
        "true" => matches!(value, Value::Bool(true)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_)),
        "string" => matches!(value, Value::Text(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "sequence" => match value {
            Value::Text(_) | Value::Dict(_) | Value::Undefined(_) => true,
            Value::List(list) => list.is_indexed(),
            _ => false,
        },
        "iterable" => value.is_iterable(),
        "callable" => matches!(
            value,
            Value::Macro(_) | Value::Function(_) | Value::Method(_) | Value::Loop(_) | Value::Undefined(_)
        ),
        "lower" => {
            let text = text(value)?;
            spend_characters(text.as_str().map_or(0, str::len))?;
            has_case(text.as_str().unwrap_or_default(), char::is_lowercase, char::is_uppercase)
        }
        "upper" => {
            let text = text(value)?;
            spend_characters(text.as_str().map_or(0, str::len))?;
            has_case(text.as_str().unwrap_or_default(), char::is_uppercase, char::is_lowercase)
        }
        "escaped" => value.is_safe(),
        other => return failed(format!("there is no test `{other}`")),
    })
}
