//! The loop: micro-batches into `grad`, then `apply`; evaluation, checkpoints, events, signals.

mod recovery;
mod saving;
mod sharing;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use flatout_data::{Layout, OpenEvent, Waited};
use flatout_ir::Class;
use flatout_ir::passes::lanes::lanes_a_rank;
pub use flatout_runtime::Laps;
use flatout_runtime::{Mark, Posted, Session};

use crate::Failure;
use crate::UserError;
use crate::config::Config;
use crate::config::resolved::Resolved;
use crate::device::Device;
use crate::metrics::Metrics;
use crate::metrics::goal::Patience;
use crate::ranks::Ranks;
use crate::resolve::arranged;
use crate::resolve::compile::{self, Compiled};
use crate::resolve::lanes;
use crate::run::Run;
use crate::run::checkpoint::{self, Retention, State, Together};
use crate::run::events::{self, DataWait, End, Event, EventLog, Status, Step};
use crate::run::signal::StopFlag;
use crate::run::state::{check_schema, load, saved_bytes};
use crate::run::writer::Writer;
use crate::switches::active;
use crate::tasks::batch::{Batch, BatchSource, Draw, EvalSet};
use crate::tasks::dataset::{self, Dataset};
use crate::tasks::preference::Side;
use crate::tasks::{self, image_table};
use crate::training::baseline;
use crate::training::evaluate::Counted;
use crate::training::host;
use crate::training::opening;
use crate::training::reference;
use crate::training::schedule::learning_rates;
use crate::training::shared_eval::evaluate_among;
use crate::training::spike::{Spike, Spikes};
use crate::training::stragglers::StepTimes;
use crate::training::update::{Results, accumulate, apply, collect, end_lanes};
use crate::training::vision_cache;
use crate::training::watch::Watch;
use crate::weights::pretrained;
use recovery::Skips;
use saving::Saving;
use sharing::Sharing;

/// What the command line shows while a run goes on.
pub enum Notice<'a> {
    /// What opening the data came to, or how far it is.
    Data(String),
    /// Everything is ready; nothing has run yet.
    Ready(&'a Ready<'a>),
    /// A line of the event log.
    Event(&'a Event),
    /// A stop was asked for, by a signal or `--max-time`, and the state is being saved.
    Saving { step: u64, bytes: u64, signal: &'static str },
}

/// A run that is about to start.
pub struct Ready<'a> {
    pub config: &'a Config,
    pub compiled: &'a Compiled,
    pub data: &'a dyn Dataset,
    pub run: &'a Path,
    /// Updates of the whole run.
    pub steps: u64,
    /// The last update made already.
    pub done: u64,
    /// Where time went until now.
    pub laps: &'a Laps,
}

/// Somebody beside the log who is told every event of a run, such as TensorBoard's file or the report.
pub trait Sink {
    /// The run is about to start, or to go on after `step` updates.
    fn open(&mut self, run: &Path, step: u64, config: &Config);

    /// Records an event, after the log has it. Gives a sentence to warn with where that did not work: no sink ends a run.
    fn record(&mut self, event: &Event) -> Option<String>;
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub status: Status,
    pub steps: u64,
    /// Held-out where there is an evaluation, otherwise of the last step.
    pub loss: f32,
    pub is_held_out: bool,
    /// Of the last evaluation, where classes, answers or preferences are learned.
    pub metrics: Option<Metrics>,
    /// Why it ended before its last step, where nobody stopped it.
    pub early: Option<String>,
    pub checkpoint: Option<PathBuf>,
}

/// Trains a run from its beginning or its last checkpoint to its end, a signal or a failure. `early` are plans that were
/// made of the config already.
pub fn train(
    asked: &Config,
    early: Option<Compiled>,
    run: &Run,
    device: &Device,
    stop: &StopFlag,
    sinks: &mut [&mut dyn Sink],
    notice: &mut dyn FnMut(Notice<'_>),
) -> Result<Outcome, Failure> {
    train_among(&Worker { ranks: &Ranks::alone(), run, device }, asked, early, stop, sinks, notice)
}

/// One process of a run: its rank, the run's directory and what it computes on.
pub struct Worker<'a> {
    pub ranks: &'a Ranks,
    pub run: &'a Run,
    pub device: &'a Device,
}

