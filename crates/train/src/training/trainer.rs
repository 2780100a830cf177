//! The training loop: micro-batches run `grad`, then `apply` updates the weights; it also drives evaluation, checkpoints, events
//! and stop signals.

mod begin;
mod recovery;
mod saving;
mod sharing;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use flatout_data::{Layout, Waited};
use flatout_ir::Role;
use flatout_ir::passes::lanes::lanes_a_rank;
pub use flatout_runtime::Laps;
use flatout_runtime::{Mark, Posted, Session};

use crate::Failure;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::metrics::goal::Patience;
use crate::ranks::Ranks;
use crate::resolve::compile::Compiled;
use crate::resolve::windows;
use crate::run::Run;
use crate::run::checkpoint::State;
use crate::run::events::{self, DataWait, End, Event, EventLog, Status, Step};
use crate::run::signal::StopFlag;
use crate::switches::active;
use crate::tasks::batch::{Batch, BatchSource, Draw, EvalSet};
use crate::tasks::dataset::Dataset;
use crate::tasks::preference::AnswerSplit;
use crate::training::baseline;
use crate::training::evaluate::Counted;
use crate::training::opening;
use crate::training::samples::Samples;
use crate::training::schedule::learning_rates;
use crate::training::shared_eval::evaluate_among;
use crate::training::spike::{Spike, Spikes};
use crate::training::stragglers::StepTimes;
use crate::training::update::{Results, accumulate, apply, collect, end_lanes};
use crate::training::watch::Watch;
pub use begin::{Opened, Worker, train, train_among, train_on};
use recovery::Skips;
use saving::Saving;
use sharing::Sharing;

/// Progress that the command line shows while a run is under way.
pub enum Notice<'a> {
    /// Progress and outcome of opening the data.
    Data(String),
    /// Everything is prepared, and the first step is about to run.
    Ready(&'a Ready<'a>),
    /// A line of the event log.
    Event(&'a Event),
    /// A signal or `--max-time` asked the run to stop, and the state is being saved.
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
    /// The last update that was made already.
    pub done: u64,
    /// Time spent on each part of the start so far.
    pub laps: &'a Laps,
}

/// Receives every event of a run in addition to the log, such as TensorBoard's file or the report.
pub trait Sink {
    /// Called when the run is about to start, or to continue after `step` updates.
    fn open(&mut self, run: &Path, step: u64, config: &Config);

    /// Records an event once the log has it. Returns a warning if that failed: no sink ends a run.
    fn record(&mut self, event: &Event) -> Option<String>;
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub status: Status,
    pub steps: u64,
    /// Held-out loss where the run evaluates, otherwise the loss of the last step.
    pub loss: f32,
    pub is_held_out: bool,
    /// Metrics of the last evaluation, where classes, answers or preferences are learned.
    pub metrics: Option<Metrics>,
    /// Reason for ending before the last step, where nobody stopped the run.
    pub early: Option<String>,
    pub checkpoint: Option<PathBuf>,
}

/// Estimate until a save has been timed: a fixed time, and the rate at which bytes are written.
const GUESSED_SECONDS: f64 = 1.0;
const GUESSED_BYTES_PER_SECOND: f64 = 1e8;
/// Time reserved on top of the measured times when `--max-time` is near, for the process itself to end.
const STOP_MARGIN: Duration = Duration::from_secs(1);

/// The progress of a run.
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

fn patience(state: &State) -> Patience {
    Patience::read(|name| state.counters.get(name).copied())
}

/// An update whose results are still in flight.
struct Pending {
    progress: Progress,
    epoch: f64,
    waited: Waited,
    /// One rate for each of `Config::rates`.
    rates: Vec<f32>,
    posted: Posted,
    /// Start and end of the update. It starts at the end of the previous update, or at its own beginning if something else ran in
    /// between.
    span: [Rc<Mark>; 2],
    /// Tokens of this update, and the share of the computed tokens that is padding, where lengths vary.
    real_tokens: usize,
    padding: Option<f64>,
    /// Tokens that this rank computed.
    own_tokens: usize,
    /// The gradient plan that its micro-batches ran, where all have the same extents.
    grad: Role,
    /// The step's micro-batches, kept until the step is known to be finite.
    batches: Vec<Batch>,
}

