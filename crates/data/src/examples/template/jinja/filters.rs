//! Jinja's filters.

use std::cmp::Ordering;

use super::format::percent;
use super::meter::spend_characters;
use super::methods::{capitalized, concatenated, justified, lines_of, pairs, replace, stripped};
use super::operators::{arithmetic, attribute, item, slice};
use super::predicates;
use super::syntax::Operator;
use super::value::{
    DictBuilder, List, ListBuilder, ListKind, TextBuilder, Value, compare, equal, sort_order,
};
use super::written::{repr, text, tojson, write_text};
use super::{Args, Error, failed, is_space};

/// Most digits of a text that is converted to a number, as in Python.
const MOST_DIGITS: usize = 4300;

const NAMES: [&str; 47] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
];

pub(super) fn is_known(name: &str) -> bool {
    NAMES.contains(&name) || name == "wordcount"
}

/// `value | name(...)`.
pub(super) fn apply(value: &Value, name: &str, args: Args) -> Result<Value, Error> {
    match name {
        "map" => return mapped(value, args),
        "select" | "reject" | "selectattr" | "rejectattr" => return selected(value, name, args),
        "format" => {
            let args = match args.named.is_empty() {
                true => Value::list(args.positional, ListKind::Tuple)?,
                false => {
                    let mut named = DictBuilder::default();
                    for (name, value) in args.named {
                        named.set(Value::text(&name)?, value)?;
                    }
                    named.value()?
                }
            };
            return percent(text(value)?.as_str().unwrap_or_default(), &args);
        }
        "tojson" => return tojson(value, args),
        "default" | "d" => {
            let [default, boolean] = args.take(name, ["default_value", "boolean"], 0)?;
            let is_missing = value.is_undefined()
                || (boolean.is_some_and(|boolean| boolean.is_true()) && !value.is_true());
            return if is_missing { default.map_or_else(|| Value::text(""), Ok) } else { Ok(value.clone()) };
        }
        "join" => {
            let [separator, by] = args.take(name, ["d", "attribute"], 0)?;
            return joined(value, separator.unwrap_or(Value::undefined("d")), by);
        }
        "replace" => {
            let [old, new, count] = args.take(name, ["old", "new", "count"], 2)?;
            let [whole, old, new] = [Some(value.clone()), old, new].map(|v| text(&v.unwrap_or(Value::None)));
            let (whole, old, new) = (whole?, old?, new?);
            let str = |value: &'_ Value| value.as_str().unwrap_or_default().to_string();
            return replace(&str(&whole), &str(&old), &str(&new), count.as_ref());
        }
        "trim" => {
            let [chars] = args.take(name, ["chars"], 0)?;
            let whole = text(value)?;
            return Value::text(stripped(whole.as_str().unwrap_or_default(), "strip", chars.as_ref())?);
        }
        "indent" => return indented(value, args),
        "truncate" => return truncated(value, args),
        "center" => {
            let [width] = args.take(name, ["width"], 0)?;
            let args = Args { positional: vec![width.unwrap_or(Value::Int(80))], named: Vec::new() };
            return justified(text(value)?.as_str().unwrap_or_default(), name, args);
        }
        "int" | "float" if value.as_str().is_some_and(|text| text.len() > MOST_DIGITS) => {
            return failed(format!("{name} is given a str of more than {MOST_DIGITS} bytes"));
        }
        "int" => {
            let [default, base] = args.take(name, ["default", "base"], 0)?;
            return Ok(int(value, base.and_then(|base| base.as_int()).unwrap_or(10))
                .map_or(default.unwrap_or(Value::Int(0)), Value::Int));
        }
        "float" => {
            let [default] = args.take(name, ["default"], 0)?;
            return Ok(number(value).map_or(default.unwrap_or(Value::Float(0.0)), Value::Float));
        }
        "round" => return rounded(value, args),
        "attr" => {
            let [of] = args.take(name, ["name"], 1)?;
            return match value {
                Value::Dict(_) => Ok(Value::undefined("attr")),
                _ => attribute(value, of.as_ref().and_then(Value::as_str).unwrap_or_default()),
            };
        }
        "batch" => return batched(value, args),
        "slice" => return sliced(value, args),
        "sum" => {
            let [by, start] = args.take(name, ["attribute", "start"], 0)?;
            let mut sum = start.unwrap_or(Value::Int(0));
            for item in value.items()?.iter() {
                sum = arithmetic(Operator::Add, &sum, &by_attribute(item, by.as_ref(), None)?)?;
            }
            return Ok(sum);
        }
        "min" | "max" => return extreme(value, name, args),
        "sort" => {
            let [reverse, case_sensitive, by] =
                args.take(name, ["reverse", "case_sensitive", "attribute"], 0)?;
            let items = value.items()?;
            let keys = keys(&items, case_sensitive, by)?;
            return sorted(&items, keys, reverse)?.value(ListKind::List);
        }
        "unique" => {
            let [case_sensitive, by] = args.take(name, ["case_sensitive", "attribute"], 0)?;
            let items = value.items()?;
            let (mut seen, mut out): (Vec<Value>, _) = (Vec::new(), ListBuilder::default());
            for (item, key) in items.iter().zip(keys(&items, case_sensitive, by)?) {
                let mut is_new = true;
                for known in &seen {
                    is_new &= !equal(known, &key)?;
                }
                if is_new {
                    seen.push(key);
                    out.push(item.clone())?;
                }
            }
            return out.value(ListKind::Generator);
        }
        "groupby" => return grouped(value, args),
        "dictsort" => return dict_sorted(value, args),
        _ => {}
    }
    args.take::<0>(name, [], 0)?;
    let whole = || text(value);
    match name {
        "string" => whole(),
        "safe" => marked(whole()?.as_str().unwrap_or_default(), true),
        "upper" => Value::text(&whole()?.as_str().unwrap_or_default().to_uppercase()),
        "lower" => Value::text(&whole()?.as_str().unwrap_or_default().to_lowercase()),
        "capitalize" => capitalized(whole()?.as_str().unwrap_or_default()),
        "title" => titled(whole()?.as_str().unwrap_or_default()),
        "escape" | "e" if value.is_safe() => Ok(value.clone()),
        "escape" | "e" | "forceescape" => marked(whole()?.as_str().unwrap_or_default(), false),
        "urlencode" => url_encoded(value),
        "pprint" => repr(value),
        "length" | "count" => value.len().map(|len| Value::Int(len as i128)),
        "wordcount" => {
            let whole = whole()?;
            spend_characters(whole.as_str().map_or(0, str::len))?;
            let is_part = |c: char| c == '_' || c.is_alphanumeric();
            let words =
                whole.as_str().unwrap_or_default().split(|c| !is_part(c)).filter(|word| !word.is_empty());
            Ok(Value::Int(words.count() as i128))
        }
        "first" | "last" if value.as_str().is_some() => {
            item(value, &Value::Int(if name == "first" { 0 } else { -1 }))
        }
        "first" => {
            let items = value.items()?;
            Ok(items.first().cloned().unwrap_or_else(|| Value::undefined("the first of nothing")))
        }
        "last" => match value {
            Value::List(list) if list.kind() == ListKind::Generator => {
                failed("a generator cannot be reversed")
            }
            _ => {
                let items = value.items()?;
                Ok(items.last().cloned().unwrap_or_else(|| Value::undefined("the last of nothing")))
            }
        },
        "list" => Value::list(value.items()?.iter().cloned(), ListKind::List),
        "reverse" => match value {
            Value::Text(_) => slice(value, [None, None, Some(Value::Int(-1))]),
            _ => Value::list(value.items()?.iter().rev().cloned(), ListKind::Generator),
        },
        "items" => match value {
            Value::Dict(dict) => pairs(dict, ListKind::Generator),
            Value::Undefined(_) => Value::list([], ListKind::Generator),
            other => failed(format!("items is given {}, not a dict", other.kind())),
        },
        "abs" => match value {
            Value::Float(number) => Ok(Value::Float(number.abs())),
            other => match other.as_int().and_then(i128::checked_abs) {
                Some(number) => Ok(Value::Int(number)),
                None => failed(format!("abs is given {}", other.kind())),
            },
        },
        other => failed(format!("there is no filter `{other}`")),
    }
}