/// The same as one of several ranks, each of which calls this.
pub fn train_among(
    worker: &Worker<'_>,
    asked: &Config,
    early: Option<Compiled>,
    stop: &StopFlag,
    sinks: &mut [&mut dyn Sink],
    notice: &mut dyn FnMut(Notice<'_>),
) -> Result<Outcome, Failure> {
    let Worker { ranks, run, device } = *worker;
    let mut laps = device.laps();
    let mut resolved = run.resolved()?;
    let config = &resolved.over(asked);
    // What cannot run is refused before data is opened.
    let early = match early {
        Some(compiled) => compiled,
        None => compile::compile(config, &ranks.target(device.target(&config.switches)))?,
    };
    laps.lap("plans");
    let (mut left_out, mut notes) = (Vec::new(), 0);
    // Rank 0 opens the data first: the others find the tokenisers and caches that it made.
    let data = ranks.in_turn(|| {
        tasks::open(config, Some(run.dir()), &mut |said| match said {
            OpenEvent::Note(said) => {
                notes += 1;
                ranks.at(0, "opening the data", notes);
                notice(Notice::Data(said));
            }
            OpenEvent::LeftOut(said) => left_out.push(said),
        })
    })?;
    laps.lap("data");
    left_out.extend(data.changed(&resolved));
    data.measure(config, &mut resolved);
    let measured = resolved.over(asked);
    let target = || ranks.target(device.target(&config.switches));
    let mut compiled = match measured == *config {
        true => early,
        false => compile::compile(&measured, &target())?,
    };
    if ranks.are_many() {
        let own = compiled.pinned_over(&measured, &resolved);
        let of_first = ranks.of_first(own.clone())?;
        // `auto` may have come to something else here: rank 0's choices hold.
        if of_first != own {
            compiled = compile::compile(&of_first.over(asked), &target())?;
        }
        if !ranks.is_first() {
            resolved = of_first;
        }
    }
    laps.lap("plans");
    let opened = Opened { data, resolved, compiled, left_out, laps };
    train_on_among(worker, asked, opened, stop, sinks, notice)
}

/// What is open before a run's state is.
pub struct Opened {
    pub data: Box<dyn Dataset>,
    /// The resolved config so far.
    pub resolved: Resolved,
    pub compiled: Compiled,
    /// What of the data was left out, in words.
    pub left_out: Vec<String>,
    /// Where time went until now.
    pub laps: Laps,
}

/// As [`train`], on data that is open and plans that were made for it.
pub fn train_on(
    asked: &Config,
    opened: Opened,
    run: &Run,
    device: &Device,
    stop: &StopFlag,
    sinks: &mut [&mut dyn Sink],
    notice: &mut dyn FnMut(Notice<'_>),
) -> Result<Outcome, Failure> {
    train_on_among(&Worker { ranks: &Ranks::alone(), run, device }, asked, opened, stop, sinks, notice)
}

/// The same as one of several ranks.
fn train_on_among(
    worker: &Worker<'_>,
    asked: &Config,
    opened: Opened,
    stop: &StopFlag,
    sinks: &mut [&mut dyn Sink],
    notice: &mut dyn FnMut(Notice<'_>),
) -> Result<Outcome, Failure> {
    let Worker { ranks, run, device } = *worker;
    let Opened { mut data, mut resolved, compiled, mut left_out, mut laps } = opened;
    let config = &resolved.over(asked);
    if ranks.are_many() && config.data.vision_cache.is_some() {
        return Err(Failure::User(UserError(
            "`data.vision_cache` is filled by one process so far: leave it out, or train with one rank"
                .into(),
        )));
    }
    let steps = data.total_steps(config)?;
    data.check_classes(config)?;
    image_table::check(config)?;
    host::check(config, &compiled)?;
    resolved.begin_here();
    let horizon = config.schedule.horizon_steps.unwrap_or(steps);
    resolved.horizon_steps = Some(horizon);
    resolved.warmup_steps = config.schedule.resolved_warmup(horizon).or(resolved.warmup_steps);
    // Where ranks cannot share out the run's lanes, bits are not promised, and what the run began with stays written down.
    let is_begun = !resolved.capacities.is_empty();
    let (began_lanes, lanes) = (config.train.lanes.given(), compiled.settled.options.lanes);
    let began_lanes = began_lanes.unwrap_or(if is_begun { 1 } else { lanes });
    left_out.extend(lanes::other_bits(began_lanes, ranks.count(), lanes));
    left_out.extend(lanes::lowered(asked, lanes));
    let has_its_lanes = began_lanes == lanes;
    if has_its_lanes && is_begun && resolved.capacities != compiled.capacities {
        return Err(Failure::User(UserError(
            "the plans of this run have other capacities than those it began with (resolved.toml): the version that began \
             it lays examples out otherwise; go on with that one"
                .into(),
        )));
    }
    if has_its_lanes {
        compiled.pin(config, &mut resolved);
    } else if config.train.micro_batch().is_none() {
        resolved.micro_batch = Some(compiled.micro_batch);
    }
    pretrained::pin(config, &mut resolved, run.dir())?;
    resolved = ranks.of_first(resolved)?;
    ranks.check_equal(
        "the plans",
        || compiled.plans.to_string(),
        "start the same program with the same settings on like hosts",
    )?;
    let config = &resolved.over(asked);
    let say = &mut |said| notice(Notice::Data(said));
    let tower = vision_cache::prepare(config, &mut *data, Some(run.dir()), device, say)?;
    if tower.is_some() {
        laps.lap("features");
    }
    let data = &*data;
    let layout = compiled.settled.arrangement.as_ref().map(|a| arranged::eval_layout(config, a));
    let held_out = match compiled.eval_batch {
        0 => None,
        _ => Some(data.eval_set(config, dataset::Share::HeldOut, config.eval.rows, layout.as_ref())?),
    };
    let found = checkpoint::latest_among(ranks, &run.checkpoints_dir(), |_| true)?;
    if ranks.is_first() {
        checkpoint::clean(&run.checkpoints_dir()).map_err(Failure::io("cleaning up"))?;
    }
    if let Some(whole) = &found.whole {
        let (_, file) = checkpoint::open(&whole.path).map_err(Failure::io(whole.path.display()))?;
        check_schema(&compiled.plans, &file)?;
    }
    let say = &mut |said: String| notice(Notice::Data(said));
    let scores = reference::by_another(ranks, config, data, run.dir(), layout.as_ref(), device, say)?;
    laps.lap("data");
    let mut session = device.session_among(compiled.plans.clone(), &compiled.settled, ranks.wire())?;
    match session.as_cuda() {
        Some(cuda) => laps.take(cuda.laps()),
        None => laps.lap("session"),
    }
    data.prepare(&mut session)?;
    let mut origin = None;
    let (progress, source, skips, patience) = match &found.whole {
        Some(whole) => {
            let (progress, cursor, skips, patience) = resume(config, &mut session, run.dir(), &whole.path)?;
            (
                progress,
                data.source(config, compiled.feeding_rank(ranks.rank()), Some(cursor))?,
                skips,
                patience,
            )
        }
        None => {
            origin = pretrained::begin(config, &mut session)?;
            // The run depends on its tower although no plan has it.
            if let (Some(origin), Some(tower)) = (&mut origin, tower) {
                origin.frozen.extend(tower.hashes);
            }
            let source = data.source(config, compiled.feeding_rank(ranks.rank()), None)?;
            (Progress::default(), source, Skips::default(), Patience::default())
        }
    };
    let cursors = ranks.gather(&source.cursor())?;
    checkpoint::merged(&cursors)
        .map_err(|other| ranks.unequal("the data", other, "the same files must lie on every host"))?;
    left_out.extend(data.cost_of_sharing(config, compiled.feeding_rank(ranks.rank())));
    laps.lap("weights");
    left_out.extend(origin.as_ref().and_then(|origin| origin.left_out.clone()));
    if progress.step > steps {
        return Err(Failure::User(UserError(format!(
            "the run is at step {} already and train.steps is {steps}: give a larger train.steps",
            progress.step
        ))));
    }
    // First of all, so that whatever is written after it lies in a run that can be continued.
    if ranks.is_first() {
        run.save_config(asked, &resolved)?;
    }
    let (log, earlier) = ranks.in_turn(|| {
        let path = run.events_path();
        match ranks.is_first() {
            true => EventLog::reopen(&path).map(|(log, earlier)| (Some(log), earlier)),
            false => events::read(&path).map(|earlier| (None, earlier)),
        }
        .map_err(unreadable_log)
    })?;
    let mut lines = events::steps(&earlier);
    lines.retain(|line| line.step <= progress.step);
    let last_loss = lines.last().filter(|s| s.step == progress.step).map_or(f32::NAN, |s| s.loss);
    let mut spikes = Spikes::default();
    for line in &lines {
        spikes.see(line.loss, 0.0);
    }
    let writer = Writer::new(run.checkpoints_dir(), Together::of(ranks));
    let writer = writer.map_err(Failure::io("the writer of checkpoints"))?;
    let newest = found.whole.map(|whole| (whole.step, whole.path));
    let is_resumed = newest.is_some();
    let best = checkpoint::best(&run.checkpoints_dir()).filter(|best| best.step <= progress.step);
    let kept = Retention::of(config, best, skips.in_a_row);
    if ranks.is_first() {
        checkpoint::prune(&run.checkpoints_dir(), progress.step, &kept)
            .map_err(Failure::io("cleaning up"))?;
        if let Some(vocabulary) = data.vocabulary() {
            run.keep_tokenizer(vocabulary)?;
        }
        origin.map_or(Ok(()), |origin| origin.keep(run.dir()))?;
    }
    let mut scored = 0;
    let say = &mut |said: String| {
        scored += 1;
        ranks.at(progress.step, "scoring answers by the reference", scored);
        notice(Notice::Data(said));
    };
    let scoring = (&mut session, layout.as_ref());
    reference::give((ranks, run.dir()), config, data, scoring, scores, !is_resumed, say)?;
    if config.has_reference() {
        laps.lap("reference");
    }

    for sink in sinks.iter_mut() {
        sink.open(run.dir(), progress.step, config);
    }
    let done = progress.step;
    let ready = Ready { config, compiled: &compiled, data, run: run.dir(), steps, done, laps: &laps };
    let draw = Draw { seed: config.train.seed, step: 0 };
    let evaluation = events::eval_at(&earlier, progress.step);
    let mut trainer = Trainer {
        ranks,
        config,
        run,
        compiled: &compiled,
        data,
        session,
        source,
        held_out,
        layout,
        log,
        sinks,
        watch: Watch::new(&compiled, config.train.batch, device),
        notice,
        stop,
        draw,
        steps,
        horizon,
        progress,
        saving: Saving::new(writer, saved_bytes(&compiled.plans), newest, best),
        skips,
        spikes,
        is_log_behind: false,
        slowest_step: Duration::ZERO,
        last_loss,
        pending: None,
        is_past_peak: false,
        samples_left_out: 0,
        agreed_stop: None,
        sharing: Sharing::new(ranks.count()),
        ended: None,
        evaluated: evaluation.as_ref().map(|(loss, _)| (progress.step, *loss)),
        score: evaluation.as_ref().and_then(|(loss, metrics)| config.eval.metric.of(*loss, metrics.as_ref())),
        metrics: evaluation.and_then(|(_, metrics)| metrics),
        patience,
        began: Instant::now(),
        began_tokens: progress.tokens,
    };
    // Before ranks meet for the last time: who is still asked to leave at once knows that nobody has begun.
    stop.begin_steps();
    ranks.begin_steps()?;
    for (path, why) in found.skipped {
        trainer.say(Event::Warning { message: format!("{} is not used: {why}", path.display()) })?;
    }
    (trainer.notice)(Notice::Ready(&ready));
    trainer.start(is_resumed, &laps)?;
    for message in left_out {
        trainer.say(Event::Warning { message })?;
    }
    // The time before the first step belongs to the start.
    trainer.began = Instant::now();
    let outcome = trainer.run();
    if outcome.is_err() {
        // What failed is what the caller is told; what can still be written down is.
        let _ = trainer.collect_saved(true).and_then(|()| trainer.end(Status::Failed));
    }
    outcome
}

/// A log that is damaged is the user's to judge: the run itself does not need it.
fn unreadable_log(error: std::io::Error) -> Failure {
    match error.kind() {
        std::io::ErrorKind::InvalidData => {
            UserError(format!("{error}: remove that line, or move the file away; checkpoints do not need it"))
                .into()
        }
        _ => Failure::Environment(format!("events.jsonl: {error}")),
    }
}

/// Before a save has been timed, how long it is taken to last whatever its size, and how fast its bytes to go.
const GUESSED_SECONDS: f64 = 1.0;
const GUESSED_BYTES_PER_SECOND: f64 = 1e8;
/// Time kept beside what was measured when `--max-time` is near: the end of the process itself.
const STOP_MARGIN: Duration = Duration::from_secs(1);

/// What a run has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    pub step: u64,
    pub tokens: u64,
    pub samples: u64,
}

impl Progress {
    fn of(state: &State) -> Result<Progress, Failure> {
        let (tokens, samples) = (count(state, "tokens")?, count(state, "samples")?);
        Ok(Progress { step: state.step, tokens, samples })
    }
}

fn count(state: &State, name: &str) -> Result<u64, Failure> {
    let absent = || Failure::Environment(format!("the checkpoint of step {} has no `{name}`", state.step));
    state.counters.get(name).copied().ok_or_else(absent)
}

type Begun = (Progress, serde_json::Value, Skips, Patience);

fn resume(config: &Config, session: &mut Session, run: &Path, path: &Path) -> Result<Begun, Failure> {
    let (state, file) = checkpoint::open(path).map_err(Failure::io(path.display()))?;
    pretrained::resume(config, session, run)?;
    load(session, &file, Class::is_saved)?;
    let (total, in_a_row) = (count(&state, "skipped")?, count(&state, "skipped_in_a_row")?);
    let (progress, patience) = (Progress::of(&state)?, patience(&state));
    Ok((progress, state.cursor, Skips { total, in_a_row, rollbacks: 0 }, patience))
}

fn patience(state: &State) -> Patience {
    Patience::read(|name| state.counters.get(name).copied())
}

/// An update whose results are on their way.
struct Pending {
    progress: Progress,
    epoch: f64,
    waited: Waited,
    /// Of `Config::rates`.
    rates: Vec<f32>,
    posted: Posted,
    /// The end of the update before, or the beginning of this one where something else ran between them; and its end.
    span: [Rc<Mark>; 2],
    /// Tokens of this update, and the share of what it computed that is padding, where lengths vary.
    real_tokens: usize,
    padding: Option<f64>,
    /// Tokens of this rank.
    own_tokens: usize,
    /// The step's micro-batches, until it is known to be finite.
    batches: Vec<Batch>,
}

struct Trainer<'a, 'n, 's> {
    ranks: &'a Ranks,
    config: &'a Config,
    run: &'a Run,
    compiled: &'a Compiled,
    data: &'a dyn Dataset,
    session: Session,
    source: Box<dyn BatchSource>,
    held_out: Option<Box<dyn EvalSet>>,
    /// How the plan `eval` is laid out, where examples have lengths.
    layout: Option<Layout>,
    /// Of rank 0.
    log: Option<EventLog>,
    sinks: &'n mut [&'s mut dyn Sink],
    watch: Watch,
    notice: &'n mut dyn FnMut(Notice<'_>),
    stop: &'a StopFlag,
    draw: Draw,
    steps: u64,
    horizon: u64,
    progress: Progress,
    saving: Saving,
    skips: Skips,
    spikes: Spikes,
    /// The log's disk does not take what is said: it waits in memory.
    is_log_behind: bool,
    /// Of the last steps.
    slowest_step: Duration,
    last_loss: f32,
    /// The update that was enqueued last, until it is reported.
    pending: Option<Pending>,
    /// A step was reported that no device can make.
    is_past_peak: bool,
    /// Samples of which nothing was learned since this process began.
    samples_left_out: u64,
    /// Why all ranks stop, where there are several and one was asked to.
    agreed_stop: Option<&'static str>,
    sharing: Sharing,
    /// The end of the newest update, as long as nothing but updates was run behind it.
    ended: Option<Rc<Mark>>,
    /// The newest evaluation.
    evaluated: Option<(u64, f32)>,
    /// What it came to in `eval.metric`.
    score: Option<f64>,
    /// And, where classes are learned, in all metrics.
    metrics: Option<Metrics>,
    patience: Patience,
    began: Instant,
    began_tokens: u64,
}

