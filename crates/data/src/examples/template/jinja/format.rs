//! Python's two formatting operations: `'%s' % value` and `'{}'.format(value)`.

use super::operators::{attribute, item};
use super::value::{List, TextBuilder, Value};
use super::written::{float, repr, text};
use super::{Args, Error, failed};

/// Largest width or precision. The standard library accepts 65,535.
const WIDEST: usize = 1 << 15;

/// The parts of a format specification.
#[derive(Debug, Default, Clone)]
struct Layout {
    fill: Option<char>,
    align: Option<char>,
    /// The character before non-negative numbers: `+`, a space, or none.
    sign: Option<char>,
    is_alternate: bool,
    is_zero_padded: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

/// `format % values`.
pub(super) fn percent(format: &str, values: &Value) -> Result<Value, Error> {
    let mut given = Given { values, next: 0 };
    let mut out = TextBuilder::default();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push(&rest[..at])?;
        rest = &rest[at + 1..];
        let mut named = None;
        if let Some(inside) = rest.strip_prefix('(') {
            let Some(end) = inside.find(')') else { return failed("a `%(` has no end") };
            named = Some(&inside[..end]);
            rest = &inside[end + 1..];
        }
        let mut layout = Layout::default();
        while let Some(flag) = rest.chars().next().filter(|flag| "-+ #0".contains(*flag)) {
            match flag {
                '-' => layout.align = Some('<'),
                '+' => layout.sign = Some('+'),
                ' ' if layout.sign.is_none() => layout.sign = Some(' '),
                '#' => layout.is_alternate = true,
                '0' => layout.is_zero_padded = true,
                _ => {}
            }
            rest = &rest[1..];
        }
        if let Some(behind) = rest.strip_prefix('*') {
            let width = given.next()?.as_int().unwrap_or(0);
            if width < 0 {
                layout.align = Some('<');
            }
            layout.width = bounded(width.unsigned_abs())?;
            rest = behind;
        } else {
            (layout.width, rest) = number(rest)?;
        }
        if let Some(behind) = rest.strip_prefix('.') {
            match behind.strip_prefix('*') {
                Some(behind) => {
                    let precision = given.next()?.as_int().unwrap_or(0).max(0);
                    layout.precision = Some(bounded(precision.unsigned_abs())?);
                    rest = behind;
                }
                None => {
                    let (precision, behind) = number(behind)?;
                    layout.precision = Some(precision);
                    rest = behind;
                }
            }
        }
        rest = rest.trim_start_matches(['h', 'l', 'L']);
        let Some(kind) = rest.chars().next() else { return failed("a format ends in the middle of a `%`") };
        rest = &rest[kind.len_utf8()..];
        if kind == '%' {
            out.push("%")?;
            continue;
        }
        let value = match named {
            Some(name) => match values {
                Value::Dict(dict) => match dict.get(&Value::text(name)?)? {
                    Some(value) => value.clone(),
                    None => return failed(format!("`%({name})` names a key that is not there")),
                },
                _ => return failed("`%(name)` needs a dictionary"),
            },
            None => given.next()?,
        };
        if layout.align == Some('<') {
            layout.is_zero_padded = false;
        }
        write_percent(&value, kind, layout, &mut out)?;
    }
    out.push(rest)?;
    match given.is_used_up() {
        true => Ok(out.value()),
        false => failed("a format with `%` is given more values than it takes"),
    }
}

/// The values of a format: the items of a tuple in order, or a single value.
struct Given<'v> {
    values: &'v Value,
    next: usize,
}

impl Given<'_> {
    fn tuple(&self) -> Option<&List> {
        match self.values {
            Value::List(list) if list.is_tuple() => Some(list),
            _ => None,
        }
    }

    fn next(&mut self) -> Result<Value, Error> {
        self.next += 1;
        let value = match self.tuple() {
            Some(list) => list.get(self.next - 1).cloned(),
            None => (self.next == 1).then(|| self.values.clone()),
        };
        value.map_or_else(|| failed("a format with `%` is given fewer values than it takes"), Ok)
    }

    fn is_used_up(&self) -> bool {
        match self.tuple() {
            Some(list) => self.next >= list.len(),
            None => self.next > 0 || matches!(self.values, Value::Dict(_) | Value::List(_)),
        }
    }
}

