//! The loop: micro-batches into `grad`, then `apply`; evaluation, checkpoints, events, signals.

use std::path::{Path, PathBuf};
use std::time::Instant;

use flatout_data::{Corpus, Cursor, Loader, LoaderOptions, Rows, Spec, open};
use flatout_ir::passes::{input_path, update};
use flatout_ir::{Class, Role};
use flatout_runtime::{Posted, Session};

use crate::checkpoint::{self, State};
use crate::compile::{self, Compiled};
use crate::config::{Config, Source};
use crate::device::Device;
use crate::events::{self, End, Event, EventLog, Status, Step};
use crate::failure::Failure;
use crate::feed::{Draw, feed};
use crate::run::Run;
use crate::schedule::learning_rate;
use crate::signal::StopFlag;
use crate::state::{Snapshot, load};
use crate::tensorboard::Board;
use crate::watch::Watch;
use crate::{UserError, active, initial, opening, report};

/// What the command line shows while a run goes on.
pub enum Notice<'a> {
    /// Everything is ready; nothing has run yet.
    Ready(&'a Ready<'a>),
    /// A line of the event log.
    Event(&'a Event),
    /// A stop was asked for and the state is being saved.
    Saving { step: u64, bytes: u64, signal: &'static str },
}

/// A run that is about to start.
pub struct Ready<'a> {
    pub config: &'a Config,
    pub compiled: &'a Compiled,
    pub corpus: &'a Corpus,
    pub run: &'a Path,
    /// Updates of the whole run.
    pub steps: u64,
    /// The last update made already.
    pub done: u64,
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub status: Status,
    pub steps: u64,
    /// Held-out where there is an evaluation, otherwise of the last step.
    pub loss: f32,
    pub is_held_out: bool,
    pub checkpoint: Option<PathBuf>,
}

/// Opens the data a config names. A run's own tokeniser, where there is one, is used again.
pub fn corpus(config: &Config, run: Option<&Path>) -> Result<Corpus, Failure> {
    let data = &config.data;
    let source = if data.source() == Source::Text {
        flatout_data::Source::Text
    } else {
        flatout_data::Source::Synthetic
    };
    let kept = run.map(tokenizer_path).filter(|path| path.is_file() && source == flatout_data::Source::Text);
    let spec = Spec {
        source,
        path: data.path.iter().map(PathBuf::from).collect(),
        tokenizer: kept.or_else(|| data.tokenizer.as_ref().map(PathBuf::from)),
        vocab: config.model.vocab,
        context: config.model.context,
        seed: config.train.seed,
        held_out: data.held_out,
        document_mask: data.document_mask,
    };
    Ok(open(&spec)?)
}

pub fn tokenizer_path(run: &Path) -> PathBuf {
    run.join("tokenizer.json")
}

/// The updates of a whole run.
pub fn total_steps(config: &Config, corpus: &Corpus) -> Result<u64, Failure> {
    if let Some(steps) = config.train.steps {
        return Ok(steps);
    }
    let epochs = config.train.epochs.expect("validated: steps or epochs");
    let Some(tokens) = corpus.describe().tokens else {
        return Err(Failure::User(UserError(
            "`train.epochs` cannot be counted: the synthetic language has no end; give train.steps instead"
                .into(),
        )));
    };
    let rows = tokens as f64 * epochs as f64 / config.model.context as f64;
    Ok(((rows / config.train.batch as f64).round() as u64).max(1))
}

