//! Splits a template into tokens: the text between tags, with white space trimmed as the tags say, and the words inside them.

use super::{Error, is_space, syntax_error};

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// Text outside tags.
    Data(String),
    PrintBegin,
    PrintEnd,
    BlockBegin,
    BlockEnd,
    Name(String),
    Text(String),
    Int(i128),
    Float(f64),
    Symbol(&'static str),
    End,
}

/// Longest name in bytes: comparing and copying a name counts as one instruction.
const LONGEST_NAME: usize = 200;

/// Longer symbols first, so that the longest match wins.
const SYMBOLS: [&str; 25] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "<", ">", "=", ".", ":", "|", ",", ";",
    "(", ")", "[", "]", "{",
];

pub(super) fn lex(source: &str) -> Result<Vec<(Token, u32)>, Error> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { source, at: 0, line: 1, counted: 0, tokens: Vec::new(), begins_line: true };
    while lexer.at < source.len() {
        lexer.data_and_tag()?;
    }
    lexer.push(Token::End);
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    /// The line of the offset `counted`.
    line: u32,
    counted: usize,
    tokens: Vec<(Token, u32)>,
    /// Whether the last tag removed the line break after it.
    begins_line: bool,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn line_here(&mut self) -> u32 {
        self.line += self.source[self.counted..self.at].matches('\n').count() as u32;
        self.counted = self.at;
        self.line
    }

    fn push(&mut self, token: Token) {
        let line = self.line_here();
        self.tokens.push((token, line));
    }

    fn wrong<T>(&mut self, message: impl Into<String>) -> Result<T, Error> {
        let line = self.line_here();
        Err(syntax_error(message.into(), line))
    }

    /// The text up to the next tag, and the tag.
    fn data_and_tag(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        let opening = rest
            .match_indices('{')
            .find(|(at, _)| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')));
        let Some((at, _)) = opening else {
            self.data(rest);
            self.at = self.source.len();
            return Ok(());
        };
        let (text, kind) = (&rest[..at], rest.as_bytes()[at + 1]);
        let sign = rest.as_bytes().get(at + 2).copied().filter(|sign| matches!(sign, b'-' | b'+'));
        let text = self.before_tag(text, sign, kind == b'{');
        self.data(text);
        self.at += at + 2 + usize::from(sign.is_some());
        match kind {
            b'#' => self.comment(),
            b'{' => self.tag(Token::PrintBegin, Token::PrintEnd, "}}"),
            _ => match raw_begin(self.rest()) {
                Some(bytes) => {
                    self.at += bytes;
                    self.raw()
                }
                None => self.tag(Token::BlockBegin, Token::BlockEnd, "%}"),
            },
        }
    }

    fn data(&mut self, text: &str) {
        if !text.is_empty() {
            self.push(Token::Data(text.into()));
        }
    }

    /// The text before a tag, trimmed: `-` removes all white space, and a block that comes first in its line removes the white
    /// space before it in the line, unless it has a `+`.
    fn before_tag<'t>(&self, text: &'t str, sign: Option<u8>, is_print: bool) -> &'t str {
        match sign {
            Some(b'-') => text.trim_end_matches(is_space),
            Some(_) => text,
            None if is_print => text,
            None => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let is_first = line > 0 || self.begins_line;
                if is_first && text[line..].chars().all(is_space) { &text[..line] } else { text }
            }
        }
    }

    /// Skips the end of a tag, which `sign` preceded, and the white space that it removes.
    fn after_tag(&mut self, sign: Option<u8>, is_print: bool) {
        let before = self.at;
        match sign {
            Some(b'-') => {
                let rest = self.rest();
                self.at += rest.len() - rest.trim_start_matches(is_space).len();
            }
            None if !is_print && self.rest().starts_with('\n') => self.at += 1,
            _ => {}
        }
        self.begins_line = self.source[before..self.at].ends_with('\n');
    }

    fn comment(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        let Some(at) = rest.find("#}") else { return self.wrong("a comment has no end") };
        let sign = rest[..at].bytes().next_back().filter(|sign| matches!(sign, b'-' | b'+'));
        self.at += at + 2;
        self.after_tag(sign, false);
        Ok(())
    }

    /// The text of `{% raw %}`, up to its end.
    fn raw(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        for (at, _) in rest.match_indices("{%") {
            let inside = &rest[at + 2..];
            let sign = inside.bytes().next().filter(|sign| matches!(sign, b'-' | b'+'));
            let inside = inside[usize::from(sign.is_some())..].trim_start_matches(is_space);
            let Some(inside) = inside.strip_prefix("endraw") else { continue };
            let inside = inside.trim_start_matches(is_space);
            let close = inside.bytes().next().filter(|close| matches!(close, b'-' | b'+'));
            if !inside[usize::from(close.is_some())..].starts_with("%}") {
                continue;
            }
            let text = self.before_tag(&rest[..at], sign, false);
            self.data(text);
            self.at += rest.len() - inside.len() + usize::from(close.is_some()) + 2;
            self.after_tag(close, false);
            return Ok(());
        }
        self.wrong("`raw` has no `endraw`")
    }

    fn tag(&mut self, begin: Token, end: Token, closing: &str) -> Result<(), Error> {
        let is_print = begin == Token::PrintBegin;
        self.push(begin);
        let mut open: Vec<&str> = Vec::new();
        loop {
            let rest = self.rest();
            let rest = rest.trim_start_matches(is_space);
            self.at = self.source.len() - rest.len();
            let Some(first) = rest.chars().next() else { return self.wrong("a tag has no end") };
            if open.is_empty() {
                let sign = rest.bytes().next().filter(|sign| *sign == b'-' || (*sign == b'+' && !is_print));
                let signed = sign.filter(|_| rest[1..].starts_with(closing));
                if signed.is_some() || rest.starts_with(closing) {
                    self.push(end);
                    self.at += usize::from(signed.is_some()) + 2;
                    self.after_tag(signed, is_print);
                    return Ok(());
                }
            }
            if first.is_ascii_digit() {
                self.number()?;
            } else if first == '\'' || first == '"' {
                self.string(first)?;
            } else if first == '_' || first.is_alphabetic() {
                let is_part = |c: char| c == '_' || c.is_alphanumeric();
                let len = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
                if len > LONGEST_NAME {
                    return self.wrong(format!("a name has more than {LONGEST_NAME} bytes"));
                }
                self.push(Token::Name(rest[..len].into()));
                self.at += len;
            } else {
                let symbol = SYMBOLS.into_iter().chain(["}"]).find(|symbol| rest.starts_with(symbol));
                let Some(symbol) = symbol else {
                    return self.wrong(format!("unexpected character {first:?}"));
                };
                match symbol {
                    "(" | "[" | "{" => open.push(symbol),
                    ")" | "]" | "}" => {
                        let wanted = match symbol {
                            ")" => "(",
                            "]" => "[",
                            _ => "{",
                        };
                        if open.pop() != Some(wanted) {
                            return self.wrong(format!("unexpected `{symbol}`"));
                        }
                    }
                    _ => {}
                }
                self.push(Token::Symbol(symbol));
                self.at += symbol.len();
            }
        }
    }

    fn number(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        let digits = |from: usize, is_digit: fn(&u8) -> bool| {
            let more = rest.as_bytes()[from..].iter().take_while(|byte| is_digit(byte) || **byte == b'_');
            from + more.count()
        };
        let prefixed = [("0x", 16), ("0o", 8), ("0b", 2)].into_iter();
        let lower = rest.get(..2).unwrap_or_default().to_ascii_lowercase();
        let (end, token) = if let Some((_, base)) = prefixed.clone().find(|(prefix, _)| lower == *prefix) {
            let end = digits(2, u8::is_ascii_hexdigit);
            let written = rest[2..end].replace('_', "");
            (end, i128::from_str_radix(&written, base).ok().map(Token::Int))
        } else {
            let whole = digits(0, u8::is_ascii_digit);
            let bytes = rest.as_bytes();
            let is_digit_at = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
            let mut end = whole;
            // After a dot only whole numbers follow: they are indices.
            if !self.source[..self.at].ends_with('.') {
                if bytes.get(end) == Some(&b'.') && is_digit_at(end + 1) {
                    end = digits(end + 1, u8::is_ascii_digit);
                }
                if matches!(bytes.get(end), Some(b'e' | b'E')) {
                    let signed = end + 1 + usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
                    if is_digit_at(signed) {
                        end = digits(signed, u8::is_ascii_digit);
                    }
                }
            }
            let written = rest[..end].replace('_', "");
            let token = match end > whole {
                true => written.parse().ok().map(Token::Float),
                false => written.parse().ok().map(Token::Int),
            };
            (end, token)
        };
        let Some(token) = token else {
            return self.wrong(format!("{} is not a valid number", &rest[..end]));
        };
        self.push(token);
        self.at += end;
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), Error> {
        let rest = &self.rest()[1..];
        let mut text = String::new();
        let mut characters = rest.char_indices();
        while let Some((at, character)) = characters.next() {
            if character == quote {
                self.push(Token::Text(text));
                self.at += at + 2;
                return Ok(());
            }
            if character != '\\' {
                text.push(character);
                continue;
            }
            let Some((_, escaped)) = characters.next() else { break };
            let mut code = |digits: usize| -> Option<char> {
                let written: String = characters.by_ref().take(digits).map(|(_, c)| c).collect();
                let is_hex = written.len() == digits && written.bytes().all(|b| b.is_ascii_hexdigit());
                is_hex.then(|| u32::from_str_radix(&written, 16).ok().and_then(char::from_u32))?
            };
            let meant = match escaped {
                'n' => Some('\n'),
                't' => Some('\t'),
                'r' => Some('\r'),
                'a' => Some('\u{7}'),
                'b' => Some('\u{8}'),
                'f' => Some('\u{c}'),
                'v' => Some('\u{b}'),
                '\\' | '\'' | '"' => Some(escaped),
                '\n' => continue,
                'x' => code(2),
                'u' => code(4),
                'U' => code(8),
                '0'..='7' => {
                    let mut number = escaped.to_digit(8).unwrap_or(0);
                    let mut more = characters.clone();
                    for _ in 0..2 {
                        let Some(digit) = more.next().and_then(|(_, c)| c.to_digit(8)) else { break };
                        number = 8 * number + digit;
                        characters.next();
                    }
                    char::from_u32(number)
                }
                other => {
                    text.push('\\');
                    Some(other)
                }
            };
            let Some(meant) = meant else {
                return self.wrong("a string has an escape that is not a character");
            };
            text.push(meant);
        }
        self.wrong("a string has no end")
    }
}

/// Length of `raw %}` where it follows the beginning of a block.
fn raw_begin(rest: &str) -> Option<usize> {
    let inside = rest.trim_start_matches(is_space).strip_prefix("raw")?.trim_start_matches(is_space);
    match inside.strip_prefix("-%}") {
        Some(behind) => Some(rest.len() - behind.trim_start_matches(is_space).len()),
        None => inside.strip_prefix("%}").map(|behind| rest.len() - behind.len()),
    }
}
