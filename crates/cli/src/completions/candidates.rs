//! Completion candidates for the last word of a command line.

use std::path::Path;

use clap::{Arg, Command};
use flatout_train::config::{self, SchemaKey};
use flatout_train::recipes;

/// A completion with its help text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub word: String,
    pub help: String,
}

impl Candidate {
    fn new(word: impl Into<String>, help: impl Into<String>) -> Self {
        Self { word: word.into(), help: help.into() }
    }
}

/// The completions of the last word. If there are none, the shell completes file names.
pub fn candidates(root: &Command, words: &[String]) -> Vec<Candidate> {
    let Some((last, before)) = words.split_last() else { return vec![] };
    let mut at = ArgCursor { command: root, globals: vec![], values: vec![], option: None };
    for word in before.iter().skip(1) {
        if word == "--" {
            return vec![];
        }
        at.pass(word);
    }
    let mut found = match (at.option, last.strip_prefix('-')) {
        (Some(option), _) => values_of(option),
        (None, Some(_)) => at.options(),
        (None, None) => at.words(last),
    };
    found.retain(|candidate| candidate.word.starts_with(last.as_str()));
    found
}

/// The position in a command line after the words so far.
struct ArgCursor<'a> {
    command: &'a Command,
    /// Global options of the parent commands.
    globals: Vec<&'a Arg>,
    /// Positional arguments so far.
    values: Vec<String>,
    /// The option whose value comes next.
    option: Option<&'a Arg>,
}

impl<'a> ArgCursor<'a> {
    fn pass(&mut self, word: &str) {
        if self.option.take().is_some() {
            return;
        }
        if word.starts_with('-') {
            let name = word.trim_start_matches('-');
            let is_named = |arg: &&Arg| {
                arg.get_long() == Some(name) || word.len() == 2 && arg.get_short() == name.chars().next()
            };
            let takes_value = |arg: &&Arg| arg.get_action().takes_values();
            let mut all = self.command.get_arguments().chain(self.globals.iter().copied());
            self.option = all.find(|arg| is_named(arg) && takes_value(arg));
        } else if let Some(subcommand) = self.command.find_subcommand(word)
            && self.values.is_empty()
        {
            self.globals.extend(self.command.get_arguments().filter(|arg| arg.is_global_set()));
            self.command = subcommand;
        } else {
            self.values.push(word.into());
        }
    }

    fn options(&self) -> Vec<Candidate> {
        let own = self.command.get_arguments().chain(self.globals.iter().copied());
        let shown = own.filter(|arg| !arg.is_hide_set());
        let named = shown
            .filter_map(|arg| Some(Candidate::new(format!("--{}", arg.get_long()?), line(arg.get_help()))));
        named.chain([Candidate::new("--help", "Print help")]).collect()
    }

    /// Subcommands, and values of the next positional argument.
    fn words(&self, last: &str) -> Vec<Candidate> {
        let shown = self.command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
        let mut found: Vec<Candidate> = match &self.values[..] {
            [] => shown
                .map(|subcommand| Candidate::new(subcommand.get_name(), line(subcommand.get_about())))
                .collect(),
            _ => vec![],
        };
        let positionals: Vec<&Arg> = self.command.get_positionals().collect();
        // The last positional argument of a command may be repeated.
        let next = positionals.get(self.values.len()).or(positionals.last());
        let Some(argument) = next else { return found };
        let name =
            argument.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str());
        if name.contains("RECIPE") && self.values.is_empty() {
            found.extend(
                recipes::list().iter().map(|recipe| Candidate::new(recipe.name, recipe.description())),
            );
        }
        if name.contains("KEY=VALUE") {
            found.extend(settings(last));
        }
        match name {
            "KEY | WORD" => {
                found.extend(config::schema().iter().map(|key| Candidate::new(short(&key.path), &key.doc)))
            }
            name if name.starts_with("RUN") => found.extend(runs()),
            _ => found.extend(values_of(argument)),
        }
        found
    }
}

/// The values of an option or argument, where they are known.
fn values_of(argument: &Arg) -> Vec<Candidate> {
    let name = argument.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str());
    match (argument.get_id().as_str(), name) {
        ("with", _) => recipes::presets()
            .iter()
            .map(|preset| Candidate::new(preset.name, preset.description()))
            .collect(),
        (_, "RUN") => runs(),
        _ => {
            let known = argument.get_possible_values();
            known.iter().map(|value| Candidate::new(value.get_name(), line(value.get_help()))).collect()
        }
    }
}

/// Keys as `key=`, or after a key and `=` the named values of that key.
fn settings(last: &str) -> Vec<Candidate> {
    let keys = config::schema();
    let Some((name, _)) = last.split_once('=') else {
        return keys.iter().map(|key| Candidate::new(format!("{}=", short(&key.path)), &key.doc)).collect();
    };
    let is_meant = |key: &&SchemaKey| short(&key.path) == name || key.path.rsplit('.').next() == Some(name);
    let meant = keys.iter().filter(is_meant);
    meant.flat_map(|key| &key.values).map(|value| Candidate::new(format!("{name}={value}"), "")).collect()
}

/// The path of a key, without the section for a switch.
fn short(path: &str) -> &str {
    path.strip_prefix("switches.").unwrap_or(path)
}

/// The runs in the folder `runs`, sorted by name.
fn runs() -> Vec<Candidate> {
    let Ok(entries) = std::fs::read_dir("runs") else { return vec![] };
    let is_run = |path: &Path| path.join("config.toml").is_file();
    let paths = entries.flatten().map(|entry| entry.path()).filter(|path| is_run(path));
    let mut names: Vec<String> = paths.filter_map(|path| path.to_str().map(String::from)).collect();
    names.sort();
    names.into_iter().map(|name| Candidate::new(name, "")).collect()
}

/// The first sentence of a help text.
fn line(help: Option<&clap::builder::StyledStr>) -> String {
    let text = help.map(ToString::to_string).unwrap_or_default();
    let end = text.find(['\n', ';', ':']).unwrap_or(text.len());
    text[..end].trim_end_matches('.').to_string()
}
