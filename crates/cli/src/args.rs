//! The arguments of the commands.

use std::path::PathBuf;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};
use flatout_measure::sweep::By;
use flatout_report::history::Axis;
use flatout_train::UserError;
use flatout_train::config::{FileFormat, OnError, Task, option_as_key};
use flatout_train::infer::sampling::Sampling;
use flatout_train::metrics::goal::Metric;
use flatout_train::run::Resume;
use flatout_train::weights::export::Format;
use flatout_train::weights::gguf::Width;

use crate::launch;
use crate::time_limit;

/// Commands that take keys.
const TAKES_KEYS: [&str; 11] = [
    "train", "resume", "sweep", "plan", "ablate", "profile", "tune", "generate", "eval", "logits", "recipes",
];

/// The error for an unknown option that is the name of a key, as in `--lr 1e-3`.
pub fn key_meant(error: &clap::Error) -> Option<String> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if error.kind() != ErrorKind::UnknownArgument || !words.iter().any(|word| TAKES_KEYS.contains(&&word[..]))
    {
        return None;
    }
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    let starts_ranks = ["--ranks", "--gpus", "--nodes"].contains(&option.split('=').next().unwrap_or(option));
    if starts_ranks && words.iter().any(|word| word == "sweep") {
        return Some(launch::one_process("sweep", option));
    }
    let at = words.iter().position(|word| word.split('=').next() == option.split('=').next())?;
    option_as_key(&words[at], words.get(at + 1).map(String::as_str))
}

/// The error for an invalid command line, as one sentence. Help and the version are printed instead, and end the process.
pub fn usage(error: &clap::Error) -> String {
    if !error.use_stderr() {
        error.exit();
    }
    let rendered = error.render().to_string();
    let lines = rendered.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let mut sentence = String::new();
    for line in lines.filter(|line| !line.is_empty() && !line.starts_with("For more information")) {
        let line = line.trim_start_matches("error: ");
        match line.strip_prefix("tip: ") {
            // This tip does not apply: no option of flatout takes a value that begins with a dash.
            Some(tip) if tip.starts_with("to pass '-") => continue,
            Some(tip) => sentence += &format!("; {tip}"),
            None if sentence.is_empty() => sentence += line,
            None if sentence.ends_with(':') => sentence += &format!(" {line}"),
            None => sentence += &format!(", {line}"),
        }
    }
    let command = std::env::args().nth(1).filter(|word| !word.starts_with('-'));
    let known = command.filter(|_| error.kind() != ErrorKind::InvalidSubcommand);
    let of_command = known.map_or(String::new(), |command| format!("{command} "));
    format!("{sentence}: see flatout {of_command}--help")
}

#[derive(Parser)]
pub struct Train {
    /// A recipe (a name that `flatout recipes` lists, or a path) and key=value overrides, applied in order.
    #[arg(value_name = "RECIPE | KEY=VALUE")]
    pub words: Vec<String>,
    /// The directory of the run; defaults to `runs/<recipe>-<n>`.
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
    /// A preset (`flatout recipes` lists them) or a TOML file, applied over the recipe and before the overrides; repeatable.
    #[arg(long, value_name = "NAME|FILE")]
    pub with: Vec<String>,
    /// Whether an existing run is refused (never), continued (auto), or required and continued (must); needs --run.
    #[arg(long, value_name = "WHEN", default_value_t = Resume::Never, requires = "run")]
    pub resume: Resume,
    /// Save and stop, with exit code 3, before this much time has passed, as in 3h50m or 90s.
    #[arg(long, value_name = "DURATION", value_parser = time_limit::parse)]
    pub max_time: Option<Duration>,
    /// Show the run live in a browser: prints the address of the page, and opens it where there is a browser.
    #[arg(long)]
    pub watch: bool,
    #[command(flatten)]
    pub ranks: launch::Ranks,
}

#[derive(Parser)]
pub struct ResumeRun {
    /// The directory of a run, a sweep or folds, or its name under `runs`.
    pub run: PathBuf,
    /// Overrides of the keys that may change: train.steps, train.epochs, train.on_nonfinite, train.max_skipped, train.patience, eval, checkpoint, log, samples, track, mesh.shards, shard, shard_keep.
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Save and stop, with exit code 3, before this much time has passed, as in 3h50m or 90s.
    #[arg(long, value_name = "DURATION", value_parser = time_limit::parse)]
    pub max_time: Option<Duration>,
    /// Show the run live in a browser: prints the address of the page, and opens it where there is a browser.
    #[arg(long)]
    pub watch: bool,
    #[command(flatten)]
    pub ranks: launch::Ranks,
}