struct Trainer<'a, 'n, 's> {
    ranks: &'a Ranks,
    config: &'a Config,
    run: &'a Run,
    compiled: &'a Compiled,
    data: &'a dyn Dataset,
    session: &'a mut Session,
    source: Box<dyn BatchSource>,
    held_out: Option<Box<dyn EvalSet>>,
    samples: Samples,
    /// Layout of the plan `eval`, where examples have lengths.
    layout: Option<Layout>,
    /// Present on rank 0 only.
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
    /// The disk refuses the log's lines, which wait in memory.
    is_log_behind: bool,
    /// Decaying maximum of the step times.
    slowest_step: Duration,
    last_loss: f32,
    /// The update that was enqueued last and is not reported yet.
    pending: Option<Pending>,
    /// The warning about a step faster than the device's peak was given.
    is_past_peak: bool,
    /// Samples since this process began that contributed nothing to training.
    samples_left_out: u64,
    /// The reason why all ranks stop, where there are several ranks and one was asked to stop.
    agreed_stop: Option<&'static str>,
    sharing: Sharing,
    /// The end of the newest update, as long as only updates have run since.
    ended: Option<Rc<Mark>>,
    /// Step and loss of the newest evaluation.
    evaluated: Option<(u64, f32)>,
    /// Value of `eval.metric` in the newest evaluation.
    score: Option<f64>,
    /// All metrics of the newest evaluation, where it has any.
    metrics: Option<Metrics>,
    patience: Patience,
    began: Instant,
    began_tokens: u64,
}

