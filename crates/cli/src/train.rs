//! `train` and `resume`: prints the summary at the start, the progress and the results of a run.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use console::Term;
use flatout_measure::folds;
use flatout_measure::forecast::kept;
use flatout_report::history::{Axis, History, smoothing_span};
use flatout_report::sinks::Sinks;
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config::{Sight, SourceKind, Task};
use flatout_train::device::{self, Device};
use flatout_train::infer::generate::Generator;
use flatout_train::infer::sampling::Sampling;
use flatout_train::ranks::Ranks;
use flatout_train::recipes;
use flatout_train::resolve::compile::{self, Compiled};
use flatout_train::resolve::fp8_layers;
use flatout_train::resolve::prediction;
use flatout_train::run::events::Status;
use flatout_train::run::samples::{self, Sample};
use flatout_train::run::signal::{StopFlag, TIME_IS_UP};
use flatout_train::run::{Entered, Resume, Run, asked_and_resolved};
use flatout_train::training::resume;
use flatout_train::training::trainer::{Laps, Notice, Outcome, Ready, Sink, Worker, train_among};
use flatout_train::weights::pretrained;

use crate::args::{ResumeRun, Train, recipe_and_overrides};
use crate::many::{self, Advice, ProcessRole};
use crate::model;
use crate::palette::Ink;
use crate::progress::Progress;
use crate::screen::{Screen, bytes, count, duration, one_line, printable, short};
use crate::sketch::{Curve, Paper, sketch};
use crate::start::{self, Starting};
use crate::waiting;

pub fn train(args: &Train, screen: &Screen) -> Result<ExitCode, Failure> {
    let role = many::role(&args.ranks)?;
    if let ProcessRole::Parent(copies) = role {
        let (stop, _) = start::watch(None, screen)?;
        let (run, config) = (args.run.as_deref(), requested_config(args, screen)?);
        return many::look_after(copies, &args.ranks, run, &config, &stop, screen);
    }
    let (stop, starting) = start::watch(args.max_time, screen)?;
    let config = requested_config(args, screen)?;
    let advice = Advice::new(args.run.as_deref(), &args.ranks, role.ranks());
    let Some(ranks) = many::join(&role, &args.ranks, args.run.as_deref(), &starting, screen, &advice)? else {
        return Ok(ExitCode::FAILURE);
    };
    let result = train_as(&ranks, config, args, &starting, &stop, screen, &advice);
    many::end(ranks, result)
}

/// The config that the arguments request, checked.
fn requested_config(args: &Train, screen: &Screen) -> Result<Config, Failure> {
    let (recipe, overrides) = recipe_and_overrides(&args.words);
    let config = recipes::resolve(recipe, &args.with, overrides)?;
    recipes::gpu_notes(&args.with).iter().for_each(|note| screen.note(note));
    config.validate_for_training()?;
    pretrained::check(&config, &mut |file| model::fetching(file, screen))?;
    Ok(config)
}

fn train_as(
    ranks: &Ranks,
    config: Config,
    args: &Train,
    starting: &Starting,
    stop: &StopFlag,
    screen: &Screen,
    advice: &Advice,
) -> Result<ExitCode, Failure> {
    let screen = &many::screen(ranks, screen);
    let config = many::settings(ranks, config)?;
    // A config that cannot run on this machine is refused before a directory is made.
    let device = many::device(&config, &args.ranks, ranks)?;
    let compiled = compile::compile(&config, &ranks.target(device.target(&config.switches)))?;
    crate::tune::mention(&config, &device, ranks.count(), screen);
    if config.train.folds.is_some() && config.train.fold.is_none() {
        let dir = match &args.run {
            Some(dir) => dir.clone(),
            None => Run::allocate(Path::new("runs"), &config.recipe)?.dir().to_path_buf(),
        };
        let _page = args.watch.then(|| crate::watch::beside(&dir, screen));
        return crate::folds::train(&dir, args.resume, &config, starting, &device, stop, screen);
    }
    let make = || match &args.run {
        Some(dir) => Run::enter(dir, args.resume),
        None => Run::allocate(Path::new("runs"), &config.recipe).map(Entered::Fresh),
    };
    let entered = many::enter(ranks, starting, make, advice)?;
    let _page = (args.watch && ranks.is_first()).then(|| crate::watch::beside(entered.0.dir(), screen));
    let rank = Rank { ranks, advice, device: &device };
    begin_or_continue_as(&rank, &config, Some(compiled), entered, stop, screen).map(exit_code)
}