/// The attribute of a value under a dotted name.
fn by_attribute(value: &Value, by: Option<&Value>, default: Option<&Value>) -> Result<Value, Error> {
    let Some(by) = by.filter(|by| !matches!(by, Value::None)) else { return Ok(value.clone()) };
    let Value::Text(path) = by else { return item(value, by) };
    let mut found = value.clone();
    for part in path.split('.') {
        found = match part.parse::<i128>() {
            Ok(at) if part.bytes().all(|byte| byte.is_ascii_digit()) => item(&found, &Value::Int(at))?,
            _ => item(&found, &Value::text(part)?)?,
        };
        if let (true, Some(default)) = (found.is_undefined(), default) {
            found = default.clone();
        }
    }
    Ok(found)
}

fn mapped(value: &Value, mut args: Args) -> Result<Value, Error> {
    let mut out = ListBuilder::default();
    if args.positional.is_empty() {
        let [by, default] = args.take_named("map", ["attribute", "default"])?;
        if by.is_none() {
            return failed("map is given neither a filter nor an attribute");
        }
        for item in value.items()?.iter() {
            out.push(by_attribute(item, by.as_ref(), default.as_ref())?)?;
        }
    } else {
        let name = args.positional.remove(0);
        let Some(name) = name.as_str() else { return failed("map needs the name of a filter") };
        for item in value.items()?.iter() {
            out.push(apply(item, name, args.clone())?)?;
        }
    }
    out.value(ListKind::Generator)
}