#[derive(Parser)]
pub struct Sweep {
    /// A recipe and key=value overrides, as for train; a key with several values (1,2,3 or 1..3) is swept over. Values
    /// that are lists are separated by |, as in 'betas=0.9,0.95|0.9,0.999'.
    #[arg(value_name = "RECIPE | KEY=VALUE[,VALUE...]")]
    pub words: Vec<String>,
    /// A preset or a TOML file, applied over the recipe; repeatable.
    #[arg(long, value_name = "NAME|FILE")]
    pub with: Vec<String>,
    /// Which combinations to train: grid (all), or random (--runs of them; lr=1e-5..1e-3 then draws from a range).
    #[arg(long, value_name = "HOW", default_value_t = By::Grid)]
    pub by: By,
    /// With --by random, the number of runs.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub runs: usize,
    /// With --by random, the seed that combinations are drawn with.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    pub seed: u64,
    /// The metric that runs are ranked by: loss, accuracy, f1 ...; defaults to eval.metric.
    #[arg(long, value_name = "METRIC")]
    pub goal: Option<Metric>,
    /// The folder of the runs; defaults to `runs/<recipe>-sweep-<n>`.
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
    /// Whether an existing sweep is refused (never), continued (auto), or required and continued (must); needs --run.
    #[arg(long, value_name = "WHEN", default_value_t = Resume::Never, requires = "run")]
    pub resume: Resume,
    /// Save and stop, with exit code 3, before this much time has passed, as in 3h50m or 90s.
    #[arg(long, value_name = "DURATION", value_parser = time_limit::parse)]
    pub max_time: Option<Duration>,
    /// List the runs and the memory planned for each, and train nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// Parses a number of ranks or nodes to plan for.
fn ranks_of_a_plan(word: &str) -> Result<usize, String> {
    match word.parse() {
        Ok(number @ 1..=1024) => Ok(number),
        _ => Err("give a number from 1 to 1024".into()),
    }
}

#[derive(Parser)]
pub struct Plan {
    /// A recipe and key=value overrides, as for train.
    #[arg(value_name = "RECIPE | KEY=VALUE")]
    pub words: Vec<String>,
    /// A preset or a TOML file, applied over the recipe; repeatable.
    #[arg(long, value_name = "NAME|FILE")]
    pub with: Vec<String>,
    /// Plan for this GPU instead of this machine's, and say whether the run fits: rtx3090, a100-80, h200 ...
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// Plan for this many GPUs of a node, a rank on each: memory of one rank, exchanges and scaling.
    #[arg(long, value_name = "N", value_parser = ranks_of_a_plan)]
    pub gpus: Option<usize>,
    /// With --gpus, the number of nodes, each with as many GPUs.
    #[arg(long, value_name = "M", requires = "gpus", value_parser = ranks_of_a_plan)]
    pub nodes: Option<usize>,
    /// With --gpus, the link between the GPUs of a node, if it is not the usual one: nvlink4, pcie4-host ...
    #[arg(long, value_name = "NAME", requires = "gpus")]
    pub link: Option<String>,
    /// With --nodes, the network between the nodes; defaults to ib400.
    #[arg(long, value_name = "NAME", requires = "nodes")]
    pub net: Option<String>,
    /// Plan for this many ranks on CPUs: memory of one rank.
    #[arg(long, value_name = "N", conflicts_with = "gpus", value_parser = ranks_of_a_plan)]
    pub ranks: Option<usize>,
    /// Read the data first, as train does, so that examples have their own lengths. Otherwise each counts as many tokens as the
    /// context has.
    #[arg(long)]
    pub read_data: bool,
    /// Also write arena.svg, a plot of memory over the step, into this folder.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Also list every launch in order: its path in the model, kernel, tensors and least time.
    #[arg(long)]
    pub launches: bool,
    /// Also write the compiled plans as text, with the offset of every slot and buffer and with every launch: plans are equal
    /// where these files are.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
}

#[derive(Parser)]
pub struct Ablate {
    /// A recipe and key=value overrides, as for train: the baseline of all comparisons.
    #[arg(value_name = "RECIPE | KEY=VALUE")]
    pub words: Vec<String>,
    /// A preset or a TOML file, applied over the recipe; repeatable.
    #[arg(long, value_name = "NAME|FILE")]
    pub with: Vec<String>,
    /// Minutes to spend; defaults to 2 on the CPU and 10 on a GPU. The same command given again continues.
    #[arg(long, value_name = "MINUTES")]
    pub budget: Option<f64>,
    /// Number of rounds: how often everything is measured.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub repeats: u64,
    /// Updates that are timed per measurement, after three that warm up.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub steps: u64,
    /// Measure only this switch.
    #[arg(long, value_name = "SWITCH")]
    pub only: Option<String>,
    /// Also measure variants of the model: norm, activation, positions, q/k norm, tied head, key and value heads.
    #[arg(long)]
    pub model: bool,
    /// Also measure a control whose updates are slowed by 10%, to check that the slowdown is detected.
    #[arg(long)]
    pub control: bool,
    /// Discard the results that an interrupted call kept, and start again.
    #[arg(long)]
    pub fresh: bool,
    /// Also write ablate.md, ablate.json and bar charts as SVG into this folder.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Train whole runs instead, each until an evaluation is as good as this, and compare the time and tokens that took.
    #[arg(long, value_name = "LOSS")]
    pub to_loss: Option<f64>,
    /// With --to-loss, overrides to compare with the recipe as it is, several of them in quotes; repeatable.
    #[arg(long = "try", value_name = "KEY=VALUE ...", requires = "to_loss")]
    pub tries: Vec<String>,
    /// With --to-loss, the number of runs of each variant, with consecutive seeds from train.seed on.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub seeds: u64,
    #[command(flatten)]
    pub meeting: launch::Meeting,
}

#[derive(Parser)]
pub struct Profile {
    /// A recipe and key=value overrides, as for train.
    #[arg(value_name = "RECIPE | KEY=VALUE")]
    pub words: Vec<String>,
    /// A preset or a TOML file, applied over the recipe; repeatable.
    #[arg(long, value_name = "NAME|FILE")]
    pub with: Vec<String>,
    /// Updates of each kind that are timed per round; there are eight rounds.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub steps: u64,
    /// Show every row of every table.
    #[arg(long)]
    pub all: bool,
    /// Also measure how much time and energy one more run of each kernel adds to the update, which is its cost on a card at its power
    /// limit. Takes a minute or two.
    #[arg(long)]
    pub marginal: bool,
    /// Also write a trace, which ui.perfetto.dev opens.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub meeting: launch::Meeting,
}

#[derive(Parser)]
pub struct Tune {
    /// A recipe and key=value overrides, as for train; keys that are given here are not tuned.
    #[arg(value_name = "RECIPE | KEY=VALUE")]
    pub words: Vec<String>,
    /// A preset or a TOML file, applied over the recipe; repeatable. Its values may be tuned.
    #[arg(long, value_name = "NAME|FILE")]
    pub with: Vec<String>,
    /// Allowed change of numbers: bitwise (none), bounded (rounding), statistical (narrower types too).
    #[arg(long, value_name = "CLASS", default_value = "bounded", value_parser = ["bitwise", "bounded", "statistical"])]
    pub allow: String,
    /// Minutes to spend; defaults to 2 on the CPU and 10 on a GPU.
    #[arg(long, value_name = "MINUTES")]
    pub budget: Option<f64>,
    /// The preset to write; defaults to `tuned-RECIPE-DEVICE.toml`.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    pub meeting: launch::Meeting,
}

#[derive(Parser)]
pub struct Claims {
    /// Show only this guide: fvlm, bdh, gemma, qwen or pretrain.
    pub guide: Option<String>,
}

#[derive(Parser)]
pub struct Generate {
    /// A run (its directory or its name under `runs`, or RUN@step), or a model folder in Hugging Face format.
    #[arg(value_name = "RUN | FOLDER")]
    pub model: PathBuf,
    /// Switches, such as backend=cpu or precision=fp32.
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// A text to continue; repeatable, and all are continued at once.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// A file of prompts: a JSON list of texts, or one prompt per line.
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Ask the prompts as questions: they are put into the model's chat template, and only the answers are printed.
    #[arg(long)]
    pub chat: bool,
    /// A JPEG, PNG or WebP file that every prompt asks about; repeatable. Prompts are then questions, as with --chat, and images stand
    /// before the text, in order, or where it says <image>.
    #[arg(long, value_name = "FILE")]
    pub image: Vec<PathBuf>,
    /// Frames of a video that every prompt asks about, in the order of their names: a folder with JPEG, PNG or WebP files, a .tar archive,
    /// or one file. Prompts are then questions, as with --chat, and frames stand before the text.
    #[arg(long, value_name = "FOLDER", conflicts_with = "image")]
    pub frames: Option<PathBuf>,
    /// The most tokens to generate.
    #[arg(long, default_value_t = 200)]
    pub max_tokens: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Random seed: the same seed gives the same text, and copies of a prompt get different texts.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// The most prompts that are continued at the same time.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub at_once: usize,
}

/// How commands that generate text sample its tokens.
#[derive(Parser)]
pub struct SamplingArgs {
    /// Sampling temperature: 0 always takes the likeliest token, 1 samples with the model's own probabilities.
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Sample only among this many of the likeliest tokens; 0 means all.
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Sample only among the likeliest tokens that together have this probability; 1 means all.
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
}

impl SamplingArgs {
    /// Refuses values outside their range.
    pub fn check(&self) -> Result<(), UserError> {
        let SamplingArgs { temperature, top_p, .. } = self;
        if !temperature.is_finite() || *temperature < 0.0 {
            return Err(UserError(format!(
                "--temperature is {temperature} and must be a number of at least 0"
            )));
        }
        if !(*top_p > 0.0 && *top_p <= 1.0) {
            return Err(UserError(format!("--top-p is {top_p} and must be above 0 and at most 1")));
        }
        Ok(())
    }