/// Trains a run whose directory was opened, new or not; the directory of a new run that is refused is removed again.
/// `compiled` are its plans, if they were made already.
pub fn begin_or_continue(
    config: &Config,
    compiled: Option<Compiled>,
    entered: (Arc<Run>, bool),
    device: &Device,
    stop: &StopFlag,
    screen: &Screen,
) -> Result<Status, Failure> {
    let (ranks, advice) = (Ranks::alone(), Advice::default());
    let rank = Rank { ranks: &ranks, advice: &advice, device };
    begin_or_continue_as(&rank, config, compiled, entered, stop, screen)
}

/// One of several runs that a command trains, each in a folder of its own.
pub struct OneOf<'a> {
    /// The label at the beginning of its lines, at most nine characters.
    pub label: &'static str,
    pub number: usize,
    pub count: usize,
    /// The settings that distinguish it from the other runs; may be empty.
    pub words: String,
    pub folder: &'a Path,
    pub resume: Resume,
    /// The run in its folder is complete.
    pub is_done: bool,
    pub config: &'a Config,
}

/// Trains or continues such a run; one that is done is only checked to have the same settings.
pub fn train_one_of(
    one: &OneOf<'_>,
    device: &Device,
    stop: &StopFlag,
    starting: &Starting,
    screen: &Screen,
) -> Result<Status, Failure> {
    let OneOf { label, number, count, words, folder, resume, is_done, config } = one;
    if *is_done {
        let (own, resolved) = asked_and_resolved(folder)?;
        resume::requeued(&own, &resolved, config)?;
        screen.note(format!("{label:<9}{number} of {count} is done: {}", folder.display()));
        return Ok(Status::Done);
    }
    let words = if words.is_empty() { String::new() } else { format!(": {words}") };
    screen.note(format!("{label:<9}{number} of {count}{words}"));
    let entered = starting.enter(|| Run::enter(folder, *resume))?;
    let status = begin_or_continue(config, None, entered, device, stop, screen);
    starting.leave();
    status
}

/// One process of a run: its ranks, its device, and how a run of that many ranks is continued.
struct Rank<'a> {
    ranks: &'a Ranks,
    advice: &'a Advice,
    device: &'a Device,
}

/// Trains such a run as one of several ranks.
fn begin_or_continue_as(
    rank: &Rank<'_>,
    config: &Config,
    compiled: Option<Compiled>,
    (run, is_fresh): (Arc<Run>, bool),
    stop: &StopFlag,
    screen: &Screen,
) -> Result<Status, Failure> {
    resume::begin_or_continue(&run, is_fresh, config, compiled, |config, compiled| {
        run_through(rank, config, compiled, &run, stop, screen)
    })
}