fn write_percent(value: &Value, kind: char, layout: Layout, out: &mut TextBuilder) -> Result<(), Error> {
    match kind {
        's' | 'r' | 'a' => {
            let written = if kind == 's' { text(value)? } else { repr(value)? };
            let layout = Layout { is_zero_padded: false, align: Some(layout.align.unwrap_or('>')), ..layout };
            write_str(written.as_str().unwrap_or_default(), &layout, out)
        }
        'c' => {
            let character = match value {
                Value::Text(text) if text.chars().nth(1).is_none() => text.chars().next(),
                other => other.as_int().and_then(|code| char::from_u32(u32::try_from(code).ok()?)),
            };
            let Some(character) = character else { return failed("`%c` needs a character") };
            let layout = Layout { is_zero_padded: false, align: Some(layout.align.unwrap_or('>')), ..layout };
            write_str(character.encode_utf8(&mut [0; 4]), &layout, out)
        }
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
            let whole = match value {
                Value::Float(value) if "diu".contains(kind) && value.is_finite() => {
                    Some(value.trunc() as i128)
                }
                other => other.as_int(),
            };
            let Some(whole) = whole else { return failed(format!("`%{kind}` is given {}", value.kind())) };
            let kind = if "iu".contains(kind) { 'd' } else { kind };
            write_whole(whole, &Layout { kind: Some(kind), ..layout }, out)
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => match value.as_float() {
            Some(value) => write_real(value, &Layout { kind: Some(kind), ..layout }, out),
            None => failed(format!("`%{kind}` is given {}", value.kind())),
        },
        other => failed(format!("`%{other}` is not a format")),
    }
}

fn bounded(number: u128) -> Result<usize, Error> {
    match usize::try_from(number).ok().filter(|number| *number <= WIDEST) {
        Some(number) => Ok(number),
        None => Err(Error::Exhausted(format!("it formats with a width of more than {WIDEST}"))),
    }
}

/// The number at the beginning of a text, 0 where there is none, and the rest.
fn number(text: &str) -> Result<(usize, &str), Error> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number = if digits == 0 { 0 } else { text[..digits].parse().unwrap_or(u128::MAX) };
    Ok((bounded(number)?, &text[digits..]))
}

/// `format.format(...)`.
pub(super) fn braces(format: &str, args: &Args) -> Result<Value, Error> {
    let mut out = TextBuilder::default();
    let mut counted = 0;
    write_braces(format, args, &mut counted, 2, &mut out)?;
    Ok(out.value())
}