fn selected(value: &Value, name: &str, mut args: Args) -> Result<Value, Error> {
    let mut out = ListBuilder::default();
    if value.is_true() {
        let by = match name.ends_with("attr") {
            false => None,
            true if args.positional.is_empty() => return failed(format!("{name} needs an attribute")),
            true => Some(args.positional.remove(0)),
        };
        let test = if args.positional.is_empty() { None } else { Some(args.positional.remove(0)) };
        for item in value.items()?.iter() {
            let asked = by_attribute(item, by.as_ref(), None)?;
            let holds = match &test {
                None => asked.is_true(),
                Some(test) => predicates::is(&asked, test.as_str().unwrap_or_default(), args.clone())?,
            };
            if holds == name.starts_with("select") {
                out.push(item.clone())?;
            }
        }
    }
    out.value(ListKind::Generator)
}

fn joined(value: &Value, separator: Value, by: Option<Value>) -> Result<Value, Error> {
    let mut out = TextBuilder::default();
    for (at, item) in value.items()?.iter().enumerate() {
        if at > 0 {
            write_text(&separator, &mut out)?;
        }
        write_text(&by_attribute(item, by.as_ref(), None)?, &mut out)?;
    }
    Ok(out.value())
}

fn indented(value: &Value, args: Args) -> Result<Value, Error> {
    let [width, first, blank] = args.take("indent", ["width", "first", "blank"], 0)?;
    if value.as_str().is_none() {
        return failed(format!("indent is given {}", value.kind()));
    }
    let mut indent = TextBuilder::default();
    match &width {
        Some(Value::Text(text)) => indent.push(text)?,
        None => indent.push("    ")?,
        Some(other) => match other.as_int() {
            Some(spaces) => indent.repeat(" ", usize::try_from(spaces.max(0)).unwrap_or(usize::MAX))?,
            None => return failed(format!("indent is given {} as a width", other.kind())),
        },
    }
    let (first, blank) = [first, blank].map(|flag| flag.is_some_and(|flag| flag.is_true())).into();
    let mut out = TextBuilder::default();
    if first {
        out.push(indent.as_str())?;
    }
    // Processes the text with a line break appended, so that a final line break is kept and an empty text is one line.
    let ended = concatenated([value, &Value::text("\n")?].into_iter())?;
    for (at, (line, _)) in lines_of(ended.as_str().unwrap_or_default()).enumerate() {
        if at > 0 {
            out.push("\n")?;
            if blank || !line.is_empty() {
                out.push(indent.as_str())?;
            }
        }
        out.push(line)?;
    }
    Ok(out.value())
}