/// Continues a run, or all the runs of a sweep or of folds.
pub fn resume(args: &ResumeRun, screen: &Screen) -> Result<ExitCode, Failure> {
    let dir = model::named(&args.run);
    let role = many::role(&args.ranks)?;
    if let ProcessRole::Parent(copies) = role {
        let (stop, _) = start::watch(None, screen)?;
        check_one_run(args, &dir)?;
        let (own, resolved) = asked_and_resolved(&dir)?;
        let config = resolved.over(&own.resumed(&args.overrides)?);
        return many::look_after(copies, &args.ranks, Some(&dir), &config, &stop, screen);
    }
    if role.ranks() == 1
        && let Some(sweep) = crate::sweep::begun(args)?
    {
        let _page = args.watch.then(|| crate::watch::beside(&dir, screen));
        return crate::sweep::sweep(&sweep, screen);
    }
    let (stop, starting) = start::watch(args.max_time, screen)?;
    if role.ranks() > 1 {
        check_one_run(args, &dir)?;
    } else if let Some(config) = folds::begun(&dir)? {
        let config = config.resumed(&args.overrides)?;
        let device = Device::open(config.switches.compute.backend)?;
        let _page = args.watch.then(|| crate::watch::beside(&dir, screen));
        return crate::folds::train(&dir, Resume::Must, &config, &starting, &device, &stop, screen);
    }
    let advice = Advice::new(Some(&dir), &args.ranks, role.ranks());
    let Some(ranks) = many::join(&role, &args.ranks, Some(&dir), &starting, screen, &advice)? else {
        return Ok(ExitCode::FAILURE);
    };
    let result = resume_as(&ranks, args, &starting, &stop, screen, &advice);
    many::end(ranks, result)
}

/// Refuses sweeps and folds, which do not run on several ranks.
fn check_one_run(args: &ResumeRun, dir: &Path) -> Result<(), Failure> {
    if crate::sweep::begun(args)?.is_some() || folds::begun(dir)?.is_some() {
        return Err(Failure::User(UserError(format!(
            "{} holds several runs, which one process continues one after another: leave the ranks out",
            dir.display()
        ))));
    }
    Ok(())
}

fn resume_as(
    ranks: &Ranks,
    args: &ResumeRun,
    starting: &Starting,
    stop: &StopFlag,
    screen: &Screen,
    advice: &Advice,
) -> Result<ExitCode, Failure> {
    let screen = &many::screen(ranks, screen);
    let make = || Run::reopen(&model::named(&args.run)).map(Entered::Existing);
    let (run, _) = many::enter(ranks, starting, make, advice)?;
    let _page = (args.watch && ranks.is_first()).then(|| crate::watch::beside(run.dir(), screen));
    let (own, _) = asked_and_resolved(run.dir())?;
    let config = many::settings(ranks, own.resumed(&args.overrides)?)?;
    let device = many::device(&config, &args.ranks, ranks)?;
    run_through(&Rank { ranks, advice, device: &device }, &config, None, &run, stop, screen).map(exit_code)
}

fn exit_code(status: Status) -> ExitCode {
    if status == Status::Stopped { ExitCode::from(3) } else { ExitCode::SUCCESS }
}

/// Trains a run to its end or until it is stopped, and prints the result.
fn run_through(
    rank: &Rank<'_>,
    config: &Config,
    compiled: Option<Compiled>,
    run: &Run,
    stop: &StopFlag,
    screen: &Screen,
) -> Result<Status, Failure> {
    let Rank { ranks, advice, device } = *rank;
    let began = Instant::now();
    let mut progress: Option<Progress> = None;
    let (mut floor, mut begun_at, mut stopped_by) = (None, None, None);
    let mut sinks = Sinks::default();
    let sinks: &mut [&mut dyn Sink] = if ranks.is_first() { &mut sinks.all() } else { &mut [] };
    let outcome =
        train_among(
            &Worker { ranks, run, device },
            config,
            compiled,
            stop,
            sinks,
            &mut |notice| match notice {
                _ if !ranks.is_first() => {}
                Notice::Data(note) => screen.fact("data", note),
                Notice::Ready(ready) => {
                    start_block(ready, screen);
                    if let Err(error) = kept::write(ready.run, ready.config, ready.compiled) {
                        screen.note(format!("{} could not be written: {error}", kept::PLAN));
                    }
                    floor = ready.data.floor();
                    begun_at = Some(ready.done);
                    let is_of_images = ready.config.model.image_size().is_some();
                    progress = Some(Progress::new(*screen, [ready.steps, ready.done], is_of_images));
                }
                Notice::Event(event) => match &mut progress {
                    Some(progress) => progress.event(event),
                    None if screen.json => screen.json_line(&event.to_json()),
                    None => {}
                },
                Notice::Saving { step, bytes: size, signal } => {
                    stopped_by = Some((step, signal));
                    if let Some(progress) = &progress {
                        let again =
                            if signal == "SIGINT" { "; Ctrl-C again leaves without saving" } else { "" };
                        progress.line(format!("{signal}: saving step {step} ({}){again}", bytes(size)));
                    }
                }
            },
        );
    if let Some(progress) = &progress {
        progress.finish();
    }
    let outcome = outcome?;
    if outcome.status == Status::Stopped {
        if begun_at == Some(outcome.steps) && stopped_by.is_some_and(|(_, signal)| signal == TIME_IS_UP) {
            screen.note("no step was made: --max-time is too short for the start, one step and a save; give more time");
        }
        screen.note(format!(
            "stopped after step {}; continue with: {}",
            outcome.steps,
            advice.resume_command(run)
        ));
        return Ok(Status::Stopped);
    }
    if !screen.json && ranks.is_first() {
        end_block(&outcome, run, device, began, floor, screen)?;
    }
    Ok(outcome.status)
}