fn write_braces(
    format: &str,
    args: &Args,
    counted: &mut usize,
    depth: usize,
    out: &mut TextBuilder,
) -> Result<(), Error> {
    let mut rest = format;
    while let Some(at) = rest.find(['{', '}']) {
        out.push(&rest[..at])?;
        let brace = &rest[at..at + 1];
        rest = &rest[at + 1..];
        if let Some(behind) = rest.strip_prefix(brace) {
            out.push(brace)?;
            rest = behind;
            continue;
        }
        if brace == "}" || depth == 0 {
            return failed("a format has a brace that is not expected");
        }
        let mut open = 1;
        let end = rest.char_indices().find(|(_, character)| {
            open += i32::from(*character == '{') - i32::from(*character == '}');
            open == 0
        });
        let Some((end, _)) = end else { return failed("a format has a `{` without an end") };
        let field = &rest[..end];
        rest = &rest[end + 1..];
        let (field, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = match field.split_once('!') {
            Some((name, conversion)) => (name, Some(conversion)),
            None => (field, None),
        };
        let value = field_value(name, args, counted)?;
        let value = match conversion {
            None => value,
            Some("s") => text(&value)?,
            Some("r" | "a") => repr(&value)?,
            Some(other) => return failed(format!("`!{other}` is not a conversion")),
        };
        let mut filled = TextBuilder::default();
        write_braces(spec, args, counted, depth - 1, &mut filled)?;
        write_spec(&value, filled.as_str(), out)?;
    }
    out.push(rest)
}

/// The argument that a replacement field names: `0`, `name`, `name.attribute`, `name[key]`, or the next one.
fn field_value(name: &str, args: &Args, counted: &mut usize) -> Result<Value, Error> {
    let first = name.find(['.', '[']).unwrap_or(name.len());
    let (head, mut rest) = name.split_at(first);
    let positional = |at: usize| {
        args.positional.get(at).cloned().map_or_else(|| failed("a format is given too few values"), Ok)
    };
    let mut value = if head.is_empty() {
        *counted += 1;
        positional(*counted - 1)?
    } else if let Ok(at) = head.parse() {
        positional(at)?
    } else {
        match args.named.iter().find(|(known, _)| known == head) {
            Some((_, value)) => value.clone(),
            None => return failed(format!("a format is given no `{head}`")),
        }
    };
    while !rest.is_empty() {
        if let Some(behind) = rest.strip_prefix('[') {
            let Some((key, behind)) = behind.split_once(']') else {
                return failed("a format has a `[` without an end");
            };
            value = match key.parse::<i128>() {
                Ok(at) => item(&value, &Value::Int(at))?,
                Err(_) => item(&value, &Value::text(key)?)?,
            };
            rest = behind;
        } else {
            let behind = &rest[1..];
            let end = behind.find(['.', '[']).unwrap_or(behind.len());
            value = attribute(&value, &behind[..end])?;
            rest = &behind[end..];
        }
        if value.is_undefined() {
            return failed(format!("a format names `{name}`, which is not there"));
        }
    }
    Ok(value)
}

/// Formats a value by the format specification mini-language.
fn write_spec(value: &Value, spec: &str, out: &mut TextBuilder) -> Result<(), Error> {
    let layout = layout(spec)?;
    match (value, layout.kind) {
        (Value::Int(value), Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%')) => {
            write_real(*value as f64, &layout, out)
        }
        (Value::Int(value), Some('c')) => {
            let character = u32::try_from(*value).ok().and_then(char::from_u32);
            let Some(character) = character else { return failed("`c` needs a character") };
            write_str(character.encode_utf8(&mut [0; 4]), &layout, out)
        }
        (Value::Bool(value), Some(_)) => write_whole(i128::from(*value), &layout, out),
        (Value::Int(value), _) => write_whole(*value, &layout, out),
        (Value::Float(value), _) => write_real(*value, &layout, out),
        (Value::Text(text), None | Some('s')) => write_str(text, &layout, out),
        (other, _) if spec.is_empty() => out.push(text(other)?.as_str().unwrap_or_default()),
        (other, _) => failed(format!("{} has no format `{spec}`", other.kind())),
    }
}

fn layout(spec: &str) -> Result<Layout, Error> {
    let mut layout = Layout::default();
    let mut rest = spec;
    let mut characters = rest.chars();
    let (first, second) = (characters.next(), characters.next());
    let is_align = |c: Option<char>| c.filter(|c| "<>=^".contains(*c));
    if let (Some(fill), Some(align)) = (first, is_align(second)) {
        (layout.fill, layout.align) = (Some(fill), Some(align));
        rest = &rest[fill.len_utf8() + 1..];
    } else if let Some(align) = is_align(first) {
        layout.align = Some(align);
        rest = &rest[1..];
    }
    if let Some(sign) = rest.chars().next().filter(|sign| "+- ".contains(*sign)) {
        layout.sign = Some(sign).filter(|sign| *sign != '-');
        rest = &rest[1..];
    }
    if let Some(behind) = rest.strip_prefix('#') {
        layout.is_alternate = true;
        rest = behind;
    }
    if let Some(behind) = rest.strip_prefix('0') {
        layout.is_zero_padded = layout.align.is_none();
        rest = behind;
    }
    (layout.width, rest) = number(rest)?;
    if let Some(grouping) = rest.chars().next().filter(|grouping| ",_".contains(*grouping)) {
        layout.grouping = Some(grouping);
        rest = &rest[1..];
    }
    if let Some(behind) = rest.strip_prefix('.') {
        let (precision, behind) = number(behind)?;
        layout.precision = Some(precision);
        rest = behind;
    }
    layout.kind = rest.chars().next();
    match rest.chars().count() {
        0 | 1 => Ok(layout),
        _ => failed(format!("`{spec}` is not a format")),
    }
}

fn write_str(text: &str, layout: &Layout, out: &mut TextBuilder) -> Result<(), Error> {
    let cut = match layout.precision {
        Some(most) => text.char_indices().nth(most).map_or(text, |(at, _)| &text[..at]),
        None => text,
    };
    let fill = if layout.is_zero_padded { Some('0') } else { layout.fill };
    padded("", cut, &Layout { align: Some(layout.align.unwrap_or('<')), fill, ..layout.clone() }, out)
}

fn write_whole(value: i128, layout: &Layout, out: &mut TextBuilder) -> Result<(), Error> {
    let digits = value.unsigned_abs();
    let (prefix, digits) = match layout.kind {
        None | Some('d' | 'n') => ("", digits.to_string()),
        Some('x') => ("0x", format!("{digits:x}")),
        Some('X') => ("0X", format!("{digits:X}")),
        Some('o') => ("0o", format!("{digits:o}")),
        Some('b') => ("0b", format!("{digits:b}")),
        Some(other) => return failed(format!("an int has no format `{other}`")),
    };
    let digits = match layout.precision {
        Some(least) if digits.len() < least => format!("{}{digits}", "0".repeat(least - digits.len())),
        _ => digits,
    };
    let prefix = if layout.is_alternate { prefix } else { "" };
    let head = format!("{}{prefix}", sign(value < 0, layout));
    padded(&head, &grouped(&digits, layout.grouping), layout, out)
}

fn write_real(value: f64, layout: &Layout, out: &mut TextBuilder) -> Result<(), Error> {
    let magnitude = value.abs();
    let precision = layout.precision.unwrap_or(6);
    let written = match layout.kind {
        _ if !magnitude.is_finite() => float(magnitude),
        Some('f' | 'F') => format!("{magnitude:.precision$}"),
        Some('%') => format!("{:.precision$}%", magnitude * 100.0),
        Some('e' | 'E') => exponent(magnitude, precision),
        Some('g' | 'G') => general(magnitude, precision, layout.is_alternate),
        None => match layout.precision {
            None => float(magnitude),
            Some(precision) => {
                let written = general(magnitude, precision, false);
                let is_plain = written.contains(['.', 'e']);
                if is_plain { written } else { written + ".0" }
            }
        },
        Some(other) => return failed(format!("a float has no format `{other}`")),
    };
    let written = if matches!(layout.kind, Some('E' | 'F' | 'G')) { written.to_uppercase() } else { written };
    let whole = written.find(|c: char| !c.is_ascii_digit()).unwrap_or(written.len());
    let written = grouped(&written[..whole], layout.grouping) + &written[whole..];
    padded(&sign(value.is_sign_negative() && !value.is_nan(), layout), &written, layout, out)
}

fn sign(is_negative: bool, layout: &Layout) -> String {
    match is_negative {
        true => "-".into(),
        false => layout.sign.map(String::from).unwrap_or_default(),
    }
}

/// `1.25e+06`.
fn exponent(value: f64, precision: usize) -> String {
    let written = format!("{value:.precision$e}");
    let (digits, exponent) = written.split_once('e').unwrap_or((&written, "0"));
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

/// As `%g`: `precision` significant digits, in the shorter of the two notations.
fn general(value: f64, precision: usize, keeps_zeros: bool) -> String {
    let precision = precision.max(1);
    let scientific = exponent(value, precision - 1);
    let power: i64 = scientific.split_once('e').and_then(|(_, power)| power.parse().ok()).unwrap_or(0);
    let trimmed = |digits: &str| match digits.contains('.') && !keeps_zeros {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => digits.to_string(),
    };
    if power < -4 || power >= precision as i64 {
        let (digits, power) = scientific.split_once('e').unwrap_or((&scientific, "+00"));
        return format!("{}e{power}", trimmed(digits));
    }
    let decimals = (precision as i64 - 1 - power).max(0) as usize;
    trimmed(&format!("{value:.decimals$}"))
}

fn grouped(digits: &str, grouping: Option<char>) -> String {
    let Some(mark) = grouping.filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit())) else {
        return digits.into();
    };
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(mark);
        }
        out.push(digit);
    }
    out
}

/// Writes a head (a sign or a prefix) and a body, padded to the width.
fn padded(head: &str, body: &str, layout: &Layout, out: &mut TextBuilder) -> Result<(), Error> {
    let missing = layout.width.saturating_sub(head.chars().count() + body.chars().count());
    let fill = layout.fill.unwrap_or(if layout.is_zero_padded { '0' } else { ' ' });
    let fill = fill.to_string();
    let align = layout.align.unwrap_or(if layout.is_zero_padded { '=' } else { '>' });
    let (before, inside, behind) = match align {
        '<' => (0, 0, missing),
        '^' => (missing / 2, 0, missing - missing / 2),
        '=' => (0, missing, 0),
        _ => (missing, 0, 0),
    };
    out.repeat(&fill, before)?;
    out.push(head)?;
    out.repeat(&fill, inside)?;
    out.push(body)?;
    out.repeat(&fill, behind)
}
