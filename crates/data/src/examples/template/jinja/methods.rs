//! Methods of strings, lists, dictionaries and loops, as in Python and Jinja.

use super::format::braces;
use super::meter::spend_bytes;
use super::value::{Dict, List, ListBuilder, ListKind, LoopState, Text, TextBuilder, Value, equal};
use super::written::{write_repr, write_text};
use super::{Args, Error, failed, is_space};

const OF_TEXT: [&str; 40] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
];
const MORE_OF_TEXT: [&str; 3] = ["title", "upper", "zfill"];
const OF_DICT: [&str; 5] = ["copy", "get", "items", "keys", "values"];
const OF_LIST: [&str; 3] = ["copy", "count", "index"];

/// Whether a value has a method of that name.
pub(super) fn has(value: &Value, name: &str) -> bool {
    match value {
        Value::Text(_) => OF_TEXT.contains(&name) || MORE_OF_TEXT.contains(&name),
        Value::Dict(_) => OF_DICT.contains(&name),
        Value::List(list) if list.kind() == ListKind::List => OF_LIST.contains(&name),
        Value::List(list) if list.is_indexed() => OF_LIST[1..].contains(&name),
        Value::Float(_) | Value::Int(_) => name == "is_integer",
        _ => false,
    }
}

pub(super) fn call(value: &Value, name: &str, args: Args) -> Result<Value, Error> {
    match value {
        Value::Text(text) => of_text(text, name, args),
        Value::Dict(dict) => of_dict(dict, name, args),
        Value::List(list) => of_list(list, name, args),
        Value::Float(number) => {
            args.take::<0>(name, [], 0)?;
            Ok(Value::Bool(number.is_finite() && number.fract() == 0.0))
        }
        Value::Int(_) => {
            args.take::<0>(name, [], 0)?;
            Ok(Value::Bool(true))
        }
        Value::Loop(state) => loop_call(state, name, args),
        other => failed(format!("{} has no method `{name}`", other.kind())),
    }
}