/// Whether a task of fine-tuning begins with random weights, which is rarely intended.
fn begins_at_random(config: &Config) -> bool {
    let is_tuned = !matches!(config.data.task, Task::Text | Task::Images)
        && config.data.source() != SourceKind::Synthetic;
    is_tuned && config.model.from().is_none()
}

/// Prints at most twelve lines: the model, data, steps, memory, device, and what `auto` chose.
fn start_block(ready: &Ready<'_>, screen: &Screen) {
    let Ready { config, compiled, data, run, steps, laps, .. } = ready;
    let recipe = if config.recipe.is_empty() { "recipe" } else { &config.recipe };
    screen.painted_note(screen.paint(Ink::Strong, format_args!("{recipe}  ->  {}", run.display())));
    screen.fact(
        "model",
        format!(
            "{} parameters{}: {}{}",
            short(compiled.parameters),
            match compiled.trained() {
                all if all == compiled.parameters => String::new(),
                some => format!(" ({} trained)", short(some)),
            },
            config.model.dimensions(),
            if begins_at_random(config) {
                "; its weights are random: give model.from to start from a pretrained model"
            } else {
                ""
            }
        ),
    );
    let described = data.describe();
    let words = data.vocabulary().map_or(0, |vocabulary| vocabulary.size());
    let about = if described.is_estimated { "about " } else { "" };
    let data_line = match (data.floor(), described.tokens) {
        (Some(floor), _) => format!(
            "a synthetic language of {words} words; no model gets below {:.4} nats a token, no trigram model below {:.4}",
            floor.nats, floor.trigram_nats
        ),
        (None, Some(tokens)) => format!(
            "{about}{} tokens in {} {}, {} held out; vocabulary {words}{}",
            count(tokens),
            count(described.documents.unwrap_or(0)),
            match config.data.task {
                Task::Preference if config.together() > 1 => "pairs",
                _ if config.data.has_examples() => "examples",
                _ => "documents",
            },
            count(described.held_out_documents.unwrap_or(0)),
            if config.data.source() == SourceKind::Synthetic {
                "; they are synthetic: give data.path to train on yours"
            } else {
                ""
            }
        ),
        (None, None) => match data.sentence() {
            Some(sentence) => sentence,
            None => format!("an endless stream; vocabulary {words}"),
        },
    };
    screen.fact("data", data_line);
    let batch = config.train.batch;
    let steps_of_run = steps;
    let (steps, lr) = (count(*steps), format!("lr {} {}", config.optimizer.lr, config.schedule.name));
    let tokens = count(prediction::tokens_per_update(config, compiled) as u64);
    match &compiled.settled.arrangement {
        None if config.model.image_size().is_some() => screen.fact(
            "train",
            format!("{steps} steps of {batch} images, {} at once; {lr}", compiled.micro_batch),
        ),
        None => screen.fact(
            "train",
            format!(
                "{steps} steps of {batch} rows ({tokens} tokens), {} at once; {lr}",
                compiled.micro_batch
            ),
        ),
        Some(arrangement) => {
            let unit = if config.together() > 1 { "pairs" } else { "examples" };
            screen.fact("train", format!("{steps} steps of {batch} {unit} (about {tokens} tokens); {lr}"));
            screen.fact("lengths", arrangement.words());
        }
    }
    if let Some(horizon) = config.schedule.horizon_steps.filter(|horizon| horizon < steps_of_run) {
        let (spanned, all) = (count(horizon), count(*steps_of_run));
        screen.fact(
            "schedule",
            format!("it spans {spanned} of the {all} steps; after them the learning rate stays constant"),
        );
    }
    screen.fact(
        "memory",
        format!("{}, planned to the byte: flatout plan shows it", bytes(compiled.plans.arena_bytes as u64)),
    );
    let device_line = match compiled.target.name.as_str() {
        "cpu" => format!("{}cpu with {} threads", ranks_in_words(compiled), compiled.target.cores),
        gpu => match (compiled.target.ranks, device::visible_gpus()) {
            (1, 0 | 1) => gpu.to_string(),
            (1, visible) => format!("{gpu} (1 of {visible}: --gpus {visible} uses all)"),
            _ => format!("{}{gpu}", ranks_in_words(compiled)),
        },
    };
    screen.fact("device", device_line);
    screen.fact("start", spent(laps));
    let chosen: Vec<String> =
        compiled.settled.chosen.iter().map(|c| format!("{}={}", c.switch, c.value)).collect();
    screen.fact("auto", format!("{} (why: flatout plan)", chosen.join(" ")));
    if let Some(layers) = fp8_layers::sentence(&compiled.plans, &compiled.settled) {
        screen.note(layers);
    }
    if screen.verbose {
        for report in &compiled.plans.done {
            screen.note(format!("  {:5} {:13} {}", report.role.name(), report.pass, report.did));
        }
    }
}