fn truncated(value: &Value, args: Args) -> Result<Value, Error> {
    let [length, kill_words, end, leeway] =
        args.take("truncate", ["length", "killwords", "end", "leeway"], 0)?;
    let Value::Text(whole) = value else { return failed(format!("truncate is given {}", value.kind())) };
    let length = length.and_then(|length| length.as_int()).unwrap_or(255).max(0) as usize;
    let leeway = leeway.and_then(|leeway| leeway.as_int()).unwrap_or(5).max(0) as usize;
    let end = end.as_ref().and_then(Value::as_str).unwrap_or("...").to_string();
    let ends = end.chars().count();
    if length < ends {
        return failed("truncate is given a length shorter than its end");
    }
    if value.len()? <= length.saturating_add(leeway) {
        return Ok(value.clone());
    }
    let cut = whole.char_indices().nth(length - ends).map_or(&**whole, |(at, _)| &whole[..at]);
    let cut = match kill_words.is_some_and(|kill| kill.is_true()) {
        true => cut,
        false => cut.rsplit_once(' ').map_or(cut, |(before, _)| before),
    };
    let mut out = TextBuilder::default();
    out.push(cut)?;
    out.push(&end)?;
    Ok(out.value())
}

fn int(value: &Value, base: i128) -> Option<i128> {
    let from_float = |value: f64| value.is_finite().then_some(value.trunc() as i128);
    match value {
        Value::Text(text) => {
            let bare = text.trim_matches(is_space).replace('_', "");
            let (sign, digits) = match bare.strip_prefix('-') {
                Some(digits) => (-1, digits),
                None => (1, bare.strip_prefix('+').unwrap_or(&bare)),
            };
            let lower = digits.to_ascii_lowercase();
            let digits = match base {
                16 => lower.strip_prefix("0x").unwrap_or(&lower),
                8 => lower.strip_prefix("0o").unwrap_or(&lower),
                2 => lower.strip_prefix("0b").unwrap_or(&lower),
                _ => &lower,
            };
            let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
            let is_signed = digits.starts_with(['+', '-']);
            let whole =
                i128::from_str_radix(digits, base).ok().filter(|_| !is_signed).map(|whole| sign * whole);
            whole.or_else(|| number(value).and_then(from_float))
        }
        Value::Float(value) => from_float(*value),
        other => other.as_int(),
    }
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Text(text) => {
            let bare = text.trim_matches(is_space);
            let is_number = bare.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '.');
            bare.replace('_', "").parse().ok().filter(|_| is_number)
        }
        other => other.as_float(),
    }
}

fn rounded(value: &Value, args: Args) -> Result<Value, Error> {
    let [precision, method] = args.take("round", ["precision", "method"], 0)?;
    let precision = precision.and_then(|precision| precision.as_int()).unwrap_or(0).clamp(-400, 400) as i32;
    let method = method.as_ref().and_then(Value::as_str).unwrap_or("common").to_string();
    let Some(number) = value.as_float() else { return failed(format!("round is given {}", value.kind())) };
    let scale = 10f64.powi(precision);
    Ok(match method.as_str() {
        "common" => match value.as_int() {
            Some(whole) if precision >= 0 => Value::Int(whole),
            Some(_) => Value::Int(((number * scale).round_ties_even() / scale) as i128),
            None if precision >= 0 => {
                let decimals = precision as usize;
                Value::Float(format!("{number:.decimals$}").parse().unwrap_or(number))
            }
            None => Value::Float((number * scale).round_ties_even() / scale),
        },
        "ceil" => Value::Float((number * scale).ceil() / scale),
        "floor" => Value::Float((number * scale).floor() / scale),
        _ => return failed("round is given a method other than common, ceil and floor"),
    })
}