    pub fn options(&self, seed: u64, max_tokens: usize) -> Sampling {
        let SamplingArgs { temperature, top_k, top_p } = *self;
        Sampling { temperature, top_k, top_p, seed, max_tokens }
    }
}

#[derive(Parser)]
pub struct Eval {
    /// A run (its directory or its name under `runs`, or RUN@step), or a model folder in Hugging Face format.
    #[arg(value_name = "RUN | FOLDER")]
    pub model: PathBuf,
    /// data.path=... to evaluate on all of that data; the default is what the run held out. Also eval.*, loader.* and switches.
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// With a head of classes, predict the class of every row of this file, which needs no labels, or of every image in a folder,
    /// a table, a .tar archive or a file.
    #[arg(long, value_name = "FILE", requires = "out")]
    pub predict: Option<String>,
    /// The .jsonl or .csv file that predictions are written to.
    #[arg(long, value_name = "FILE", requires = "predict")]
    pub out: Option<PathBuf>,
    /// Ask the multiple-choice questions of a file in the format of HellaSwag, ARC, MMLU or PIQA, or with `prompt`, `choices` and
    /// `answer`: how often the right answer is the likeliest, counted as in the lm-evaluation-harness; repeatable.
    #[arg(long, value_name = "FILE", conflicts_with = "predict")]
    pub choices: Vec<String>,
}

#[derive(Parser)]
pub struct Export {
    /// The run, its directory or its name under `runs`: RUN for its newest checkpoint, or RUN@step. With --format gguf also a model
    /// folder in Hugging Face format.
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// The folder to write, or with --format gguf the file.
    #[arg(long, value_name = "PATH")]
    pub to: PathBuf,
    /// The format to write: huggingface (a folder that transformers loads) or gguf (a file that llama.cpp loads).
    #[arg(long, value_name = "FORMAT", default_value_t = Format::HuggingFace)]
    pub format: Format,
    /// The type of the weights: f32 (the default, and the run's own) or bf16. With --format gguf: f16 (the default), f32, bf16 or q8_0
    /// (8-bit integers with a scale for every 32).
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<Width>,
    /// The largest size of one weight file in the Hugging Face layout, such as 500MB or 2GiB; defaults to 5GB.
    #[arg(long, value_name = "SIZE")]
    pub shard_size: Option<String>,
    /// Replace an earlier export in that place; anything else there is still refused.
    #[arg(long)]
    pub force: bool,
    /// Write only the adapters, in PEFT's layout, instead of the merged model.
    #[arg(long)]
    pub adapter: bool,
}

#[derive(Parser)]
pub struct Logits {
    /// A run (its directory or its name under `runs`, or RUN@step), or a model folder in Hugging Face format.
    #[arg(value_name = "RUN | FOLDER")]
    pub model: PathBuf,
    /// Switches, such as backend=cpu or precision=fp32.
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// A JSON file with rows of token ids: [[1, 2, 3], [4, 5]].
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// The safetensors file to write: `logits` [rows, length, vocabulary], or one `logits.N` per row where lengths differ.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
}

#[derive(Parser)]
pub struct Track {
    /// The run, its directory or its name under `runs`.
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// The tracker, if the run's config has none: track.mlflow=http://localhost:5000, and track.experiment_name, track.run_name.
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Runs {
    #[command(subcommand)]
    pub compare: Option<RunsCommand>,
    /// A folder of runs, or one run by its folder or its name below `runs`; defaults to `runs`.
    pub dir: Option<PathBuf>,
}

#[derive(Subcommand)]
pub enum RunsCommand {
    /// Show what differs between runs, their results, and their loss curves in one plot.
    Compare(Compare),
    /// Upload a run to MLflow: all of it, or only what the server is missing.
    Track(Track),
}

#[derive(Parser)]
pub struct Compare {
    /// The runs' directories, or their names under `runs`.
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// The horizontal axis of the losses: step, tokens or time.
    #[arg(long, value_name = "AXIS", default_value_t = Axis::Step)]
    pub by: Axis,
    /// The file that the plot is written to.
    #[arg(long, value_name = "FILE", default_value = "compare.svg")]
    pub svg: PathBuf,
    /// Make the horizontal axis logarithmic.
    #[arg(long)]
    pub log: bool,
}

#[derive(Parser)]
pub struct Watch {
    /// A folder of runs, or one run; defaults to `runs`.
    pub dir: Option<PathBuf>,
    /// The address to listen on. Unless it is a loopback address, the page needs the token in the URL that is printed.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// The port to listen on, 0 for any free one; defaults to 8600, or to a free one if that is taken.
    #[arg(long, value_name = "PORT")]
    pub port: Option<u16>,
    /// Open the page in a browser.
    #[arg(long)]
    pub open: bool,
}

#[derive(Parser)]
pub struct Doctor {
    /// Check every kernel against the reference implementation, in every type and layout, and in place; takes minutes on a GPU.
    #[arg(long)]
    pub verify: bool,
    /// Time the attention kernels of the GPU against one another.
    #[arg(long, value_name = "WHAT", value_parser = ["attention"], conflicts_with = "verify")]
    pub speed: Option<String>,
    /// Time the kernels of this GPU or CPU, in under a minute, and keep the times for the predictions of plan and train.
    #[arg(long, conflicts_with_all = ["verify", "speed"])]
    pub calibrate: bool,
    /// With --calibrate, time exchanges between this many GPUs of this machine, one process each, instead of kernels.
    #[arg(long, value_name = "N", requires = "calibrate", conflicts_with = "ranks")]
    pub gpus: Option<usize>,
    /// With --calibrate, time exchanges between this many processes on the CPU; the times are printed and not kept.
    #[arg(long, value_name = "N", requires = "calibrate")]
    pub ranks: Option<usize>,
    /// With --gpus, let ranks share a GPU, to see that it works. Such times are stored separately and not used for predictions.
    #[arg(long, requires = "gpus")]
    pub share_gpu: bool,
    /// With --verify, --speed or --assemble, only cases whose name contains this.
    #[arg(long, hide = true, default_value = "")]
    pub only: String,
    /// Compile every CUDA kernel for these architectures, without a GPU: `sm_80,sm_90a`.
    #[arg(long, hide = true, value_delimiter = ',', value_name = "ARCH")]
    pub assemble: Vec<String>,
}

#[derive(Parser)]
pub struct Data {
    #[command(subcommand)]
    pub command: DataCommand,
}

#[derive(Subcommand)]
pub enum DataCommand {
    /// Tokenise text into a folder of shards to train on; after an interruption, the same command continues.
    Prepare(Prepare),
    /// Show counts, lengths and samples of data, or the rows of a recipe and which of their tokens are trained on.
    Inspect(Inspect),
}

#[derive(Parser)]
pub struct Prepare {
    /// Text, JSONL, CSV, TSV or parquet files, compressed or not; folders; patterns in quotes; - for standard input.
    #[arg(value_name = "SOURCE", required = true)]
    pub sources: Vec<String>,
    /// The folder to write.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// A tokenizer.json to use.
    #[arg(long, value_name = "FILE", conflicts_with = "vocab")]
    pub tokenizer: Option<PathBuf>,
    /// Without --tokenizer: size of the tokeniser that is trained on a sample of the text.
    #[arg(long, value_name = "N", default_value_t = 32768)]
    pub vocab: usize,
    #[command(flatten)]
    pub input: InputFormat,
    /// Number of tokens after which a shard ends.
    #[arg(long, value_name = "N", default_value_t = flatout_data::prepare::SHARD_TOKENS)]
    pub shard_tokens: u64,
    /// Threads that tokenise; the shards are the same for any number. Defaults to all cores.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    /// How to treat a document that cannot be used: fail, or skip it and count it.
    #[arg(long, value_name = "fail|skip", default_value_t = OnError::Fail)]
    pub on_error: OnError,
    /// Discard what the folder holds of another or an interrupted preparation.
    #[arg(long)]
    pub restart: bool,
}

#[derive(Parser)]
pub struct InputFormat {
    /// The JSON key or the column that holds the text.
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub field: String,
    /// How files are read: auto (by name and content), text, jsonl, csv, tsv, parquet.
    #[arg(long, value_name = "FORMAT", default_value_t = FileFormat::Auto)]
    pub format: FileFormat,
}

#[derive(Parser)]
pub struct Inspect {
    /// Files, folders, patterns or a folder of shards; or a recipe and key=value overrides, as for train.
    #[arg(value_name = "SOURCE | RECIPE | KEY=VALUE")]
    pub words: Vec<String>,
    /// A preset or a TOML file, applied over a recipe; repeatable.
    #[arg(long, value_name = "NAME|FILE")]
    pub with: Vec<String>,
    /// Number of documents to show, or of rows of a recipe.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub samples: usize,
    #[command(flatten)]
    pub input: InputFormat,
    /// A tokenizer.json, to count the tokens of text and to decode those of .bin files.
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// The token that separates documents of .bin files.
    #[arg(long, value_name = "TOKEN")]
    pub eos: Option<u32>,
    /// The content of the files: text, chat (conversations, instructions), classes (texts or pairs with a label), visual_chat
    /// (conversations and questions about images), preference (two answers to each prompt), foveated (videos with a text, in .tar
    /// shards) or images (a folder with a folder per class, .tar archives, CIFAR's files, a table; without files the synthetic set).
    #[arg(long, value_name = "TASK", default_value_t = Task::Text)]
    pub task: Task,
    /// A chat template: a file, or chatml; defaults to the one beside the tokeniser.
    #[arg(long, value_name = "FILE")]
    pub template: Option<String>,
    /// With visual_chat and preference, the folder that image paths are relative to; defaults to that of the file.
    #[arg(long, value_name = "DIR")]
    pub image_root: Option<PathBuf>,
    /// With images, measure for this long how many per second one core decodes, and for as long how many it prepares for training.
    #[arg(long, value_name = "SECONDS")]
    pub time: Option<f64>,
}

#[derive(Parser)]
pub struct Schema {
    /// A key to show in detail, or a word: only keys whose name or description contains it are listed.
    #[arg(value_name = "KEY | WORD")]
    pub word: Option<String>,
}

#[derive(Parser)]
pub struct Recipes {
    #[command(subcommand)]
    pub show: Option<Show>,
}

#[derive(Subcommand)]
pub enum Show {
    /// Print a recipe, resolved, as TOML.
    Show {
        /// A recipe and key=value overrides.
        #[arg(value_name = "RECIPE | KEY=VALUE")]
        words: Vec<String>,
    },
}

/// The recipe among the words (the first, unless it sets a key) and the overrides.
pub fn recipe_and_overrides(words: &[String]) -> (&str, &[String]) {
    match words {
        [first, rest @ ..] if !first.contains('=') => (first, rest),
        _ => ("tiny", words),
    }
}