fn of_text(text: &Text, name: &str, args: Args) -> Result<Value, Error> {
    spend_bytes(text.len())?;
    let is_all = |is: fn(char) -> bool| Value::Bool(!text.is_empty() && text.chars().all(is));
    match name {
        "format" => return braces(text, &args),
        "format_map" => {
            let [map] = args.take(name, ["mapping"], 1)?;
            let Some(Value::Dict(map)) = map else { return failed("format_map needs a dictionary") };
            let named =
                map.iter().map(|(key, value)| (key.as_str().unwrap_or_default().to_string(), value.clone()));
            return braces(text, &Args { positional: Vec::new(), named: named.collect() });
        }
        "count" | "find" | "rfind" | "index" | "rindex" | "startswith" | "endswith" => {
            return searched(text, name, args);
        }
        "split" | "rsplit" => return split(text, name, args),
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.take(name, ["chars"], 0)?;
            return Value::text(stripped(text, name, chars.as_ref())?);
        }
        "replace" => {
            let [old, new, count] = args.take(name, ["old", "new", "count"], 2)?;
            return replace(text, string(&old, name)?, string(&new, name)?, count.as_ref());
        }
        "join" => {
            let [items] = args.take(name, ["iterable"], 1)?;
            let mut out = TextBuilder::default();
            for (at, item) in items.unwrap_or(Value::None).items()?.iter().enumerate() {
                let Value::Text(item) = item else {
                    return failed(format!("join is given {}, not a str", item.kind()));
                };
                if at > 0 {
                    out.push(text)?;
                }
                out.push(item)?;
            }
            return Ok(out.value());
        }
        "partition" | "rpartition" => {
            let [separator] = args.take(name, ["sep"], 1)?;
            let separator = string(&separator, name)?;
            if separator.is_empty() {
                return failed("an empty separator");
            }
            let found = if name == "partition" { text.find(separator) } else { text.rfind(separator) };
            let parts = match found {
                Some(at) => [&text[..at], separator, &text[at + separator.len()..]],
                None if name == "partition" => [&**text, "", ""],
                None => ["", "", &**text],
            };
            return tuple(parts);
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = args.take(name, ["affix"], 1)?;
            let affix = string(&affix, name)?;
            let bare =
                if name == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            return Value::text(bare.unwrap_or(text));
        }
        "splitlines" => {
            let [keep] = args.take(name, ["keepends"], 0)?;
            let keep = keep.is_some_and(|keep| keep.is_true());
            let mut lines = ListBuilder::default();
            for (line, end) in lines_of(text) {
                lines.push(Value::text(&if keep { format!("{line}{end}") } else { line.to_string() })?)?;
            }
            return lines.value(ListKind::List);
        }
        "center" | "ljust" | "rjust" | "zfill" => return justified(text, name, args),
        "expandtabs" => {
            let [size] = args.take(name, ["tabsize"], 0)?;
            return expanded(text, size.and_then(|size| size.as_int()).unwrap_or(8));
        }
        _ => {}
    }
    args.take::<0>(name, [], 0)?;
    Ok(match name {
        "upper" => Value::text(&text.to_uppercase())?,
        "lower" | "casefold" => Value::text(&text.to_lowercase())?,
        "capitalize" => capitalized(text)?,
        "title" => titled(text)?,
        "swapcase" => {
            let mut out = TextBuilder::default();
            for character in text.chars() {
                match character.is_uppercase() {
                    true => character.to_lowercase().try_for_each(|c| out.push_char(c))?,
                    false => character.to_uppercase().try_for_each(|c| out.push_char(c))?,
                }
            }
            out.value()
        }
        "isalnum" => is_all(char::is_alphanumeric),
        "isalpha" => is_all(char::is_alphabetic),
        "isascii" => Value::Bool(text.is_ascii()),
        "isdecimal" | "isdigit" | "isnumeric" => is_all(char::is_numeric),
        "isspace" => is_all(is_space),
        "isidentifier" => {
            let is_part = |c: char| c == '_' || c.is_alphanumeric();
            let begins = text.chars().next().is_some_and(|c| c == '_' || c.is_alphabetic());
            Value::Bool(begins && text.chars().all(is_part))
        }
        "islower" => Value::Bool(has_case(text, char::is_lowercase, char::is_uppercase)),
        "isupper" => Value::Bool(has_case(text, char::is_uppercase, char::is_lowercase)),
        "istitle" => {
            let is_titled = titled(text)?.as_str() == Some(&**text);
            Value::Bool(is_titled && text.chars().any(char::is_uppercase))
        }
        other => return failed(format!("a str has no method `{other}`")),
    })
}

pub(super) fn has_case(text: &str, wanted: fn(char) -> bool, other: fn(char) -> bool) -> bool {
    text.chars().any(wanted) && !text.chars().any(other)
}

fn string<'v>(value: &'v Option<Value>, of: &str) -> Result<&'v str, Error> {
    match value {
        Some(Value::Text(text)) => Ok(text),
        other => {
            let kind = other.as_ref().map_or("nothing", Value::kind);
            failed(format!("{of} is given {kind}, not a str"))
        }
    }
}

fn tuple<'t>(parts: impl IntoIterator<Item = &'t str>) -> Result<Value, Error> {
    let mut items = ListBuilder::default();
    for part in parts {
        items.push(Value::text(part)?)?;
    }
    items.value(ListKind::Tuple)
}

/// Lines with their ends, by every line boundary that Python knows.
pub(super) fn lines_of(text: &str) -> impl Iterator<Item = (&str, &str)> {
    const ENDS: [char; 10] =
        ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some(at) = rest.find(ENDS) else { return Some((std::mem::take(&mut rest), "")) };
        let line = &rest[..at];
        let end = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(0, char::len_utf8)
        };
        let ending = &rest[at..at + end];
        rest = &rest[at + end..];
        Some((line, ending))
    })
}