/// Trains a run from its beginning or its last checkpoint to its end, a signal or a failure.
pub fn train(
    config: &Config,
    run: &Run,
    device: &Device,
    stop: &StopFlag,
    notice: &mut dyn FnMut(Notice<'_>),
) -> Result<Outcome, Failure> {
    let compiled = compile::compile(config, &device.target(&config.switches))?;
    let corpus = corpus(config, Some(run.dir()))?;
    let steps = total_steps(config, &corpus)?;
    let mut config = config.clone();
    let horizon = *config.schedule.horizon_steps.get_or_insert(steps);
    compiled.pin(&mut config);
    let config = &config;
    let held_out = match compiled.eval_batch {
        0 => None,
        _ => Some(corpus.held_out_rows(config.eval.rows)?),
    };
    checkpoint::clean(&run.checkpoints_dir()).map_err(Failure::io("cleaning up"))?;
    let found = checkpoint::latest(&run.checkpoints_dir())?;
    let mut session = device.session(compiled.plans.clone(), &compiled.settled)?;
    let (progress, cursor) = match &found.whole {
        Some(whole) => resume(config, &mut session, &whole.path)?,
        None => begin(config, &mut session, &corpus)?,
    };
    if progress.step > steps {
        return Err(Failure::User(UserError(format!(
            "the run is at step {} already and train.steps is {steps}: give a larger train.steps",
            progress.step
        ))));
    }
    let threads = config.loader.workers.given().unwrap_or_else(|| (compile::threads() / 2).max(1));
    let batch_bytes = 4 * 3 * config.train.batch * config.model.context;
    let options = LoaderOptions {
        threads,
        queue_bytes: config.loader.prefetch * batch_bytes,
        ..LoaderOptions::default()
    };
    let loader = corpus.train_loader(&cursor, options)?;
    // First of all, so that whatever is written after it lies in a run that can be continued.
    run.save_config(config)?;
    let (log, earlier) = EventLog::reopen(&run.events_path()).map_err(Failure::io("events.jsonl"))?;
    let last_loss =
        events::steps(&earlier).last().filter(|s| s.step == progress.step).map_or(f32::NAN, |s| s.loss);
    corpus.vocabulary().save(&tokenizer_path(run.dir()))?;

    let ready =
        Ready { config, compiled: &compiled, corpus: &corpus, run: run.dir(), steps, done: progress.step };
    let draw = Draw { seed: config.train.seed, step: 0 };
    let mut trainer = Trainer {
        config,
        run,
        compiled: &compiled,
        corpus: &corpus,
        session,
        loader,
        held_out,
        log,
        board: Board::open(run.dir(), progress.step, &config.to_toml()),
        watch: Watch::new(&compiled, config.train.batch, device),
        notice,
        stop,
        draw,
        steps,
        horizon,
        progress,
        saved: found.whole.map(|whole| (whole.step, whole.path)),
        last_loss,
        pending: None,
        clock: Instant::now(),
        evaluated: None,
        began: Instant::now(),
        began_tokens: progress.tokens,
    };
    for (path, why) in found.skipped {
        trainer.say(Event::Warning { message: format!("{} is not used: {why}", path.display()) })?;
    }
    (trainer.notice)(Notice::Ready(&ready));
    trainer.start()?;
    trainer.run()
}

/// What a run has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    pub step: u64,
    pub tokens: u64,
    pub samples: u64,
}

fn begin(config: &Config, session: &mut Session, corpus: &Corpus) -> Result<(Progress, Cursor), Failure> {
    initial::write(session, config.train.seed)?;
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive)?;
    }
    Ok((Progress::default(), corpus.start()))
}

fn resume(config: &Config, session: &mut Session, path: &Path) -> Result<(Progress, Cursor), Failure> {
    let (state, mut file) = checkpoint::open(path).map_err(Failure::io(path.display()))?;
    // What is frozen is in no checkpoint: it is what it was at the beginning.
    initial::write(session, config.train.seed)?;
    load(session, &mut file, Class::is_saved)?;
    let cursor = serde_json::from_value(state.cursor)
        .map_err(|e| Failure::Environment(format!("{}: the cursor does not read: {e}", path.display())))?;
    let count = |name: &str| state.counters.get(name).copied().unwrap_or(0);
    Ok((Progress { step: state.step, tokens: count("tokens"), samples: count("samples") }, cursor))
}

/// An update whose results are on their way.
struct Pending {
    progress: Progress,
    epoch: f64,
    lr: f32,
    posted: Posted,
}