impl Trainer<'_, '_, '_> {
    fn emit(&mut self, event: Event) -> Result<(), Failure> {
        let Some(log) = &mut self.log else { return Ok(()) };
        let written = log.write(&event);
        (self.notice)(Notice::Event(&event));
        let warnings: Vec<String> = self.sinks.iter_mut().filter_map(|sink| sink.record(&event)).collect();
        for message in warnings {
            self.emit(Event::Warning { message })?;
        }
        let was_behind = std::mem::replace(&mut self.is_log_behind, written.is_err());
        match written {
            Err(error) if !was_behind => {
                let message = format!("events.jsonl: {error}; the run goes on, and its lines wait in memory");
                self.emit(Event::Warning { message })
            }
            _ => Ok(()),
        }
    }

    fn start(&mut self, is_resumed: bool, laps: &Laps) -> Result<(), Failure> {
        let Trainer { ranks, config, compiled, data, ref session, steps, .. } = *self;
        self.emit(Event::Start(opening::opening(ranks, config, compiled, data, session, steps, laps)))?;
        let notes: Vec<String> = self.session.notes().iter().chain(self.watch.note()).cloned().collect();
        for message in notes {
            self.emit(Event::Warning { message })?;
        }
        if is_resumed {
            self.emit(Event::Resume { step: self.progress.step })?;
            let autotune = active::Prepared::session(self.session, &self.compiled.settled).autotune;
            if let Some(message) = active::resumed(&self.not_deterministic(), autotune) {
                self.emit(Event::Warning { message })?;
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

    /// Trains to the end of the run, or until there is a reason to stop.
    fn train(&mut self) -> Result<Option<&'static str>, Failure> {
        // A run that was stopped during an evaluation still has to make it.
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

    /// The reason to stop, if there is one: a signal, or the time left is no more than a step and a save may take.
    fn stop_asked(&self) -> Option<&'static str> {
        match self.ranks.are_many() {
            true => self.agreed_stop,
            false => self.stop.asked(self.time_to_stop()),
        }
    }

    /// Upper estimate of the time that a step and a save take.
    fn time_to_stop(&self) -> Duration {
        let guessed = GUESSED_SECONDS + self.saving.bytes as f64 / GUESSED_BYTES_PER_SECOND;
        let save = self.saving.slowest_seconds.unwrap_or(guessed);
        STOP_MARGIN + 2 * self.slowest_step + Duration::from_secs_f64(2.0 * save)
    }

    /// Makes one update. On a GPU it is only enqueued: its results are reported while the next one runs.
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
            let (of, layout) = ((AnswerSplit::Train, &*self.source.numbers()), self.layout.as_ref());
            baseline::take_among(self.ranks, self.session, compared, of, layout)?;
        }
        let grad = windows::role(&self.config.schedule, self.horizon, self.progress.step + 1);
        let wire = self.ranks.take_wire_time();
        let (mut batches, mut warnings) = (vec![], vec![]);
        let mut lane = 0;
        let lanes = lanes_a_rank(&self.compiled.settled.options);
        while let Some(batch) = self.source.next_batch()? {
            #[cfg(test)]
            let batch = tests::disturbed(batch);
            let batch = windows::planned(batch, grad);
            epoch = batch.epoch;
            waited += batch.waited;
            real_tokens += batch.real_tokens;
            computed_tokens += batch.computed_tokens;
            warnings.extend(batch.left_out.iter().cloned());
            end_lanes(self.session, lane..batch.lane, lanes)?;
            lane = batch.lane;
            accumulate(self.session, &batch, self.draw)?;
            batches.push(batch);
        }
        end_lanes(self.session, lane..lanes, lanes)?;
        let own_tokens = real_tokens;
        let [real_tokens, computed_tokens] = self.source.of_all_ranks([real_tokens, computed_tokens]);
        let (spent, data) = (since.elapsed(), waited.total);
        // Exchanges inside `grad` are not compute time of this rank either.
        let wire = wire + self.ranks.take_wire_time();
        self.pass_on_stop()?;
        let has_lengths = self.compiled.settled.arrangement.is_some();
        let padding = has_lengths.then(|| 1.0 - real_tokens as f64 / computed_tokens as f64);
        self.progress.step += 1;
        self.progress.tokens += real_tokens as u64;
        self.progress.samples += self.config.train.batch as u64;
        let rates = learning_rates(self.config, self.horizon, self.progress.step);
        let posted = apply(self.session, &rates)?;
        let ms = |time: Duration| 1e3 * time.as_secs_f64();
        let times = StepTimes {
            step: self.progress.step,
            compute_ms: ms(spent.saturating_sub(data + wire)),
            data_ms: ms(data),
            wire_ms: ms(wire + self.ranks.take_wire_time()),
        };
        // On a GPU the host has only enqueued the work; the device's clock gives the times when the update is reported.
        let times = self.session.as_cuda().is_none().then_some(times);
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
            grad,
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

    /// Reports the update that is still in flight, if there is one.
    fn flush(&mut self) -> Result<(), Failure> {
        self.pending.take().map_or(Ok(()), |pending| self.report(pending))
    }

    fn report(&mut self, update: Pending) -> Result<(), Failure> {
        let Pending { progress, epoch, waited, rates, posted, span, real_tokens, .. } = update;
        let Pending { own_tokens, padding, batches, .. } = update;
        let Progress { step, tokens, samples } = progress;
        let Results { loss, grad_norm, is_applied, rewards, stop } = collect(self.session, posted)?;
        self.agreed_stop = self.agreed_stop.or(stop);
        let [began, ended] = &span;
        let seconds = self.session.between(began, ended)?.as_secs_f64();
        if let Some(times) = self.session.plan_times(began, ended)? {
            self.sharing.take(StepTimes::on_device(step, times, waited.total));
        }
        // The maximum decays, so that a single slow step is forgotten in time.
        self.slowest_step = self.slowest_step.mul_f64(0.95).max(Duration::from_secs_f64(seconds));
        self.last_loss = loss;
        if !is_applied {
            self.left_out(step, &batches)?;
        } else {
            self.skips.in_a_row = 0;
        }
        if let Some(spike) = self.spikes.see(loss, self.config.log.spike) {
            let Spike { median, deviations } = spike;
            self.emit(Event::Spike { step, loss, median, deviations })?;
        }
        if !step.is_multiple_of(self.config.log.every) && step != self.steps {
            return Ok(());
        }
        let batch = self.config.train.batch;
        let seen = self.watch.see(own_tokens, update.grad, seconds);
        self.sharing.see(seen.gpu.as_ref().filter(|_| self.ranks.are_many()));
        if let Some(message) = self.watch.doubt(&seen, waited.total.as_secs_f64() / seconds) {
            self.emit(Event::Warning { message })?;
        }
        if let Some(mfu) =
            seen.mfu.filter(|mfu| *mfu > 1.0 && !std::mem::replace(&mut self.is_past_peak, true))
        {
            let message = format!(
                "step {step} reads {:.0}% of the device's peak, which no device reaches: its time or the peak is wrong; \
                 please report it",
                100.0 * mfu
            );
            self.emit(Event::Warning { message })?;
        }
        self.emit(Event::Step(Step {
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

    /// Learning rates by the names of their groups, where there are several groups.
    fn rates_by_name(&self, rates: &[f32]) -> BTreeMap<String, f32> {
        let names = self.config.rates().into_iter().map(|rate| rate.name);
        if rates.len() == 1 { BTreeMap::new() } else { names.zip(rates.iter().copied()).collect() }
    }

    /// Evaluates if the config asks for it at this step.
    fn evaluate_if_due(&mut self) -> Result<Option<&'static str>, Failure> {
        if self.progress.step < self.steps && self.is_eval_due() { self.evaluate() } else { Ok(None) }
    }

    fn is_eval_due(&self) -> bool {
        let every = self.config.eval_every(self.steps);
        every > 0 && self.progress.step.is_multiple_of(every)
    }

    /// Evaluates the held-out rows and logs the result. Returns the reason to stop if one came between two batches; nothing is
    /// logged then.
    fn evaluate(&mut self) -> Result<Option<&'static str>, Failure> {
        self.flush()?;
        let Some(held_out) = &self.held_out else { return Ok(None) };
        if self.evaluated.is_some_and(|(step, _)| step == self.progress.step) {
            return Ok(None);
        }
        self.ended = None;
        if let Some(compared) = self.data.compared() {
            let numbers: Vec<usize> = (0..held_out.samples()).collect();
            let (of, layout) = ((AnswerSplit::HeldOut, &*numbers), self.layout.as_ref());
            baseline::take_among(self.ranks, self.session, compared, of, layout)?;
        }
        let mut counted =
            Counted::new(self.config.model.classes(), held_out.bytes_per_token(self.data.vocabulary()));
        let (set, capacity, draw) = (&**held_out, self.compiled.eval_batch, self.draw);
        let (stop, within, samples) = (self.stop, self.time_to_stop(), &mut self.samples);
        samples.begin();
        let sums = evaluate_among(
            self.ranks,
            self.session,
            (set, capacity, draw),
            self.progress.step,
            &mut || stop.asked(within),
            &mut |results| {
                counted.see(results);
                samples.see(results);
            },
        )?;
        let loss = match sums {
            Ok(sums) => sums.mean() as f32,
            Err(reason) => return Ok(Some(reason)),
        };
        self.evaluated = Some((self.progress.step, loss));
        let (metric, metrics) = (self.config.eval.metric, counted.metrics());
        self.score = metric.of(loss, metrics.as_ref());
        // The evaluation at the end of a run that may be extended does not count.
        if self.is_eval_due() {
            self.patience.see(metric, self.score.unwrap_or(f64::NAN));
        }
        self.metrics.clone_from(&metrics);
        let averaged = self.config.train.ema > 0.0;
        self.emit(Event::Eval { step: self.progress.step, loss, metrics, averaged })?;
        self.take_samples()?;
        Ok(None)
    }

    /// Logs the samples of an evaluation. Every rank takes them, so that no rank waits for another.
    fn take_samples(&mut self) -> Result<(), Failure> {
        let (ranks, step, within, stop) = (self.ranks, self.progress.step, self.time_to_stop(), self.stop);
        let mut is_over = |number: usize| {
            ranks.at(step, "writing samples", number);
            stop.asked(within).is_some()
        };
        for sample in self.samples.take(self.session, step, &mut is_over)? {
            self.emit(Event::Sample(sample))?;
        }
        Ok(())
    }

    /// The reason why the run ends before its last step, if there is one.
    fn early(&self) -> Option<String> {
        let (metric, eval) = (self.config.eval.metric, &self.config.eval);
        let reached = self.patience.reached(metric, eval.goal);
        reached.or_else(|| self.patience.ends(metric, self.config.train.patience))
    }

    fn end(&mut self, status: Status) -> Result<Outcome, Failure> {
        if status != Status::Failed {
            self.receive_remaining_reports()?;
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
        self.emit(Event::End(end))?;
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
