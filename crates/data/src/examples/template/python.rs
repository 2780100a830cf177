//! Values as Python writes them: `str`, `repr`, `json.dumps` and dates.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// The text that `{{ value }}` prints.
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => repr(value),
        ValueKind::Number => number(value),
        _ => value.to_string(),
    }
}

fn repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            let pairs = keys(value).into_iter().map(|key| {
                let held = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", repr(&key), repr(&held))
            });
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<String> = value.try_iter().into_iter().flatten().map(|item| repr(&item)).collect();
            match (value.is_tuple(), items.as_slice()) {
                (true, [only]) => format!("({only},)"),
                (true, _) => format!("({})", items.join(", ")),
                (false, _) => format!("[{}]", items.join(", ")),
            }
        }
        _ => text(value),
    }
}

fn keys(map: &Value) -> Vec<Value> {
    map.try_iter().into_iter().flatten().collect()
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            same if same == quote => {
                out.push('\\');
                out.push(same);
            }
            control if control.is_control() => {
                let code = u32::from(control);
                let _ = write!(out, "\\x{code:02x}");
            }
            other => out.push(other),
        }
    }
    out.push(quote);
    out
}

/// Whole numbers as they are, others in the shortest form that reads back, with Python's exponents.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    if float.is_nan() {
        return "nan".into();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let written = format!("{float:?}");
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

/// `tojson(value, indent=..., ensure_ascii=..., separators=..., sort_keys=...)`: as `json.dumps` with these arguments.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Value> = options.get("separators")?;
    let indent = match indent {
        None => None,
        Some(indent) => Some(match (indent.as_usize(), indent.as_str()) {
            (Some(spaces), _) if spaces <= 16 => " ".repeat(spaces),
            (None, Some(text)) if text.len() <= 16 => text.to_string(),
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "tojson's indent is no small number")),
        }),
    };
    let [item, key] = match separators {
        None => [if indent.is_some() { "," } else { ", " }.to_string(), ": ".into()],
        Some(pair) => [pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()],
    };
    let writer = Json {
        indent,
        item,
        key,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    writer.write(value, 0, &mut out)?;
    Ok(out)
}

struct Json {
    indent: Option<String>,
    item: String,
    key: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// Deeper values are refused, as Python refuses them.
const DEEPEST: usize = 100;

impl Json {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson was given a value that nests too deeply",
            ));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(match number(value).as_str() {
                "nan" => "NaN",
                "inf" => "Infinity",
                "-inf" => "-Infinity",
                written => written,
            }),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Map => {
                let mut keys = keys(value);
                if self.sort_keys {
                    keys.sort();
                }
                let count = keys.len();
                out.push('{');
                for (at, key) in keys.into_iter().enumerate() {
                    self.between(at, depth + 1, out);
                    match key.as_str() {
                        Some(key) => self.string(key, out),
                        None => self.string(&key.to_string(), out),
                    }
                    out.push_str(&self.key);
                    self.write(&value.get_item(&key)?, depth + 1, out)?;
                }
                self.close(count, depth, out);
                out.push('}');
            }
            ValueKind::Seq | ValueKind::Iterable => {
                out.push('[');
                let mut count = 0;
                for item in value.try_iter()? {
                    self.between(count, depth + 1, out);
                    self.write(&item, depth + 1, out)?;
                    count += 1;
                }
                self.close(count, depth, out);
                out.push(']');
            }
            other => {
                let said = format!("tojson was given something it cannot write ({other})");
                return Err(Error::new(ErrorKind::InvalidOperation, said));
            }
        }
        Ok(())
    }

    fn between(&self, at: usize, depth: usize, out: &mut String) {
        if at > 0 {
            out.push_str(&self.item);
        }
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn close(&self, count: usize, depth: usize, out: &mut String) {
        if let (Some(indent), 1..) = (&self.indent, count) {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                control if control < ' ' || (self.ensure_ascii && !control.is_ascii()) => {
                    for unit in control.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                other => out.push(other),
            }
        }
        out.push('"');
    }
}