/// The number of ranks, as the beginning of the device line; empty for one rank.
fn ranks_in_words(compiled: &Compiled) -> String {
    match compiled.target.ranks {
        1 => String::new(),
        ranks => format!("{ranks} ranks, each a "),
    }
}

/// The time of the start and of its parts of 0.1 s or more.
fn spent(laps: &Laps) -> String {
    let all: f64 = laps.iter().map(|(_, seconds)| seconds).sum();
    let parts = laps.iter().filter(|(_, seconds)| *seconds >= 0.1);
    let parts: Vec<String> = parts.map(|(name, seconds)| format!("{name} {seconds:.1}")).collect();
    match parts[..] {
        [] => format!("{all:.1} s"),
        _ => format!("{all:.1} s: {}", parts.join(", ")),
    }
}

/// Draws the smoothed loss over the steps on the terminal; draws nothing if the log cannot be read.
fn draw_loss(run: &Path) {
    const HEIGHT: usize = 8;
    let terminal = Term::stderr();
    let Ok(history) = History::read(run) else { return };
    let span = smoothing_span([&history]);
    let points = history.smoothed_curve(Axis::Step, |step| step.loss as f64, span);
    if points.len() < HEIGHT {
        return;
    }
    for line in sketch(&[Curve { name: "loss".into(), points }], Paper::of(&terminal, HEIGHT, false)) {
        // An error is ignored: the run does not need the terminal.
        let _ = waiting::above(|| terminal.write_line(&line));
    }
}