pub(super) fn stripped<'t>(text: &'t str, name: &str, chars: Option<&Value>) -> Result<&'t str, Error> {
    let chars: Option<Vec<char>> = match chars {
        None | Some(Value::None) => None,
        Some(Value::Text(chars)) => Some(chars.chars().collect()),
        Some(other) => return failed(format!("{name} is given {}, not a str", other.kind())),
    };
    spend_bytes(text.len().saturating_mul(chars.as_ref().map_or(1, Vec::len)))?;
    let is_taken = |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(&c));
    let text = if name == "rstrip" { text } else { text.trim_start_matches(is_taken) };
    Ok(if name == "lstrip" { text } else { text.trim_end_matches(is_taken) })
}

pub(super) fn replace(text: &str, old: &str, new: &str, count: Option<&Value>) -> Result<Value, Error> {
    let count = match count {
        None | Some(Value::None) => -1,
        Some(count) => match count.as_int() {
            Some(count) => count,
            None => return failed(format!("replace is given {} as a count", count.kind())),
        },
    };
    let most = usize::try_from(count).unwrap_or(usize::MAX);
    let mut out = TextBuilder::default();
    let mut last = 0;
    for (at, found) in text.match_indices(old).take(most) {
        out.push(&text[last..at])?;
        out.push(new)?;
        last = at + found.len();
    }
    out.push(&text[last..])?;
    Ok(out.value())
}

fn searched(text: &str, name: &str, args: Args) -> Result<Value, Error> {
    let [what, start, end] = args.take(name, ["sub", "start", "end"], 1)?;
    let within = |bound: Option<Value>| bound.filter(|bound| !matches!(bound, Value::None));
    let (start, end) = (within(start), within(end));
    let (mut before, mut part) = (0, text);
    if start.is_some() || end.is_some() {
        let count = text.chars().count() as i128;
        let place = |bound: Option<Value>, default: i128| {
            let at = bound.and_then(|bound| bound.as_int()).unwrap_or(default);
            (if at < 0 { at + count } else { at }).clamp(0, count) as usize
        };
        let (start, end) = (place(start, 0), place(end, count));
        let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
        before = start;
        part = &text[byte(start)..byte(end.max(start))];
    }
    if let "startswith" | "endswith" = name {
        let is_there = |affix: &Value| match affix {
            Value::Text(affix) => {
                spend_bytes(affix.len())?;
                Ok(if name == "startswith" { part.starts_with(&**affix) } else { part.ends_with(&**affix) })
            }
            other => failed(format!("{name} is given {}, not a str", other.kind())),
        };
        let what = what.unwrap_or(Value::None);
        if let Value::List(affixes) = &what
            && affixes.is_tuple()
        {
            for affix in affixes.iter() {
                if is_there(affix)? {
                    return Ok(Value::Bool(true));
                }
            }
            return Ok(Value::Bool(false));
        }
        return is_there(&what).map(Value::Bool);
    }
    let what = string(&what, name)?;
    if name == "count" {
        return Ok(Value::Int(part.matches(what).count() as i128));
    }
    let found = if name.starts_with('r') { part.rfind(what) } else { part.find(what) };
    match found {
        Some(at) => Ok(Value::Int((before + part[..at].chars().count()) as i128)),
        None if name.ends_with("index") => failed(format!("{name} does not find the part")),
        None => Ok(Value::Int(-1)),
    }
}

fn split(text: &str, name: &str, args: Args) -> Result<Value, Error> {
    let [separator, most] = args.take(name, ["sep", "maxsplit"], 0)?;
    let most = most.map_or(Some(-1), |most| most.as_int());
    let Some(most) = most else { return failed(format!("{name} needs a whole number as maxsplit")) };
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let from_end = name == "rsplit";
    let pieces = most.saturating_add(1);
    let mut parts = ListBuilder::default();
    let mut push = |part: &str| parts.push(Value::text(part)?);
    match &separator {
        None | Some(Value::None) => split_at_space(text, most, from_end, push)?,
        Some(Value::Text(separator)) if separator.is_empty() => {
            return failed(format!("{name} is given an empty separator"));
        }
        Some(Value::Text(separator)) if from_end => text.rsplitn(pieces, &**separator).try_for_each(push)?,
        Some(Value::Text(separator)) => text.splitn(pieces, &**separator).try_for_each(&mut push)?,
        Some(other) => return failed(format!("{name} is given {}, not a str", other.kind())),
    }
    if from_end {
        parts.reverse();
    }
    parts.value(ListKind::List)
}

