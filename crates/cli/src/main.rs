//! The command line: reads arguments, shows progress, prints results, exits. Nothing here computes.
//!
//! Exit codes: 0 done, 1 failed, 2 bad input, 3 stopped by a signal or --max-time after saving.
#![forbid(unsafe_code)]

mod ablate;
mod args;
mod cache;
mod calibrate;
mod chat;
mod claims;
mod completions;
mod data;
mod doctor;
mod eval;
mod examples;
mod exchanges;
mod export;
mod folds;
mod generate;
mod images;
mod launch;
mod logits;
mod many;
mod measuring;
mod model;
mod palette;
mod plan;
mod profile;
mod progress;
mod race;
mod ranks;
mod recipes;
mod runs;
mod screen;
mod serve;
mod sketch;
mod start;
mod status;
mod sweep;
mod time_limit;
mod to_loss;
mod topology;
mod track;
mod train;
mod tune;
mod waiting;
mod watch;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use flatout_train::Failure;
use flatout_train::device::{self, kernels};

use mimalloc::MiMalloc;
use screen::{Screen, complain};

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Trains and fine-tunes transformers on NVIDIA GPUs, and on the CPU where there is none.
///
/// `flatout train` needs nothing else: it trains a small model on a synthetic language in under a minute. Every value
/// can be changed with key=value, as in `flatout train tiny lr=1e-3 model.layers=6`.
#[derive(Parser)]
#[command(name = "flatout", version, max_term_width = 100)]
struct Args {
    #[command(subcommand)]
    command: Command,
    /// Print results as JSON on standard output.
    #[arg(long, global = true)]
    json: bool,
    /// Print results only, no progress.
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Print more: the report of every compiler pass, and the state of every switch.
    #[arg(short, long, global = true)]
    verbose: bool,
}

// A command is its module, its line here and its line in `run`.
#[derive(Subcommand)]
enum Command {
    /// Train a recipe; without one, `tiny`, which learns on any machine in under a minute.
    Train(args::Train),
    /// Continue a run exactly where it stopped.
    Resume(args::ResumeRun),
    /// Train one run per combination of values, as in `sweep tiny lr=1e-3,3e-3 train.seed=1..3`.
    Sweep(args::Sweep),
    /// Show memory to the byte, FLOPs and the predicted step time of a recipe, without training.
    Plan(args::Plan),
    /// Measure what every switch is worth on this machine: each turned off, with its other values, and added one by one to plain FP32.
    Ablate(args::Ablate),
    /// Profile an update: the time of every kernel beside its roofline, the gaps between kernels, and what would help.
    Profile(args::Profile),
    /// Find the fastest settings of a recipe here by measuring, and write them as a preset for --with.
    Tune(args::Tune),
    /// List the claims of five optimisation guides, each with what was measured for it here, as a page of Markdown.
    Claims(args::Claims),
    /// Continue prompts with a run or a model folder in Hugging Face format.
    Generate(args::Generate),
    /// Talk with a run or a model in the terminal, or line by line through a pipe.
    Chat(chat::Chat),
    /// Serve a run or a model over HTTP with OpenAI's API: completions, chat, streaming, log-probabilities.
    Serve(serve::Serve),
    /// List runs with their progress, losses and speed. `runs compare A B` puts several side by side, `runs track A` uploads one
    /// to MLflow.
    Runs(args::Runs),
    /// Show runs live in a browser: curves side by side, memory, kernels, switches, sweeps. Read-only.
    Watch(args::Watch),
    /// Evaluate a run or a model on held-out data, or on data you name: loss and perplexity, or the metrics of its task.
    Eval(args::Eval),
    /// Write a run as a model folder in Hugging Face format, or as a GGUF file for llama.cpp.
    Export(args::Export),
    /// Write the logits of given token ids to a safetensors file, to compare with another library.
    Logits(args::Logits),
    /// List the recipes, or show one: `flatout recipes show tiny > mine.toml`.
    Recipes(args::Recipes),
    /// List every key that a recipe or an override can set, or those that match a word: `flatout schema warmup`.
    Schema(args::Schema),
    /// Show this machine, and which switches can run on it or why not.
    Doctor(args::Doctor),
    /// Tokenise text into shards, or inspect data and see which tokens are trained on.
    Data(args::Data),
    /// Show cached files and their sizes; `cache clean` deletes them, and they are made again when needed.
    Cache(cache::Cache),
    /// Print a shell's completion script, which completes commands, options, recipes, runs, keys and their values.
    Completions(completions::Completions),
    /// Write manual pages of all commands to a folder.
    Man(completions::Man),
    /// Print the completions of a command line's last word, for the scripts of `completions`.
    #[command(hide = true)]
    Complete(completions::Complete),
    /// Check that ranks find one another however they are started, and time what they exchange.
    #[command(hide = true)]
    Ranks(ranks::CheckRanks),
}

