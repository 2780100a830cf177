//! The command line: reads arguments, shows progress, prints results, exits. Nothing here computes.
//!
//! Exit codes: 0 done, 1 failed, 2 bad input, 3 stopped by a signal or --max-time after saving.
#![forbid(unsafe_code)]

mod ablate;
mod args;
mod calibrate;
mod claims;
mod data;
mod doctor;
mod eval;
mod examples;
mod export;
mod folds;
mod generate;
mod images;
mod logits;
mod model;
mod plan;
mod profile;
mod progress;
mod race;
mod recipes;
mod runs;
mod screen;
mod sketch;
mod start;
mod status;
mod sweep;
mod time_limit;
mod train;
mod tune;

use std::process::ExitCode;

use args::{Args, Command};
use flatout_train::Failure;
use flatout_train::device::kernels;
use screen::Screen;

fn main() -> ExitCode {
    // First, while this is the only thread: no environment variable changes numbers.
    let cleared = kernels::clear_environment();
    let args = match Args::read() {
        Ok(args) => args,
        Err(sentence) => {
            eprintln!("flatout: {sentence}");
            return ExitCode::from(2);
        }
    };
    let screen = Screen::new(args.json, args.quiet, args.verbose);
    match cleared {
        Ok(names) => names.iter().for_each(|name| {
            screen.note(format!(
                "{name} is set and would change what NVIDIA's libraries compute: cleared for this run"
            ));
        }),
        Err(sentence) => {
            eprintln!("flatout: {sentence}");
            return ExitCode::from(2);
        }
    }
    let done = match args.command {
        Command::Train(command) => train::train(&command, &screen),
        Command::Resume(command) => train::resume(&command, &screen),
        Command::Sweep(command) => sweep::sweep(&command, &screen),
        Command::Plan(command) => plan::plan(&command, &screen),
        Command::Ablate(command) => ablate::ablate(&command, &screen),
        Command::Profile(command) => profile::profile(&command, &screen),
        Command::Tune(command) => tune::tune(&command, &screen),
        Command::Claims(command) => claims::claims(&command, &screen),
        Command::Generate(command) => generate::generate(&command, &screen),
        Command::Runs(command) => runs::runs(&command, &screen),
        Command::Eval(command) => eval::eval(&command, &screen),
        Command::Export(command) => export::export(&command, &screen),
        Command::Logits(command) => logits::logits(&command, &screen),
        Command::Recipes(command) => recipes::recipes(&command, &screen),
        Command::Schema(command) => recipes::schema(&command, &screen),
        Command::Doctor(command) => doctor::doctor(&command, &screen),
        Command::Data(command) => data::data(&command, &screen),
    };
    match done {
        Ok(code) => code,
        Err(Failure::User(error)) => {
            eprintln!("flatout: {error}");
            ExitCode::from(2)
        }
        Err(Failure::Environment(sentence)) => {
            eprintln!("flatout: {sentence}");
            ExitCode::FAILURE
        }
    }
}
