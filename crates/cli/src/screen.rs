//! Where things are printed: results on standard output, everything else on standard error.

use std::fmt::Display;
use std::io::{IsTerminal, Write};

pub use flatout_report::words::{bytes, count, duration, flops, short};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// What the user wants to see.
#[derive(Clone, Copy)]
pub struct Screen {
    pub json: bool,
    pub quiet: bool,
    pub verbose: bool,
    /// Standard error is a terminal that may be drawn on.
    pub live: bool,
}

impl Screen {
    pub fn new(json: bool, quiet: bool, verbose: bool) -> Screen {
        // A terminal that cannot move its cursor, or does not say that it can, gets lines.
        let moves = std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb");
        Screen { json, quiet, verbose, live: !json && !quiet && moves && std::io::stderr().is_terminal() }
    }

    /// A line of the result. A reader that went away ends the program quietly, as it does elsewhere.
    pub fn result(&self, line: impl Display) {
        if writeln!(std::io::stdout(), "{line}").is_err() {
            std::process::exit(0);
        }
    }

    /// The result as one JSON object.
    pub fn object(&self, value: &impl Serialize) {
        self.result(serde_json::to_string_pretty(value).expect("results have a JSON form"));
    }

    /// A bar of so many parts by indicatif's template, where one may be drawn.
    pub fn bar(&self, template: &str, parts: u64) -> Option<ProgressBar> {
        let style = || ProgressStyle::with_template(template).expect("a template");
        self.live.then(|| ProgressBar::new(parts).with_style(style()))
    }

    /// A note above the bar, where there is one.
    pub fn note_above(&self, bar: Option<&ProgressBar>, line: impl Display) {
        match bar {
            Some(bar) => bar.println(line.to_string()),
            None => self.note(line),
        }
    }

    /// A line beside the result.
    pub fn note(&self, line: impl Display) {
        if !self.quiet && !self.json {
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    }
}
