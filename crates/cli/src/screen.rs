//! Printing: results go to standard output, everything else to standard error.
//!
//! Printed texts and names may come from other people's data, so control characters are escaped: no file can move the cursor, rename
//! the window or hide other output.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

pub use flatout_report::words::{bytes, count, duration, flops, short};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::palette::{self, Ink};
use crate::waiting;

/// The output options, and what the terminal supports.
#[derive(Clone, Copy)]
pub struct Screen {
    pub json: bool,
    pub quiet: bool,
    pub verbose: bool,
    /// Standard error is a terminal that may be drawn on.
    pub live: bool,
    /// Standard error takes colours.
    pub colours: bool,
    /// Standard output takes colours.
    pub result_colours: bool,
    /// The command does more than print, so it continues if its output cannot be written.
    pub is_view: bool,
}

/// Writing to standard output has failed, and the failure was reported.
static IS_GONE: AtomicBool = AtomicBool::new(false);

impl Screen {
    pub fn new(json: bool, quiet: bool, verbose: bool, is_view: bool) -> Screen {
        // A terminal that cannot move its cursor, or does not declare that it can, gets lines instead of a bar.
        let moves = std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb");
        let colours = palette::has_colours(io::stderr().is_terminal());
        let result_colours = palette::has_colours(io::stdout().is_terminal());
        let live = !json && !quiet && moves && io::stderr().is_terminal();
        Screen { json, quiet, verbose, live, colours, result_colours, is_view }
    }

    /// Prints a line of the result.
    pub fn result(&self, line: impl Display) {
        self.coloured(printable(&line.to_string()));
    }

    /// Prints a line of the result behind a label.
    pub fn result_fact(&self, label: &str, text: impl Display) {
        let label = Ink::Label.paint(&format!("{label:<8}"), self.result_colours);
        self.coloured(format_args!("{label} {}", printable(&text.to_string())));
    }

    /// Prints a line of the result with colours; texts and names in it went through [`printable`].
    pub fn coloured(&self, line: impl Display) {
        self.print(format_args!("{line}\n"));
    }

    /// Prints and flushes a part of a line of the result.
    pub fn piece(&self, text: &str) {
        self.print(format_args!("{}", printable(text)));
    }

    /// Prints the result as one JSON object.
    pub fn object(&self, value: &impl Serialize) {
        self.json_line(&serde_json::to_string_pretty(value).expect("results have a JSON form"));
    }

    /// Prints a line of JSON, with control characters in its texts escaped as JSON does it.
    pub fn json_line(&self, json: &str) {
        let escape = |c: char| format!("\\u{:04x}", u32::from(c));
        self.print(format_args!("{}\n", escaped(json, |c| c.is_control() && c != '\n', escape)));
    }

    /// Prints on standard output. If that fails, a command whose output is its result ends with an error; any other reports it once
    /// and continues without.
    fn print(&self, text: std::fmt::Arguments<'_>) {
        if IS_GONE.load(Ordering::Relaxed) {
            return;
        }
        let mut out = io::stdout();
        let Err(error) = waiting::above(|| out.write_fmt(text).and_then(|()| out.flush())) else { return };
        if !self.is_view {
            // A reader such as `head` that has closed the pipe is not worth an error message.
            if error.kind() != io::ErrorKind::BrokenPipe {
                complain(format!("standard output cannot be written: {error}"));
            }
            std::process::exit(1);
        }
        if !IS_GONE.swap(true, Ordering::Relaxed) {
            complain(format!(
                "standard output cannot be written: {error}; the run continues without it, and events.jsonl records everything"
            ));
        }
    }

    /// A progress bar of this many parts with indicatif's template, if one may be drawn. It replaces the line of `waiting` for the rest
    /// of the command.
    pub fn bar(&self, template: &str, parts: u64) -> Option<ProgressBar> {
        let style = || ProgressStyle::with_template(template).expect("a template");
        self.live.then(|| {
            std::mem::forget(waiting::hold());
            ProgressBar::new(parts).with_style(style())
        })
    }

    /// Prints a note, above the bar if there is one.
    pub fn note_above(&self, bar: Option<&ProgressBar>, line: impl Display) {
        match bar {
            Some(bar) => bar.println(printable(&line.to_string())),
            None => self.note(line),
        }
    }

    /// Escapes and colours a text for a line of [`Screen::painted_note`].
    pub fn paint(&self, ink: Ink, text: impl Display) -> String {
        ink.paint(&printable(&text.to_string()), self.colours)
    }

    /// Prints a note behind a label.
    pub fn fact(&self, label: &str, text: impl Display) {
        let label = self.paint(Ink::Label, format_args!("{label:<8}"));
        self.painted_note(format_args!("{label} {}", self.paint(Ink::Plain, text)));
    }

    /// Prints a note with colours; texts in it went through [`Screen::paint`].
    pub fn painted_note(&self, line: impl Display) {
        if !self.quiet && !self.json {
            let _ = waiting::above(|| writeln!(io::stderr(), "{line}"));
        }
    }

    /// Prints a note also with --quiet and --json.
    pub fn always(&self, line: impl Display) {
        let _ = waiting::above(|| writeln!(io::stderr(), "{}", printable(&line.to_string())));
    }

    /// Prints a note: a line on standard error, unless --quiet or --json is given.
    pub fn note(&self, line: impl Display) {
        self.painted_note(printable(&line.to_string()));
    }
}

/// Prints an error on standard error, ignoring that this may fail.
pub fn complain(sentence: impl Display) {
    let _ = waiting::above(|| writeln!(io::stderr(), "flatout: {}", printable(&sentence.to_string())));
}

/// A text with its control characters escaped, except line feeds and tabs.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c.is_control() && c != '\n' && c != '\t', |c| c.escape_default().to_string())
}

/// A text for a single line, with all control characters escaped.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, char::is_control, |c| c.escape_default().to_string())
}

fn escaped(text: &str, is_unsafe: impl Fn(char) -> bool, escape: impl Fn(char) -> String) -> Cow<'_, str> {
    if !text.contains(&is_unsafe) {
        return Cow::Borrowed(text);
    }
    let one = |c: char| if is_unsafe(c) { escape(c) } else { c.to_string() };
    Cow::Owned(text.chars().map(one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert!(matches!(printable("a line\n\tand é"), Cow::Borrowed(_)));
        assert_eq!(printable("\x1b[2J\r\u{9b}1m\x07\n"), "\\u{1b}[2J\\r\\u{9b}1m\\u{7}\n");
        assert_eq!(one_line("a\nb\tc\u{7f}"), "a\\nb\\tc\\u{7f}");
    }
}