/// A day of the Gregorian calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date {
    pub year: u16,
    pub month: u8,
    pub day: u8,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

impl Date {
    /// Reads `2025-01-31`.
    pub fn parse(text: &str) -> Option<Date> {
        let mut parts = text.split('-');
        let mut part = |digits: usize| {
            let part = parts.next().filter(|part| part.len() == digits)?;
            part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse::<u16>().ok())?
        };
        let date = Date { year: part(4)?, month: part(2)? as u8, day: part(2)? as u8 };
        let is_day = (1..=12).contains(&date.month) && (1..=date.month_days()).contains(&date.day);
        (parts.next().is_none() && date.year > 0 && is_day).then_some(date)
    }

    fn is_leap(self) -> bool {
        self.year.is_multiple_of(4) && (!self.year.is_multiple_of(100) || self.year.is_multiple_of(400))
    }

    fn month_days(self) -> u8 {
        match self.month {
            2 if self.is_leap() => 29,
            2 => 28,
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        }
    }

    /// The day of the year, from 1.
    fn year_day(self) -> u16 {
        let before = (1..self.month).map(|month| u16::from(Date { month, ..self }.month_days()));
        before.sum::<u16>() + u16::from(self.day)
    }

    /// Monday is 0.
    fn weekday(self) -> usize {
        let years = u32::from(self.year) - 1;
        let days = years * 365 + years / 4 - years / 100 + years / 400 + u32::from(self.year_day());
        ((days + 6) % 7) as usize
    }

    /// As `strftime` writes midnight of the day. What is no directive stays as it is.
    pub(super) fn formatted(self, format: &str) -> String {
        let mut out = String::new();
        let mut rest = format.chars().peekable();
        while let Some(character) = rest.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let unpadded = rest.next_if_eq(&'-').is_some();
            let two = |value: u16| if unpadded { value.to_string() } else { format!("{value:02}") };
            let (month, day) = (u16::from(self.month), u16::from(self.day));
            let month_name = MONTHS[usize::from(self.month) - 1];
            let written = match rest.next() {
                Some('d') => two(day),
                Some('m') => two(month),
                Some('y') => two(self.year % 100),
                Some('Y') => self.year.to_string(),
                Some('b') => month_name[..3].into(),
                Some('B') => month_name.into(),
                Some('a') => DAYS[self.weekday()][..3].into(),
                Some('A') => DAYS[self.weekday()].into(),
                Some('j') if unpadded => self.year_day().to_string(),
                Some('j') => format!("{:03}", self.year_day()),
                Some('H' | 'M' | 'S') => two(0),
                Some('I') => two(12),
                Some('p') => "AM".into(),
                Some('e') => format!("{day:>2}"),
                Some('F') => format!("{:04}-{month:02}-{day:02}", self.year),
                Some('%') => "%".into(),
                Some(other) => format!("%{other}"),
                None => "%".into(),
            };
            out.push_str(&written);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_strftime_does() {
        let date = Date::parse("2024-02-29").unwrap();
        assert_eq!(
            date.formatted("%A %a %d %B %b %Y %y %m %j %-d %% %H:%M %Q"),
            "Thursday Thu 29 February Feb 2024 24 02 060 29 % 00:00 %Q"
        );
        assert_eq!(Date::parse("2025-01-05").unwrap().formatted("%a %-d %e %F"), "Sun 5  5 2025-01-05");
        for wrong in
            ["2023-02-29", "2024-13-01", "2024-1-01", "24-01-01", "2024-01-00", "2024-01-01-01", "today", ""]
        {
            assert_eq!(Date::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn values_are_written_as_python_does() {
        let list: Value =
            [Value::from(1.0), Value::from(1e16), Value::from(1e-5), Value::from(0.1)].into_iter().collect();
        assert_eq!(text(&list), "[1.0, 1e+16, 1e-05, 0.1]");
        let map = Value::from_pairs([("it's", Value::from(())), ("b\n", Value::from(true))]);
        assert_eq!(text(&map), "{\"it's\": None, 'b\\n': True}");
    }
}