struct Trainer<'a, 'n> {
    config: &'a Config,
    run: &'a Run,
    compiled: &'a Compiled,
    corpus: &'a Corpus,
    session: Session,
    loader: Loader,
    held_out: Option<Rows>,
    log: EventLog,
    board: Board,
    watch: Watch,
    notice: &'n mut dyn FnMut(Notice<'_>),
    stop: &'a StopFlag,
    draw: Draw,
    steps: u64,
    horizon: u64,
    progress: Progress,
    /// The newest whole checkpoint.
    saved: Option<(u64, PathBuf)>,
    last_loss: f32,
    /// The update that was enqueued last, until it is reported.
    pending: Option<Pending>,
    /// When the last update was reported, or the one under way began.
    clock: Instant,
    /// The newest evaluation.
    evaluated: Option<(u64, f32)>,
    began: Instant,
    began_tokens: u64,
}

impl Trainer<'_, '_> {
    fn say(&mut self, event: Event) -> Result<(), Failure> {
        self.log.write(&event).map_err(Failure::io("events.jsonl"))?;
        (self.notice)(Notice::Event(&event));
        match self.board.record(&event) {
            Some(message) => self.say(Event::Warning { message }),
            None => Ok(()),
        }
    }

    fn start(&mut self) -> Result<(), Failure> {
        let start = opening::opening(self.config, self.compiled, self.corpus, &self.session, self.steps);
        self.say(Event::Start(start))?;
        let notes: Vec<String> = self.session.notes().iter().chain(self.watch.note()).cloned().collect();
        for message in notes {
            self.say(Event::Warning { message })?;
        }
        if self.saved.is_some() {
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
        let every = |every: u64, step: u64| every > 0 && step.is_multiple_of(every);
        while self.progress.step < self.steps {
            if let Some(signal) = self.stop.requested() {
                return self.stopped(signal);
            }
            self.step()?;
            let step = self.progress.step;
            if step < self.steps && every(self.config.eval.every, step) {
                self.evaluate()?;
            }
            if step < self.steps && every(self.config.checkpoint.every, step) {
                self.save()?;
            }
        }
        self.evaluate()?;
        self.save()?;
        self.end(Status::Done)
    }

    fn stopped(&mut self, signal: &'static str) -> Result<Outcome, Failure> {
        let snapshot = self.snapshot()?;
        let (step, bytes) = (self.progress.step, snapshot.bytes());
        (self.notice)(Notice::Saving { step, bytes, signal });
        self.write(snapshot)?;
        self.end(Status::Stopped)
    }

    /// One update. On a GPU it is only enqueued: what it gave is reported while the next one runs.
    fn step(&mut self) -> Result<(), Failure> {
        if self.pending.is_none() {
            self.clock = Instant::now();
        }
        let (batch, micro) = (self.config.train.batch, self.compiled.micro_batch);
        self.draw.step = self.progress.step;
        let mut epoch = 0.0;
        for _ in 0..batch / micro {
            let rows = self.loader.next_rows(micro)?;
            epoch = rows.epoch;
            feed(&mut self.session, Role::Grad, &rows, 0, micro, self.draw)?;
            self.session.run(Role::Grad)?;
        }
        self.progress.step += 1;
        self.progress.tokens += (batch * self.config.model.context) as u64;
        self.progress.samples += batch as u64;
        let peak = self.config.optimizer.lr;
        let lr = learning_rate(&self.config.schedule, peak, self.horizon, self.progress.step) as f32;
        self.session.write_f32(&input_path(Role::Apply, update::LR), &[lr])?;
        self.session.run(Role::Apply)?;
        let posted = self.session.post(Role::Apply, &["loss", "grad_norm", "go"])?;
        let now = Pending { progress: self.progress, epoch, lr, posted };
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
        let Pending { progress: Progress { step, tokens, samples }, epoch, lr, posted } = update;
        let values = self.session.collect(posted)?;
        let (loss, grad_norm, go) = (values[0], values[1], values[2]);
        let seconds = self.clock.elapsed().as_secs_f64();
        self.clock = Instant::now();
        self.last_loss = loss;
        if go == 0.0 {
            let message = format!("step {step}: the gradient is not finite, so its update was left out");
            self.say(Event::Warning { message })?;
        }
        if !step.is_multiple_of(self.config.log.every) && step != self.steps {
            return Ok(());
        }
        let batch = self.config.train.batch;
        let seen = self.watch.see(batch * self.config.model.context, seconds);
        self.say(Event::Step(Step {
            step,
            epoch,
            loss,
            grad_norm,
            lr,
            tokens,
            samples,
            step_ms: 1e3 * seconds,
            tokens_per_second: (batch * self.config.model.context) as f64 / seconds,
            samples_per_second: batch as f64 / seconds,
            time: events::now(),
            mfu: seen.mfu,
            of_predicted: seen.of_predicted,
            data_wait_ms: None,
            gpu: seen.gpu,
        }))
    }

    /// The mean loss on held-out rows.
    fn evaluate(&mut self) -> Result<(), Failure> {
        self.flush()?;
        let Some(rows) = &self.held_out else { return Ok(()) };
        if self.evaluated.is_some_and(|(step, _)| step == self.progress.step) {
            return Ok(());
        }
        let (mut loss, mut weight) = (0.0, 0.0);
        for from in (0..rows.count()).step_by(self.compiled.eval_batch) {
            feed(&mut self.session, Role::Eval, rows, from, self.compiled.eval_batch, self.draw)?;
            self.session.run(Role::Eval)?;
            loss += self.session.result(Role::Eval, "loss")?[0] as f64;
            weight += self.session.result(Role::Eval, "weight")?[0] as f64;
        }
        let loss = (loss / weight) as f32;
        self.evaluated = Some((self.progress.step, loss));
        self.say(Event::Eval { step: self.progress.step, loss })
    }

    fn snapshot(&mut self) -> Result<Snapshot, Failure> {
        self.flush()?;
        let Progress { step, tokens, samples } = self.progress;
        let cursor = serde_json::to_value(self.loader.cursor()).expect("a cursor has a JSON form");
        let counters = [("tokens".to_string(), tokens), ("samples".to_string(), samples)].into();
        Snapshot::take(&mut self.session, State { step, cursor, counters })
    }

    fn save(&mut self) -> Result<(), Failure> {
        let snapshot = self.snapshot()?;
        self.write(snapshot)
    }

    fn write(&mut self, snapshot: Snapshot) -> Result<(), Failure> {
        let step = snapshot.state.step;
        if self.saved.as_ref().is_some_and(|(saved, _)| *saved == step) {
            return Ok(());
        }
        let folder = self.run.checkpoints_dir();
        let path =
            snapshot.save(&folder, self.config.checkpoint.keep).map_err(Failure::io("the checkpoint"))?;
        self.saved = Some((step, path.clone()));
        self.say(Event::Saved { step, path: path.display().to_string() })
    }

    fn end(&mut self, status: Status) -> Result<Outcome, Failure> {
        let evaluated = self.evaluated.filter(|(step, _)| *step == self.progress.step);
        let loss = evaluated.map_or(self.last_loss, |(_, loss)| loss);
        let seconds = self.began.elapsed().as_secs_f64();
        let end = End {
            status,
            steps: self.progress.step,
            loss,
            loss_floor: self.corpus.floor().map(|floor| floor.nats),
            tokens_per_second: (self.progress.tokens - self.began_tokens) as f64 / seconds,
            time: events::now(),
        };
        self.say(Event::End(end))?;
        if let Err(why) = report::write(self.run.dir()) {
            self.say(Event::Warning { message: format!("report.md is not written: {why}") })?;
        }
        let checkpoint = self.saved.clone().map(|(_, path)| path);
        Ok(Outcome { status, steps: self.progress.step, loss, is_held_out: evaluated.is_some(), checkpoint })
    }
}