fn main() -> ExitCode {
    // This comes first, while there is only one thread, so that no environment variable changes numbers.
    let cleared = kernels::clear_environment();
    let parsed = Args::try_parse();
    let args = match parsed.map_err(|error| args::key_meant(&error).unwrap_or_else(|| args::usage(&error))) {
        Ok(args) => args,
        Err(sentence) => {
            complain(sentence);
            return ExitCode::from(2);
        }
    };
    let trains = matches!(args.command, Command::Train(_) | Command::Resume(_) | Command::Sweep(_));
    let screen = Screen::new(args.json, args.quiet, args.verbose, trains);
    waiting::start(&screen);
    match cleared {
        Ok(names) => names.iter().for_each(|name| {
            screen.note(format!(
                "{name} is set and would change what NVIDIA's libraries compute: cleared for this run"
            ));
        }),
        Err(sentence) => {
            complain(sentence);
            return ExitCode::from(2);
        }
    }
    let code = match device::start_threads().and_then(|()| run(&args.command, &screen)) {
        Ok(code) => code,
        Err(Failure::User(error)) => {
            complain(error);
            ExitCode::from(2)
        }
        Err(Failure::Environment(sentence)) => {
            complain(sentence);
            ExitCode::FAILURE
        }
    };
    waiting::end();
    code
}

fn run(command: &Command, screen: &Screen) -> Result<ExitCode, Failure> {
    match command {
        Command::Train(args) => train::train(args, screen),
        Command::Resume(args) => train::resume(args, screen),
        Command::Sweep(args) => sweep::sweep(args, screen),
        Command::Plan(args) => plan::plan(args, screen),
        Command::Ablate(args) => ablate::ablate(args, screen),
        Command::Profile(args) => profile::profile(args, screen),
        Command::Tune(args) => tune::tune(args, screen),
        Command::Claims(args) => claims::claims(args, screen),
        Command::Generate(args) => generate::generate(args, screen),
        Command::Chat(args) => chat::chat(args, screen),
        Command::Serve(args) => serve::serve(args, screen),
        Command::Runs(args) => runs::runs(args, screen),
        Command::Watch(args) => watch::watch(args, screen),
        Command::Eval(args) => eval::eval(args, screen),
        Command::Export(args) => export::export(args, screen),
        Command::Logits(args) => logits::logits(args, screen),
        Command::Recipes(args) => recipes::recipes(args, screen),
        Command::Schema(args) => recipes::schema(args, screen),
        Command::Doctor(args) => doctor::doctor(args, screen),
        Command::Data(args) => data::data(args, screen),
        Command::Cache(args) => cache::cache(args, screen),
        Command::Completions(args) => completions::completions(args, screen),
        Command::Man(args) => completions::man(args, Args::command(), screen),
        Command::Complete(args) => completions::complete(args, Args::command(), screen),
        Command::Ranks(args) => ranks::ranks(args, screen),
    }
}