fn end_block(
    outcome: &Outcome,
    run: &Run,
    device: &Device,
    began: Instant,
    floor: Option<flatout_data::Floor>,
    screen: &Screen,
) -> Result<(), Failure> {
    let config = flatout_train::run::config(run.dir())?;
    let name = match (outcome.is_held_out, config.train.ema > 0.0) {
        (true, true) => "held-out loss of the averaged weights",
        (true, false) => "held-out loss",
        (false, _) => "loss",
    };
    let took = duration(began.elapsed().as_secs_f64());
    screen.result_fact("done", format_args!("{} steps in {took}", count(outcome.steps)));
    let result = match floor {
        Some(floor) => format!(
            "{name} {:.4}: {:.1}% above the floor of {:.4}; the best trigram model stays {:.1}% above it",
            outcome.loss,
            100.0 * (outcome.loss as f64 / floor.nats - 1.0),
            floor.nats,
            100.0 * (floor.trigram_nats / floor.nats - 1.0)
        ),
        None => match &outcome.metrics {
            Some(metrics) => format!("{name} {:.4}  {}", outcome.loss, metrics.words()),
            None => {
                let each = if config.model.classes().is_some() { "each" } else { "a token" };
                format!("{name} {:.4} nats {each}", outcome.loss)
            }
        },
    };
    screen.coloured(Ink::Strong.paint(&printable(&result), screen.result_colours));
    if let Some(why) = &outcome.early {
        screen.result_fact("early", why);
    }
    if screen.live {
        draw_loss(run.dir());
    }
    let (model, dir) = (&config.model, run.dir().display());
    let is_text = model.vocab().is_some();
    let next: Vec<(String, &str)> = match (model.classes().is_some(), is_text) {
        (true, true) => {
            vec![(format!("flatout eval {dir} --predict FILE --out FILE.csv"), "classes of new texts")]
        }
        (true, false) => vec![
            (format!("flatout eval {dir}"), "accuracy and confusion matrix"),
            (format!("flatout eval {dir} --predict FOLDER --out FILE.csv"), "classes of new images"),
        ],
        (false, false) => vec![],
        (false, true) if config.sight() == Some(Sight::Images) => vec![
            (format!("flatout generate {dir} --image PHOTO --prompt QUESTION"), "ask it about an image"),
            (format!("flatout export {dir} --to out"), "export it for other tools"),
        ],
        (false, true) if config.sight() == Some(Sight::Frames) => vec![
            (format!("flatout generate {dir} --frames FOLDER --prompt QUESTION"), "ask it about a video"),
            (format!("flatout export {dir} --to out"), "export it for other tools"),
        ],
        (false, true) if [Task::Chat, Task::Preference].contains(&config.data.task) => vec![
            (format!("flatout generate {dir} --chat --prompt QUESTION"), "ask it"),
            (format!("flatout export {dir} --to out"), "export it for other tools"),
        ],
        (false, true) => {
            let text = sample_of_text(run, device, outcome.steps, screen)?;
            screen.result_fact("sample", one_line(&text));
            let recipe = if config.recipe.is_empty() { "tiny" } else { &config.recipe };
            let with_text = match config.data.source() {
                SourceKind::Synthetic => {
                    (format!("flatout train {recipe} data.path=book.txt"), "train on your own text")
                }
                _ => (format!("flatout eval {dir} data.path=other.txt"), "its loss on another text"),
            };
            let changed = (
                format!("flatout train {recipe} model.layers=6 lr=1e-3"),
                "change any key; flatout schema lists them",
            );
            vec![(format!("flatout generate {dir}"), "more text from this model"), with_text, changed]
        }
    };
    screen.result_fact("run", &dir);
    screen.result_fact("report", format_args!("{dir}/report.md"));
    let widest = next.iter().map(|(command, _)| command.chars().count()).max().unwrap_or(0);
    for (i, (command, what)) in next.iter().enumerate() {
        screen.fact(if i == 0 { "next" } else { "" }, format!("{command:<widest$}   {what}"));
    }
    Ok(())
}

/// Generates a sample at the end of a text model's run, and keeps it with the run's samples.
fn sample_of_text(run: &Run, device: &Device, step: u64, screen: &Screen) -> Result<String, Failure> {
    let mut generator = Generator::open(run.dir(), device)?;
    let sampling = Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, seed: 1, max_tokens: 60 };
    let written = generator.generate("", sampling, |_| {})?;
    let text = written.trim().to_string();
    let sample =
        Sample { step, prompt: String::new(), text: Some(text.clone()), image: None, prediction: None };
    if let Err(error) = samples::append(run.dir(), &sample) {
        screen.note(format!("{} could not be written: {error}", samples::SAMPLES));
    }
    Ok(text)
}
