//! Starts or continues a run: opens the data, compiles plans, checks that ranks agree, loads the newest checkpoint, and enters
//! the loop.

use std::path::Path;
use std::time::{Duration, Instant};

use flatout_data::OpenEvent;
use flatout_ir::Class;
use flatout_runtime::{Laps, Session};

use super::recovery::Skips;
use super::saving::Saving;
use super::sharing::Sharing;
use super::{Notice, Outcome, Progress, Ready, Sink, Trainer, count, patience};
use crate::config::Config;
use crate::config::resolved::Resolved;
use crate::device::Device;
use crate::metrics::goal::Patience;
use crate::ranks::Ranks;
use crate::resolve::arranged;
use crate::resolve::compile::{self, Compiled};
use crate::resolve::lanes;
use crate::run::Run;
use crate::run::checkpoint::{self, Retention, Together};
use crate::run::events::{self, Event, EventLog, Status};
use crate::run::signal::StopFlag;
use crate::run::state::{check_schema, load, saved_bytes};
use crate::run::writer::Writer;
use crate::tasks::batch::Draw;
use crate::tasks::dataset::{self, Dataset};
use crate::tasks::{self, image_table};
use crate::training::host;
use crate::training::reference;
use crate::training::samples::Samples;
use crate::training::spike::Spikes;
use crate::training::vision_cache;
use crate::training::watch::Watch;
use crate::weights::pretrained;
use crate::{Failure, UserError};

/// Trains a run from its beginning or its last checkpoint until it is done, is stopped by a signal, or fails. `early` holds plans
/// that were compiled from the config already.
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

/// One process of a run: its rank, the run's directory and its device.
pub struct Worker<'a> {
    pub ranks: &'a Ranks,
    pub run: &'a Run,
    pub device: &'a Device,
}