impl Trainer<'_, '_, '_> {
    fn say(&mut self, event: Event) -> Result<(), Failure> {
        let Some(log) = &mut self.log else { return Ok(()) };
        let written = log.write(&event);
        (self.notice)(Notice::Event(&event));
        let warnings: Vec<String> = self.sinks.iter_mut().filter_map(|sink| sink.record(&event)).collect();
        for message in warnings {
            self.say(Event::Warning { message })?;
        }
        let was_behind = std::mem::replace(&mut self.is_log_behind, written.is_err());
        match written {
            Err(error) if !was_behind => {
                let message = format!("events.jsonl: {error}; the run goes on, and its lines wait in memory");
                self.say(Event::Warning { message })
            }
            _ => Ok(()),
        }
    }

    fn start(&mut self, is_resumed: bool, laps: &Laps) -> Result<(), Failure> {
        let Trainer { ranks, config, compiled, data, ref session, steps, .. } = *self;
        self.say(Event::Start(opening::opening(ranks, config, compiled, data, session, steps, laps)))?;
        let notes: Vec<String> = self.session.notes().iter().chain(self.watch.note()).cloned().collect();
        for message in notes {
            self.say(Event::Warning { message })?;
        }
        if is_resumed {
            self.say(Event::Resume { step: self.progress.step })?;
            let autotune = active::Prepared::session(&self.session, &self.compiled.settled).autotune;
            if let Some(message) = active::resumed(&self.not_deterministic(), autotune) {
                self.say(Event::Warning { message })?;
            }
        }
        Ok(())
    }

    fn not_deterministic(&self) -> Vec<&'static str> {
        active::not_deterministic(&self.compiled.plans, &self.compiled.target)
    }

    fn run(&mut self) -> Result<Outcome, Failure> {
        match self.train()? {
            Some(reason) => self.stopped(reason),
            None => {
                self.save_now()?;
                self.end(Status::Done)
            }
        }
    }

    /// Trains to the end of the run, or to a reason to stop.
    fn train(&mut self) -> Result<Option<&'static str>, Failure> {
        // A run that was stopped in an evaluation has it still to do.
        let mut reason = if self.progress.step > 0 { self.evaluate_if_due()? } else { None };
        loop {
            while reason.is_none() && self.progress.step < self.steps && self.early().is_none() {
                reason = self.stop_asked();
                if reason.is_some() {
                    break;
                }
                self.step()?;
                if self.recover()? {
                    continue;
                }
                reason = self.evaluate_if_due()?;
                if self.progress.step < self.steps && reason.is_none() {
                    self.save_if_due()?;
                }
                self.collect_saved(false)?;
            }
            self.flush()?;
            if reason.is_some() {
                return Ok(reason);
            }
            if !self.recover()? {
                return self.evaluate();
            }
        }
    }

    /// Why to stop, if there is a reason: a signal, or so little time left that it is what a step and a save may take.
    fn stop_asked(&self) -> Option<&'static str> {
        match self.ranks.are_many() {
            true => self.agreed_stop,
            false => self.stop.asked(self.time_to_stop()),
        }
    }

    /// The time that a step and a save may take.
    fn time_to_stop(&self) -> Duration {
        let guessed = GUESSED_SECONDS + self.saving.bytes as f64 / GUESSED_BYTES_PER_SECOND;
        let save = self.saving.slowest_seconds.unwrap_or(guessed);
        STOP_MARGIN + 2 * self.slowest_step + Duration::from_secs_f64(2.0 * save)
    }

    /// One update. On a GPU it is only enqueued: what it gave is reported while the next one runs.
    fn step(&mut self) -> Result<(), Failure> {
        let began = match self.ended.take() {
            Some(mark) => mark,
            None => Rc::new(self.session.mark()?),
        };
        self.draw.step = self.progress.step;
        let (mut epoch, mut waited) = (0.0, Waited::default());
        let (mut real_tokens, mut computed_tokens) = (0, 0);
        let since = Instant::now();
        self.ranks.take_wire_time();
        self.source.begin_update();
        if let Some(compared) = self.data.compared() {
            let (of, layout) = ((Side::Train, &*self.source.numbers()), self.layout.as_ref());
            baseline::take_among(self.ranks, &mut self.session, compared, of, layout)?;
        }
        let wire = self.ranks.take_wire_time();
        let (mut batches, mut warnings) = (vec![], vec![]);
        let mut lane = 0;
        let lanes = lanes_a_rank(&self.compiled.settled.options);
        while let Some(batch) = self.source.next_batch()? {
            #[cfg(test)]
            let batch = tests::disturbed(batch);
            epoch = batch.epoch;
            waited += batch.waited;
            real_tokens += batch.real_tokens;
            computed_tokens += batch.computed_tokens;
            warnings.extend(batch.left_out.iter().cloned());
            end_lanes(&mut self.session, lane..batch.lane, lanes)?;
            lane = batch.lane;
            accumulate(&mut self.session, &batch, self.draw)?;
            batches.push(batch);
        }
        end_lanes(&mut self.session, lane..lanes, lanes)?;
        let own_tokens = real_tokens;
        let [real_tokens, computed_tokens] = self.source.of_all_ranks([real_tokens, computed_tokens]);
        let (spent, data) = (since.elapsed(), waited.total);
        self.pass_on_stop()?;
        let has_lengths = self.compiled.settled.arrangement.is_some();
        let padding = has_lengths.then(|| 1.0 - real_tokens as f64 / computed_tokens as f64);
        self.progress.step += 1;
        self.progress.tokens += real_tokens as u64;
        self.progress.samples += self.config.train.batch as u64;
        let rates = learning_rates(self.config, self.horizon, self.progress.step);
        let posted = apply(&mut self.session, &rates)?;
        let ms = |time: Duration| 1e3 * time.as_secs_f64();
        let times = StepTimes {
            step: self.progress.step,
            compute_ms: ms(spent.saturating_sub(data + wire)),
            data_ms: ms(data),
            wire_ms: ms(wire + self.ranks.take_wire_time()),
        };
        self.share(times, warnings)?;
        let ended = Rc::new(self.session.mark()?);
        self.ended = Some(Rc::clone(&ended));
        let (progress, span) = (self.progress, [began, ended]);
        let now = Pending {
            progress,
            epoch,
            waited,
            rates,
            posted,
            span,
            real_tokens,
            own_tokens,
            padding,
            batches,
        };
        if let Some(before) = self.pending.replace(now) {
            self.report(before)?;
        }
        if self.pending.as_ref().is_some_and(|p| p.posted.is_ready()) {
            self.flush()?;
        }
        Ok(())
    }

    /// Reports the update that is still on its way, if one is.
    fn flush(&mut self) -> Result<(), Failure> {
        self.pending.take().map_or(Ok(()), |pending| self.report(pending))
    }

    fn report(&mut self, update: Pending) -> Result<(), Failure> {
        let Pending { progress, epoch, waited, rates, posted, span, real_tokens, .. } = update;
        let Pending { own_tokens, padding, batches, .. } = update;
        let Progress { step, tokens, samples } = progress;
        let Results { loss, grad_norm, is_applied, rewards, stop } = collect(&mut self.session, posted)?;
        self.agreed_stop = self.agreed_stop.or(stop);
        let [began, ended] = &span;
        let seconds = self.session.between(began, ended)?.as_secs_f64();
        // Slow steps are forgotten by and by.
        self.slowest_step = self.slowest_step.mul_f64(0.95).max(Duration::from_secs_f64(seconds));
        self.last_loss = loss;
        if !is_applied {
            self.left_out(step, &batches)?;
        } else {
            self.skips.in_a_row = 0;
        }
        if let Some(spike) = self.spikes.see(loss, self.config.log.spike) {
            let Spike { median, deviations } = spike;
            self.say(Event::Spike { step, loss, median, deviations })?;
        }
        if !step.is_multiple_of(self.config.log.every) && step != self.steps {
            return Ok(());
        }
        let batch = self.config.train.batch;
        let seen = self.watch.see(own_tokens, seconds);
        if let Some(message) = self.watch.doubt(&seen, waited.total.as_secs_f64() / seconds) {
            self.say(Event::Warning { message })?;
        }
        if let Some(mfu) =
            seen.mfu.filter(|mfu| *mfu > 1.0 && !std::mem::replace(&mut self.is_past_peak, true))
        {
            let message = format!(
                "step {step} reads {:.0}% of the device's peak, which no device reaches: its time or the peak is wrong; \
                 please report it",
                100.0 * mfu
            );
            self.say(Event::Warning { message })?;
        }
        self.say(Event::Step(Step {
            step,
            epoch,
            loss,
            grad_norm,
            lr: rates[0],
            lrs: self.rates_by_name(&rates),
            tokens,
            samples,
            step_ms: 1e3 * seconds,
            tokens_per_second: real_tokens as f64 / seconds,
            samples_per_second: batch as f64 / seconds,
            skipped: self.skips.total,
            time: events::now(),
            mfu: seen.mfu,
            of_predicted: seen.of_predicted,
            of_roofline: seen.of_roofline,
            data_wait_ms: Some(1e3 * waited.total.as_secs_f64()),
            padding,
            gpu: seen.gpu,
            metrics: rewards.map(Metrics::Rewards),
            ranks: self.rank_times(),
        }))
    }

    /// Learning rates by the names of their groups, where there are several.
    fn rates_by_name(&self, rates: &[f32]) -> BTreeMap<String, f32> {
        let names = self.config.rates().into_iter().map(|rate| rate.name);
        if rates.len() == 1 { BTreeMap::new() } else { names.zip(rates.iter().copied()).collect() }
    }

    /// Evaluates where the config says so.
    fn evaluate_if_due(&mut self) -> Result<Option<&'static str>, Failure> {
        if self.progress.step < self.steps && self.is_eval_due() { self.evaluate() } else { Ok(None) }
    }

    fn is_eval_due(&self) -> bool {
        let every = self.config.eval_every(self.steps);
        every > 0 && self.progress.step.is_multiple_of(every)
    }

    /// The mean loss on held-out rows; or the reason to stop that came between two batches, and nothing is said then.
    fn evaluate(&mut self) -> Result<Option<&'static str>, Failure> {
        self.flush()?;
        let Some(held_out) = &self.held_out else { return Ok(None) };
        if self.evaluated.is_some_and(|(step, _)| step == self.progress.step) {
            return Ok(None);
        }
        self.ended = None;
        if let Some(compared) = self.data.compared() {
            let numbers: Vec<usize> = (0..held_out.samples()).collect();
            let (of, layout) = ((Side::HeldOut, &*numbers), self.layout.as_ref());
            baseline::take_among(self.ranks, &mut self.session, compared, of, layout)?;
        }
        let mut counted = Counted::new(self.config.model.classes());
        let (set, capacity, draw) = (&**held_out, self.compiled.eval_batch, self.draw);
        let (stop, within) = (self.stop, self.time_to_stop());
        let sums = evaluate_among(
            self.ranks,
            &mut self.session,
            (set, capacity, draw),
            self.progress.step,
            &mut || stop.asked(within),
            &mut |results| counted.see(results),
        )?;
        let loss = match sums {
            Ok(sums) => sums.mean() as f32,
            Err(reason) => return Ok(Some(reason)),
        };
        self.evaluated = Some((self.progress.step, loss));
        let (metric, metrics) = (self.config.eval.metric, counted.metrics());
        self.score = metric.of(loss, metrics.as_ref());
        // Not where a run that may go on has its end.
        if self.is_eval_due() {
            self.patience.see(metric, self.score.unwrap_or(f64::NAN));
        }
        self.metrics.clone_from(&metrics);
        let averaged = self.config.train.ema > 0.0;
        self.say(Event::Eval { step: self.progress.step, loss, metrics, averaged })?;
        Ok(None)
    }

    /// Why the run ends before its last step, where it does.
    fn early(&self) -> Option<String> {
        self.patience.ends(self.config.eval.metric, self.config.train.patience)
    }

    fn end(&mut self, status: Status) -> Result<Outcome, Failure> {
        if status != Status::Failed {
            self.hear_the_rest()?;
        }
        let evaluated = self.evaluated.filter(|(step, _)| *step == self.progress.step);
        let loss = evaluated.map_or(self.last_loss, |(_, loss)| loss);
        let seconds = self.began.elapsed().as_secs_f64();
        let early = self.early().filter(|_| status == Status::Done && self.progress.step < self.steps);
        let end = End {
            status,
            steps: self.progress.step,
            loss,
            loss_floor: self.data.floor().map(|floor| floor.nats),
            tokens_per_second: self.progress.tokens.saturating_sub(self.began_tokens) as f64 / seconds,
            skipped: self.skips.total,
            time: events::now(),
            data_wait: Some(DataWait::new(self.source.waited(), seconds)),
            early: early.clone(),
        };
        self.say(Event::End(end))?;
        if self.is_log_behind {
            let path = self.run.events_path();
            let sentence =
                format!("{} does not have the last lines: the disk did not take them", path.display());
            return Err(Failure::Environment(sentence));
        }
        let checkpoint = self.saving.newest.clone().map(|(_, path)| path);
        Ok(Outcome {
            status,
            steps: self.progress.step,
            loss,
            is_held_out: evaluated.is_some(),
            metrics: self.metrics.clone(),
            early,
            checkpoint,
        })
    }
}

#[cfg(test)]
mod tests;
