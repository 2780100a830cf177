//! Python's operators, and access to parts of values: attributes, items, slices.

use std::rc::Rc;

use super::format::percent;
use super::meter::{spend, spend_bytes};
use super::methods;
use super::syntax::{Comparison, Operator};
use super::value::{List, ListBuilder, ListKind, TextBuilder, Value, clipped, compare, equal};
use super::{Error, failed};

pub(super) fn arithmetic(operator: Operator, a: &Value, b: &Value) -> Result<Value, Error> {
    spend(1)?;
    match (operator, a, b) {
        (Operator::Add, Value::Text(a), Value::Text(b)) => {
            let mut out = TextBuilder::default();
            for text in [a, b] {
                match a.is_safe() || b.is_safe() {
                    true => out.push_safe(text, text.is_safe())?,
                    false => out.push(text)?,
                }
            }
            return Ok(out.value());
        }
        (Operator::Add, Value::List(a), Value::List(b))
            if matches!((a.kind(), b.kind()), (ListKind::List, ListKind::List))
                || (a.is_tuple() && b.is_tuple()) =>
        {
            let kind = if a.is_tuple() { ListKind::Tuple } else { ListKind::List };
            return Value::list(a.iter().chain(b.iter()).cloned(), kind);
        }
        (Operator::Multiply, Value::Text(text), times) | (Operator::Multiply, times, Value::Text(text))
            if times.as_int().is_some() =>
        {
            let times = usize::try_from(times.as_int().unwrap_or(0).max(0)).unwrap_or(usize::MAX);
            let mut out = TextBuilder::default();
            if !text.is_empty() {
                out.repeat(text, times)?;
            }
            return Ok(out.value());
        }
        (Operator::Multiply, Value::List(list), times) | (Operator::Multiply, times, Value::List(list))
            if times.as_int().is_some() && (list.kind() == ListKind::List || list.is_tuple()) =>
        {
            let times = usize::try_from(times.as_int().unwrap_or(0).max(0)).unwrap_or(usize::MAX);
            let mut out = ListBuilder::default();
            if !list.is_empty() {
                for _ in 0..times {
                    list.iter().try_for_each(|item| out.push(item.clone()))?;
                }
            }
            return out.value(if list.is_tuple() { ListKind::Tuple } else { ListKind::List });
        }
        (Operator::Remainder, Value::Text(format), values) => return percent(format, values),
        _ => {}
    }
    let result = match (a.as_int(), b.as_int()) {
        (Some(a), Some(b)) => whole(operator, a, b)?,
        _ => match (a.as_float(), b.as_float()) {
            (Some(a), Some(b)) => Some(real(operator, a, b)?),
            _ => return failed(unsupported(operator, a, b)),
        },
    };
    result.map_or_else(|| failed("a number becomes too large"), Ok)
}

fn unsupported(operator: Operator, a: &Value, b: &Value) -> String {
    let symbol = match operator {
        Operator::Add => "+",
        Operator::Subtract => "-",
        Operator::Multiply => "*",
        Operator::Divide => "/",
        Operator::FloorDivide => "//",
        Operator::Remainder => "%",
        Operator::Power => "**",
    };
    for value in [a, b] {
        if let Value::Undefined(name) = value {
            return format!("`{symbol}` is given {name}, which is undefined");
        }
    }
    format!("`{symbol}` is given {} and {}", a.kind(), b.kind())
}

/// Integer arithmetic; `None` where the result does not fit 128 bits.
fn whole(operator: Operator, a: i128, b: i128) -> Result<Option<Value>, Error> {
    let floored = |a: i128, b: i128| -> Option<(i128, i128)> {
        let (quotient, remainder) = (a.checked_div(b)?, a.checked_rem(b)?);
        match remainder != 0 && (remainder < 0) != (b < 0) {
            true => Some((quotient - 1, remainder + b)),
            false => Some((quotient, remainder)),
        }
    };
    if b == 0 && matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Remainder) {
        return failed("a number is divided by 0");
    }
    let value = match operator {
        Operator::Add => a.checked_add(b),
        Operator::Subtract => a.checked_sub(b),
        Operator::Multiply => a.checked_mul(b),
        Operator::Divide => return Ok(Some(Value::Float(a as f64 / b as f64))),
        Operator::FloorDivide => floored(a, b).map(|(quotient, _)| quotient),
        Operator::Remainder => floored(a, b).map(|(_, remainder)| remainder),
        Operator::Power if b < 0 => return real(operator, a as f64, b as f64).map(Some),
        Operator::Power => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
    };
    Ok(value.map(Value::Int))
}

fn real(operator: Operator, a: f64, b: f64) -> Result<Value, Error> {
    if b == 0.0 && matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Remainder) {
        return failed("a number is divided by 0");
    }
    let remainder = || {
        let remainder = a % b;
        if remainder != 0.0 && (remainder < 0.0) != (b < 0.0) { remainder + b } else { remainder }
    };
    Ok(Value::Float(match operator {
        Operator::Add => a + b,
        Operator::Subtract => a - b,
        Operator::Multiply => a * b,
        Operator::Divide => a / b,
        Operator::FloorDivide => ((a - remainder()) / b).round(),
        Operator::Remainder => remainder(),
        Operator::Power if a == 0.0 && b < 0.0 => return failed("0 is raised to a negative power"),
        Operator::Power => a.powf(b),
    }))
}