fn batched(value: &Value, args: Args) -> Result<Value, Error> {
    let [count, fill] = args.take("batch", ["linecount", "fill_with"], 1)?;
    let Some(count) = count.and_then(|count| count.as_int()) else {
        return failed("batch needs a whole number");
    };
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let (mut out, mut line) = (ListBuilder::default(), ListBuilder::default());
    for item in value.items()?.iter() {
        if line.len() == count && line.last().is_some() {
            out.push(std::mem::take(&mut line).value(ListKind::List)?)?;
        }
        line.push(item.clone())?;
    }
    if line.len() > 0 {
        if let Some(fill) = fill.filter(|fill| !matches!(fill, Value::None)) {
            while line.len() < count {
                line.push(fill.clone())?;
            }
        }
        out.push(line.value(ListKind::List)?)?;
    }
    out.value(ListKind::Generator)
}

fn sliced(value: &Value, args: Args) -> Result<Value, Error> {
    let [count, fill] = args.take("slice", ["slices", "fill_with"], 1)?;
    let count = count.and_then(|count| count.as_int()).and_then(|count| usize::try_from(count).ok());
    let Some(count) = count.filter(|count| *count > 0) else {
        return failed("slice needs a number above 0");
    };
    let items = value.items()?;
    let (each, more) = (items.len() / count, items.len() % count);
    let fill = fill.filter(|fill| !matches!(fill, Value::None));
    let mut out = ListBuilder::default();
    for number in 0..count {
        let start = number * each + number.min(more);
        let end = start + each + usize::from(number < more);
        let mut part = ListBuilder::default();
        items[start..end].iter().try_for_each(|item| part.push(item.clone()))?;
        if let Some(fill) = fill.as_ref().filter(|_| number >= more) {
            part.push(fill.clone())?;
        }
        out.push(part.value(ListKind::List)?)?;
    }
    out.value(ListKind::Generator)
}

/// The keys to compare items by: an attribute, lower-cased unless case matters.
fn keys(items: &List, case_sensitive: Option<Value>, by: Option<Value>) -> Result<Vec<Value>, Error> {
    let counts = case_sensitive.is_some_and(|case| case.is_true());
    let folded = |value: Value| match &value {
        Value::Text(text) if !counts => Value::text(&text.to_lowercase()),
        _ => Ok(value),
    };
    let several = match &by {
        Some(Value::Text(path)) if path.contains(',') => {
            path.split(',').map(Value::text).collect::<Result<Vec<_>, _>>()?
        }
        _ => Vec::new(),
    };
    let key = |item: &Value| match several.is_empty() {
        true => folded(by_attribute(item, by.as_ref(), None)?),
        false => {
            let parts = several.iter().map(|by| folded(by_attribute(item, Some(by), None)?));
            Value::list(parts.collect::<Result<Vec<_>, _>>()?, ListKind::Tuple)
        }
    };
    items.iter().map(key).collect()
}

fn sorted(items: &List, keys: Vec<Value>, reverse: Option<Value>) -> Result<ListBuilder, Error> {
    let is_reversed = reverse.is_some_and(|reverse| reverse.is_true());
    let mut out = ListBuilder::default();
    sort_order(&keys, is_reversed)?.into_iter().try_for_each(|at| out.push(items[at].clone()))?;
    Ok(out)
}

fn extreme(value: &Value, name: &str, args: Args) -> Result<Value, Error> {
    let [case_sensitive, by] = args.take(name, ["case_sensitive", "attribute"], 0)?;
    let items = value.items()?;
    let keys = keys(&items, case_sensitive, by)?;
    let mut best: Option<usize> = None;
    for (at, key) in keys.iter().enumerate() {
        let is_better = match best {
            None => true,
            Some(best) => {
                let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
                compare(key, &keys[best])? == Some(wanted)
            }
        };
        if is_better {
            best = Some(at);
        }
    }
    Ok(best.map_or_else(|| Value::undefined("the extreme of nothing"), |best| items[best].clone()))
}