/// Yields the words between runs of white space, the last first where `from_end`. After `most` words, the rest is one word.
fn split_at_space<'t>(
    text: &'t str,
    most: usize,
    from_end: bool,
    mut push: impl FnMut(&'t str) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut rest = text.trim_matches(is_space);
    let mut count = 0;
    while !rest.is_empty() {
        if count == most {
            // The white space at the far end stays, as in Python.
            return push(match from_end {
                true => text[..text.len() - text.trim_start_matches(is_space).len() + rest.len()]
                    .trim_end_matches(is_space),
                false => &text[text.trim_end_matches(is_space).len() - rest.len()..],
            });
        }
        let (part, behind) = match from_end {
            true => match rest.rfind(is_space) {
                Some(at) => {
                    let width = rest[at..].chars().next().map_or(1, char::len_utf8);
                    (&rest[at + width..], rest[..at].trim_end_matches(is_space))
                }
                None => (rest, ""),
            },
            false => match rest.find(is_space) {
                Some(at) => (&rest[..at], rest[at..].trim_start_matches(is_space)),
                None => (rest, ""),
            },
        };
        push(part)?;
        count += 1;
        rest = behind;
    }
    Ok(())
}

pub(super) fn justified(text: &str, name: &str, args: Args) -> Result<Value, Error> {
    let [width, fill] = args.take(name, ["width", "fillchar"], 1)?;
    let Some(width) = width.and_then(|width| width.as_int()) else {
        return failed(format!("{name} needs a whole number as a width"));
    };
    let fill = match &fill {
        None => " ",
        Some(fill) => match fill.as_str().filter(|fill| fill.chars().count() == 1) {
            Some(fill) => fill,
            None => return failed(format!("{name} needs a single character as fill")),
        },
    };
    let count = text.chars().count();
    let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
    let missing = width.saturating_sub(count);
    let mut out = TextBuilder::default();
    match name {
        "zfill" => {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            out.push(sign)?;
            out.repeat("0", missing)?;
            out.push(digits)?;
        }
        "ljust" => {
            out.push(text)?;
            out.repeat(fill, missing)?;
        }
        "rjust" => {
            out.repeat(fill, missing)?;
            out.push(text)?;
        }
        _ => {
            // Python puts the extra character on the left where the width is odd.
            let before = missing / 2 + (missing & width & 1);
            out.repeat(fill, before)?;
            out.push(text)?;
            out.repeat(fill, missing - before)?;
        }
    }
    Ok(out.value())
}

fn expanded(text: &str, size: i128) -> Result<Value, Error> {
    let size = usize::try_from(size.max(0)).unwrap_or(usize::MAX);
    let mut out = TextBuilder::default();
    let mut column = 0;
    for character in text.chars() {
        match character {
            '\t' if size > 0 => {
                let spaces = size - column % size;
                out.repeat(" ", spaces)?;
                column += spaces;
            }
            '\t' => {}
            '\n' | '\r' => {
                out.push_char(character)?;
                column = 0;
            }
            other => {
                out.push_char(other)?;
                column += 1;
            }
        }
    }
    Ok(out.value())
}

pub(super) fn capitalized(text: &str) -> Result<Value, Error> {
    let mut out = TextBuilder::default();
    let mut characters = text.chars();
    if let Some(first) = characters.next() {
        first.to_uppercase().try_for_each(|c| out.push_char(c))?;
    }
    out.push(&characters.as_str().to_lowercase())?;
    Ok(out.value())
}

fn titled(text: &str) -> Result<Value, Error> {
    let mut out = TextBuilder::default();
    let mut is_inside = false;
    for character in text.chars() {
        let is_cased = character.is_lowercase() || character.is_uppercase();
        match is_inside {
            true => character.to_lowercase().try_for_each(|c| out.push_char(c))?,
            false => character.to_uppercase().try_for_each(|c| out.push_char(c))?,
        }
        is_inside = is_cased;
    }
    Ok(out.value())
}