pub(super) fn negative(value: &Value) -> Result<Value, Error> {
    match value {
        Value::Float(value) => Ok(Value::Float(-value)),
        other => match other.as_int().and_then(i128::checked_neg) {
            Some(value) => Ok(Value::Int(value)),
            None => failed(format!("`-` is given {}", other.kind())),
        },
    }
}

pub(super) fn positive(value: &Value) -> Result<Value, Error> {
    match value {
        Value::Float(_) => Ok(value.clone()),
        other => match other.as_int() {
            Some(value) => Ok(Value::Int(value)),
            None => failed(format!("`+` is given {}", other.kind())),
        },
    }
}

pub(super) fn holds(comparison: Comparison, a: &Value, b: &Value) -> Result<bool, Error> {
    let ordered = || compare(a, b);
    Ok(match comparison {
        Comparison::Equal => equal(a, b)?,
        Comparison::NotEqual => !equal(a, b)?,
        Comparison::Less => ordered()?.is_some_and(|order| order.is_lt()),
        Comparison::LessOrEqual => ordered()?.is_some_and(|order| order.is_le()),
        Comparison::Greater => ordered()?.is_some_and(|order| order.is_gt()),
        Comparison::GreaterOrEqual => ordered()?.is_some_and(|order| order.is_ge()),
        Comparison::In => contains(b, a)?,
        Comparison::NotIn => !contains(b, a)?,
    })
}

pub(super) fn contains(whole: &Value, part: &Value) -> Result<bool, Error> {
    match whole {
        Value::Undefined(_) => Ok(false),
        Value::Text(text) => match part {
            Value::Text(part) => {
                spend_bytes(text.len())?;
                Ok(text.contains(&**part))
            }
            other => failed(format!("a str is asked for {}", other.kind())),
        },
        Value::Dict(dict) => Ok(dict.get(part)?.is_some()),
        Value::List(list) => {
            for item in list.iter() {
                if equal(item, part)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        other => failed(format!("{} holds nothing that `in` could find", other.kind())),
    }
}

/// `value.name`: Python's attribute of that name, or the item.
pub(super) fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    spend(1)?;
    if let Some(found) = own_attribute(value, name)? {
        return Ok(found);
    }
    match value {
        Value::Undefined(whole) => failed(format!("{whole} is undefined, so it has no `{name}`")),
        Value::Dict(dict) => Ok(dict.named(name)?.cloned().unwrap_or_else(|| missing(value, name))),
        _ => Ok(missing(value, name)),
    }
}

fn missing(value: &Value, name: &str) -> Value {
    let name = clipped(name, 60);
    Value::undefined(&format!("`{name}` of {}", value.kind()))
}

/// The attribute that Python finds by `getattr`.
fn own_attribute(value: &Value, name: &str) -> Result<Option<Value>, Error> {
    match value {
        Value::Namespace(namespace) => {
            let fields = namespace.fields.borrow();
            spend(1 + fields.len() / 8)?;
            Ok(fields.iter().find(|(known, _)| **known == *name).map(|(_, value)| value.clone()))
        }
        Value::Loop(_) => methods::of_loop(value, name),
        Value::List(list) if list.kind() == ListKind::Group && matches!(name, "grouper" | "list") => {
            Ok(Some(list[usize::from(name == "list")].clone()))
        }
        Value::Macro(value) if name == "name" => Value::text(&value.definition.name).map(Some),
        _ => Ok(methods::has(value, name).then(|| Value::Method(Rc::new((value.clone(), name.into()))))),
    }
}

/// `value[key]`.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    spend(1)?;
    let found = match value {
        Value::Undefined(whole) => {
            let mut key_text = TextBuilder::default();
            super::written::write_text(key, &mut key_text)?;
            return failed(format!("{whole} is undefined, so it has no `{}`", key_text.as_str()));
        }
        Value::Dict(dict) => dict.get(key)?.cloned(),
        Value::List(list) if list.is_indexed() => {
            key.as_int().and_then(|at| place(at, list.len())).map(|at| list[at].clone())
        }
        Value::Text(text) => match key.as_int() {
            None => None,
            Some(at) => {
                spend_bytes(text.len())?;
                let at = if at < 0 { place(at, text.chars().count()) } else { usize::try_from(at).ok() };
                let character = at.and_then(|at| text.chars().nth(at));
                character.map(|character| Value::text(character.encode_utf8(&mut [0; 4]))).transpose()?
            }
        },
        _ => None,
    };
    match (found, key) {
        (Some(found), _) => Ok(found),
        (None, Value::Text(name)) => Ok(own_attribute(value, name)?.unwrap_or_else(|| missing(value, name))),
        (None, _) => Ok(missing(value, "item")),
    }
}

