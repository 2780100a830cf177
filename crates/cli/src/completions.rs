//! `completions` and `man`: shell completion and manual pages, from the same definitions as `--help`.
//!
//! The scripts call the hidden command `complete` of the program itself. So they complete recipes, runs, keys and values as well as
//! commands and options, and always those of the installed program.

mod candidates;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Command, Parser, ValueEnum};
use flatout_train::Failure;

use crate::screen::{Screen, one_line};

#[derive(Parser)]
pub struct Completions {
    /// The shell that the script is for.
    #[arg(value_enum)]
    pub shell: Shell,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Parser)]
pub struct Man {
    /// The folder that pages are written to, as flatout.1, flatout-train.1 ...; it is created if it does not exist.
    pub folder: PathBuf,
}

#[derive(Parser)]
pub struct Complete {
    /// The words before the cursor, from the program's name on; the last one is completed and may be empty.
    #[arg(last = true, allow_hyphen_values = true)]
    pub words: Vec<String>,
}

/// Prints the script that a shell reads.
pub fn completions(args: &Completions, screen: &Screen) -> Result<ExitCode, Failure> {
    let script = match args.shell {
        Shell::Bash => include_str!("completions/flatout.bash"),
        Shell::Zsh => include_str!("completions/flatout.zsh"),
        Shell::Fish => include_str!("completions/flatout.fish"),
    };
    script.lines().for_each(|line| screen.result(line));
    Ok(ExitCode::SUCCESS)
}

/// Prints the completions of the last word, one per line, each with its help after a tab.
pub fn complete(args: &Complete, root: Command, screen: &Screen) -> Result<ExitCode, Failure> {
    for candidate in candidates::candidates(&root, &args.words) {
        let (word, help) = (one_line(&candidate.word), one_line(&candidate.help));
        screen.coloured(format_args!("{word}\t{help}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a page for the program and one for every command.
pub fn man(args: &Man, root: Command, screen: &Screen) -> Result<ExitCode, Failure> {
    let folder = args.folder.display();
    fs::create_dir_all(&args.folder).map_err(Failure::io(&folder))?;
    let mut names = vec![];
    pages(&root, "", &mut names);
    clap_mangen::generate_to(root, &args.folder).map_err(Failure::io(&folder))?;
    if screen.json {
        screen.object(&serde_json::json!({ "folder": args.folder, "pages": names }));
    } else {
        screen
            .result(format!("{} pages in {folder}; man -l {folder}/flatout.1 shows the first", names.len()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Collects the names of the pages of a command and of its visible subcommands.
fn pages(command: &Command, parent: &str, names: &mut Vec<String>) {
    let name = match parent {
        "" => command.get_name().to_string(),
        parent => format!("{parent}-{}", command.get_name()),
    };
    names.push(format!("{name}.1"));
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        pages(subcommand, &name, names);
    }
}