/// The same as [`train`], as one of several ranks, each of which calls this.
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
    // A branch of a data set may move while the run lasts, or between the queries of two ranks.
    if resolved.leaves_sets_open(asked) {
        if ranks.is_first() {
            resolved.pin_sets(asked)?;
        }
        resolved = ranks.of_first(resolved)?;
    }
    let config = &resolved.over(asked);
    // A config that cannot run is refused before any data is opened.
    let early = match early {
        Some(compiled) => compiled,
        None => compile::compile(config, &ranks.target(device.target(&config.switches)))?,
    };
    laps.lap("plans");
    let (mut left_out, mut notes) = (Vec::new(), 0);
    // Rank 0 opens the data first, so that the others find the tokenisers and caches it made.
    let data = ranks.in_turn(|| {
        tasks::open(config, Some(run.dir()), &mut |event| match event {
            OpenEvent::Note(note) => {
                notes += 1;
                ranks.at(0, "opening the data", notes);
                notice(Notice::Data(note));
            }
            OpenEvent::LeftOut(note) => left_out.push(note),
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
        // `auto` may have been resolved differently here: rank 0's choices hold.
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

/// Data, config and plans, which are ready before the run's state is loaded.
pub struct Opened {
    pub data: Box<dyn Dataset>,
    /// The config as resolved so far.
    pub resolved: Resolved,
    pub compiled: Compiled,
    /// Sentences about parts of the data that were left out.
    pub left_out: Vec<String>,
    /// Time spent on each part of the start so far.
    pub laps: Laps,
}

/// The same as [`train`], with open data and the plans that were made for it.
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

/// The same as [`train_on`], as one of several ranks. On GPUs, other ranks may wait for this one inside an exchange, and dropping
/// a session waits for them: a failure is sent to them while the session is still alive.
fn train_on_among(
    worker: &Worker<'_>,
    asked: &Config,
    opened: Opened,
    stop: &StopFlag,
    sinks: &mut [&mut dyn Sink],
    notice: &mut dyn FnMut(Notice<'_>),
) -> Result<Outcome, Failure> {
    let mut session = None;
    let outcome = train_in(&mut session, worker, asked, opened, stop, sinks, notice);
    let exchanges = |session: &Session| session.as_cuda().is_some_and(|cuda| cuda.wire().is_some());
    if let Err(failure) = &outcome
        && session.as_ref().is_some_and(exchanges)
    {
        worker.ranks.tell(failure);
    }
    outcome
}

/// Trains in a session that is stored in `kept`, so that it outlives this call.
fn train_in(
    kept: &mut Option<Session>,
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
            "`data.vision_cache` can only be filled by a single process: leave it out, or train with one rank"
                .into(),
        )));
    }
    if ranks.are_many() && !config.samples.prompts.is_empty() {
        let divides = compiled.settled.options.shards_parameters();
        if divides || config.train.ema > 0.0 {
            let what = if divides { "parameters (switches.shard)" } else { "averages (train.ema)" };
            return Err(Failure::User(UserError(format!(
                "`samples.prompts` needs a rank with the whole model, and these ranks shard {what}: leave one of them out"
            ))));
        }
    }
    let steps = data.total_steps(config)?;
    data.check_classes(config)?;
    image_table::check(config)?;
    host::check(config, &compiled)?;
    resolved.begin_here();
    let horizon = config.schedule.horizon_steps.unwrap_or(steps);
    resolved.horizon_steps = Some(horizon);
    resolved.warmup_steps = config.schedule.resolved_warmup(horizon).or(resolved.warmup_steps);
    // Where the ranks cannot divide the run's lanes among them, the same bits are not promised, and the record keeps the lanes
    // the run began with.
    let is_begun = !resolved.capacities.is_empty();
    let (began_lanes, lanes) = (config.train.lanes.given(), compiled.settled.options.lanes);
    let began_lanes = began_lanes.unwrap_or(if is_begun { 1 } else { lanes });
    left_out.extend(lanes::other_bits(began_lanes, ranks.count(), lanes));
    left_out.extend(lanes::lowered(asked, lanes));
    let has_its_lanes = began_lanes == lanes;
    if has_its_lanes && is_begun && resolved.capacities != compiled.capacities {
        return Err(Failure::User(UserError(
            "the plans of this run have other capacities than those it began with (resolved.toml): the version that began \
             it lays examples out differently; continue with that version"
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
        "start the same program with the same settings on hosts of the same kind",
    )?;
    let config = &resolved.over(asked);
    let say = &mut |note| notice(Notice::Data(note));
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
    let say = &mut |note: String| notice(Notice::Data(note));
    let scores =
        reference::score_by_named_model(ranks, config, data, run.dir(), layout.as_ref(), device, say)?;
    laps.lap("data");
    let session = kept.insert(device.session_among(compiled.plans.clone(), &compiled.settled, ranks)?);
    match session.as_cuda() {
        Some(cuda) => laps.take(cuda.laps()),
        None => laps.lap("session"),
    }
    data.prepare(session)?;
    let mut origin = None;
    let (progress, source, skips, patience) = match &found.whole {
        Some(whole) => {
            let (progress, cursor, skips, patience) = resume(config, session, run.dir(), &whole.path)?;
            (
                progress,
                data.source(config, compiled.feeding_rank(ranks.rank()), Some(cursor))?,
                skips,
                patience,
            )
        }
        None => {
            origin = pretrained::begin(config, session)?;
            // The run depends on its tower although no plan contains it.
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
    // The config is saved first, so that anything written later lies in a run that can be resumed.
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
    let shown = held_out.as_deref().map(|set| (set, compiled.eval_batch));
    // The files beside a model, among them its chat template, exist once the first rank has stored them.
    let samples = ranks.in_turn(|| Samples::open(config, data, shown, run.dir(), ranks.is_first()))?;
    let mut scored = 0;
    let say = &mut |note: String| {
        scored += 1;
        ranks.at(progress.step, "scoring answers by the reference", scored);
        notice(Notice::Data(note));
    };
    let scoring = (&mut *session, layout.as_ref());
    reference::set_scores((ranks, run.dir()), config, data, scoring, scores, !is_resumed, say)?;
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
        samples,
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
    // Set before the last meeting of the ranks: a rank that is asked to leave immediately then knows that no rank has begun.
    stop.begin_steps();
    ranks.begin_steps()?;
    for (path, why) in found.skipped {
        trainer.emit(Event::Warning { message: format!("{} is not used: {why}", path.display()) })?;
    }
    (trainer.notice)(Notice::Ready(&ready));
    trainer.start(is_resumed, &laps)?;
    for message in left_out {
        trainer.emit(Event::Warning { message })?;
    }
    // The time before the first step counts as start time.
    trainer.began = Instant::now();
    let outcome = trainer.run();
    if outcome.is_err() {
        // The caller receives the failure itself; events that can still be written are written.
        let _ = trainer.collect_saved(true).and_then(|()| trainer.end(Status::Failed));
    }
    outcome
}

/// Only the user can judge a damaged log: the run itself does not need it.
fn unreadable_log(error: std::io::Error) -> Failure {
    match error.kind() {
        std::io::ErrorKind::InvalidData => {
            UserError(format!("{error}: remove that line, or move the file away; checkpoints do not need it"))
                .into()
        }
        _ => Failure::Environment(format!("events.jsonl: {error}")),
    }
}

type ResumedState = (Progress, serde_json::Value, Skips, Patience);

fn resume(config: &Config, session: &mut Session, run: &Path, path: &Path) -> Result<ResumedState, Failure> {
    let (state, file) = checkpoint::open(path).map_err(Failure::io(path.display()))?;
    pretrained::resume(config, session, run)?;
    load(session, &file, Class::is_saved)?;
    let (total, in_a_row) = (count(&state, "skipped")?, count(&state, "skipped_in_a_row")?);
    let (progress, patience) = (Progress::of(&state)?, patience(&state));
    Ok((progress, state.cursor, Skips { total, in_a_row, rollbacks: 0 }, patience))
}