/// `value['name']`.
pub(super) fn named_item(value: &Value, name: &str) -> Result<Value, Error> {
    match value {
        Value::Dict(dict) => match dict.named(name)? {
            Some(found) => Ok(found.clone()),
            None => Ok(own_attribute(value, name)?.unwrap_or_else(|| missing(value, name))),
        },
        _ => item(value, &Value::text(name)?),
    }
}

/// An index that may be counted from the end.
fn place(at: i128, len: usize) -> Option<usize> {
    let at = if at < 0 { at + len as i128 } else { at };
    usize::try_from(at).ok().filter(|at| *at < len)
}

/// `value[start:stop:step]`.
pub(super) fn slice(value: &Value, bounds: [Option<Value>; 3]) -> Result<Value, Error> {
    let mut numbers = [None; 3];
    for (number, bound) in numbers.iter_mut().zip(&bounds) {
        *number = match bound {
            None | Some(Value::None) => None,
            Some(bound) => match bound.as_int() {
                Some(bound) => Some(bound),
                None => return failed(format!("a slice is given {}", bound.kind())),
            },
        };
    }
    match value {
        Value::Text(text) => {
            spend_bytes(text.len())?;
            let (ends, step) = (text.chars().count(), numbers[2].unwrap_or(1));
            // Slices with step 1, the common case, need no copy of the characters.
            if step == 1 {
                let (start, stop) = span(numbers[0], numbers[1], ends);
                let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
                let (from, to) = (byte(start), byte(stop.max(start)));
                return Value::text(&text[from..to]);
            }
            let characters: Vec<char> = text.chars().collect();
            let mut out = TextBuilder::default();
            places(numbers, characters.len())?.try_for_each(|at| out.push_char(characters[at]))?;
            Ok(out.value())
        }
        Value::List(list) if list.is_indexed() => {
            let mut out = ListBuilder::default();
            places(numbers, list.len())?.try_for_each(|at| out.push(list[at].clone()))?;
            out.value(match list.kind() {
                ListKind::Tuple | ListKind::Group => ListKind::Tuple,
                ListKind::Range(start, _, step) => range_slice(start, step, numbers, list.len()),
                _ => ListKind::List,
            })
        }
        Value::Undefined(whole) => failed(format!("{whole} is undefined, so it has no slice")),
        other => {
            // As in Jinja, slicing other values gives an undefined value.
            Ok(missing(other, "slice"))
        }
    }
}

/// Start and end of a slice with step 1.
fn span(start: Option<i128>, stop: Option<i128>, len: usize) -> (usize, usize) {
    let len = len as i128;
    let clamp = |at: i128| (if at < 0 { at.saturating_add(len) } else { at }).clamp(0, len) as usize;
    (start.map_or(0, clamp), stop.map_or(len as usize, clamp))
}

/// The indices of a slice of `len` items.
fn places(
    [start, stop, step]: [Option<i128>; 3],
    len: usize,
) -> Result<Box<dyn Iterator<Item = usize>>, Error> {
    let step = step.unwrap_or(1);
    if step == 0 {
        return failed("a slice has steps of 0");
    }
    let stride = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
    if step > 0 {
        let (start, stop) = span(start, stop, len);
        return Ok(Box::new((start..stop.max(start)).step_by(stride)));
    }
    let last = len as i128 - 1;
    let clamp = |at: i128| (if at < 0 { at.saturating_add(len as i128) } else { at }).clamp(-1, last);
    let (start, stop) = (start.map_or(last, clamp), stop.map_or(-1, clamp));
    let span = (stop + 1) as usize..(start + 1).max(stop + 1) as usize;
    Ok(Box::new(span.rev().step_by(stride)))
}

/// The kind of a slice of a range, which is again a range.
fn range_slice(start: i128, step: i128, [from, to, stride]: [Option<i128>; 3], len: usize) -> ListKind {
    match stride.unwrap_or(1) {
        1 => {
            let (from, to) = span(from, to, len);
            let at = |place: usize| start.saturating_add(step.saturating_mul(place as i128));
            ListKind::Range(at(from), at(to), step)
        }
        _ => ListKind::List,
    }
}

/// The numbers of `range`.
pub(super) fn range(start: i128, stop: i128, step: i128) -> Result<List, Error> {
    // The limit of Jinja's sandbox.
    const MOST: i128 = 100_000;
    if step == 0 {
        return failed("range has steps of 0");
    }
    let span = if step > 0 { stop.checked_sub(start) } else { start.checked_sub(stop) };
    let count = span.map(|span| span.max(0).unsigned_abs().div_ceil(step.unsigned_abs()));
    let Some(count) = count.and_then(|count| i128::try_from(count).ok()).filter(|count| *count <= MOST)
    else {
        return failed(format!("range has more than {MOST} numbers"));
    };
    let mut numbers = ListBuilder::default();
    for at in 0..count {
        numbers.push(Value::Int(start + at * step))?;
    }
    numbers.list(ListKind::Range(start, stop, step))
}