fn of_dict(dict: &Dict, name: &str, args: Args) -> Result<Value, Error> {
    if name == "get" {
        let [key, default] = args.take(name, ["key", "default"], 1)?;
        let found = dict.get(&key.unwrap_or(Value::None))?.cloned();
        return Ok(found.or(default).unwrap_or(Value::None));
    }
    args.take::<0>(name, [], 0)?;
    match name {
        "keys" => Value::list(dict.iter().map(|(key, _)| key.clone()), ListKind::View("keys")),
        "values" => Value::list(dict.iter().map(|(_, value)| value.clone()), ListKind::View("values")),
        "items" => pairs(dict, ListKind::View("items")),
        _ => Ok(Value::Dict(dict.clone())),
    }
}

/// The pairs of a dictionary, each a tuple.
pub(super) fn pairs(dict: &Dict, kind: ListKind) -> Result<Value, Error> {
    let mut pairs = ListBuilder::default();
    for (key, value) in dict.iter() {
        pairs.push(Value::list([key.clone(), value.clone()], ListKind::Tuple)?)?;
    }
    pairs.value(kind)
}

fn of_list(list: &List, name: &str, args: Args) -> Result<Value, Error> {
    if name == "copy" {
        args.take::<0>(name, [], 0)?;
        return Ok(Value::List(list.clone()));
    }
    let [what] = args.take(name, ["value"], 1)?;
    let what = what.unwrap_or(Value::None);
    let mut count = 0;
    for (at, item) in list.iter().enumerate() {
        if equal(item, &what)? {
            if name == "index" {
                return Ok(Value::Int(at as i128));
            }
            count += 1;
        }
    }
    match name {
        "index" => failed("index does not find the value"),
        _ => Ok(Value::Int(count)),
    }
}

/// The attribute of a loop.
pub(super) fn of_loop(value: &Value, name: &str) -> Result<Option<Value>, Error> {
    let Value::Loop(state) = value else { return Ok(None) };
    let (at, count) = (state.at.get(), state.items.len());
    let whole = |number: usize| Value::Int(number as i128);
    let neighbour = |at: Option<usize>, what: &str| {
        at.and_then(|at| state.items.get(at)).cloned().unwrap_or_else(|| Value::undefined(what))
    };
    Ok(Some(match name {
        "index" => whole(at + 1),
        "index0" => whole(at),
        "revindex" => whole(count - at),
        "revindex0" => whole(count - at - 1),
        "first" => Value::Bool(at == 0),
        "last" => Value::Bool(at + 1 == count),
        "length" => whole(count),
        "depth" => whole(state.depth + 1),
        "depth0" => whole(state.depth),
        "previtem" => neighbour(at.checked_sub(1), "loop.previtem"),
        "nextitem" => neighbour(at.checked_add(1), "loop.nextitem"),
        "cycle" | "changed" => Value::Method(std::rc::Rc::new((value.clone(), name.into()))),
        _ => return Ok(None),
    }))
}

fn loop_call(state: &LoopState, name: &str, args: Args) -> Result<Value, Error> {
    let values = args.only_positional(name)?;
    match name {
        "cycle" if values.is_empty() => failed("loop.cycle is given nothing"),
        "cycle" => Ok(values[state.at.get() % values.len()].clone()),
        "changed" => {
            let mut written = TextBuilder::default();
            values.iter().try_for_each(|value| write_repr(value, 0, &mut written))?;
            let before = state.seen.replace(Some(written.text()));
            let seen = state.seen.borrow();
            Ok(Value::Bool(before.as_deref() != seen.as_deref()))
        }
        other => failed(format!("a loop has no method `{other}`")),
    }
}

/// Converts everything to text and concatenates it.
pub(super) fn concatenated<'v>(values: impl Iterator<Item = &'v Value>) -> Result<Value, Error> {
    let mut out = TextBuilder::default();
    for value in values {
        write_text(value, &mut out)?;
    }
    Ok(out.value())
}