fn grouped(value: &Value, args: Args) -> Result<Value, Error> {
    let [by, default, case_sensitive] =
        args.take("groupby", ["attribute", "default", "case_sensitive"], 1)?;
    let items = value.items()?;
    let mut shown = Vec::new();
    for item in items.iter() {
        shown.push(by_attribute(item, by.as_ref(), default.as_ref())?);
    }
    let shown = Value::list(shown, ListKind::List)?.items()?;
    let folded = keys(&shown, case_sensitive, None)?;
    let places = Value::list((0..items.len()).map(|at| Value::Int(at as i128)), ListKind::List)?;
    let order = sorted(&places.items()?, folded.clone(), None)?.list(ListKind::List)?;
    let mut out = ListBuilder::default();
    let mut group: Option<(usize, ListBuilder)> = None;
    let close = |group: Option<(usize, ListBuilder)>, out: &mut ListBuilder| -> Result<(), Error> {
        let Some((first, members)) = group else { return Ok(()) };
        out.push(Value::list([shown[first].clone(), members.value(ListKind::List)?], ListKind::Group)?)
    };
    for at in order.iter().filter_map(|at| at.as_int()).map(|at| at as usize) {
        let is_same = match &group {
            Some((first, _)) => equal(&folded[*first], &folded[at])?,
            None => false,
        };
        if !is_same {
            close(group.take(), &mut out)?;
            group = Some((at, ListBuilder::default()));
        }
        if let Some((_, members)) = &mut group {
            members.push(items[at].clone())?;
        }
    }
    close(group, &mut out)?;
    out.value(ListKind::List)
}

fn dict_sorted(value: &Value, args: Args) -> Result<Value, Error> {
    let [case_sensitive, by, reverse] = args.take("dictsort", ["case_sensitive", "by", "reverse"], 0)?;
    let Value::Dict(dict) = value else { return failed(format!("dictsort is given {}", value.kind())) };
    let place = match by.as_ref().map_or(Some("key"), Value::as_str) {
        Some("key") => 0,
        Some("value") => 1,
        _ => return failed("dictsort sorts by key or value"),
    };
    let items = pairs(dict, ListKind::List)?.items()?;
    let keys = keys(&items, case_sensitive, Some(Value::Int(place)))?;
    sorted(&items, keys, reverse)?.value(ListKind::List)
}

/// Capitalises every word: words begin after white space, `-` and opening brackets.
fn titled(whole: &str) -> Result<Value, Error> {
    let mut out = TextBuilder::default();
    let mut is_first = true;
    for character in whole.chars() {
        let is_between = is_space(character) || "-({[<".contains(character);
        match is_first && !is_between {
            true => character.to_uppercase().try_for_each(|c| out.push_char(c))?,
            false => character.to_lowercase().try_for_each(|c| out.push_char(c))?,
        }
        is_first = is_between;
    }
    Ok(out.value())
}

/// A text marked as safe HTML or not.
fn marked(whole: &str, is_safe: bool) -> Result<Value, Error> {
    let mut out = TextBuilder::default();
    out.push_safe(whole, is_safe)?;
    Ok(out.value())
}

fn url_encoded(value: &Value) -> Result<Value, Error> {
    if matches!(value, Value::Dict(_) | Value::List(_)) {
        return failed(format!("urlencode is given {}, not a str", value.kind()));
    }
    let mut out = TextBuilder::default();
    for byte in text(value)?.as_str().unwrap_or_default().bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' | b'/' => {
                out.push_char(char::from(byte))?
            }
            other => out.push(&format!("%{other:02X}"))?,
        }
    }
    Ok(out.value())
}
