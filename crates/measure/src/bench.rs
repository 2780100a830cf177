//! Times one configuration as training runs it: the same plans, session, rows and updates, without a run directory. A measurement
//! needs no data: where a recipe names none, random tokens stand in.
//! `ablate`, `tune` and `profile` measure several configurations in turn. A [`Stage`] holds the device, the data and the ranks
//! that they share; a [`Bench`] is one open configuration on it. With several ranks, each has its own stage, and all open and run
//! the same benches in the same order (`together`).

mod rows;
mod spans;
mod together;
mod visit;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Instant;

use flatout_data::Waited;
use flatout_ir::passes::lanes::lanes_a_rank;
use flatout_ir::{Role, Target};
use flatout_runtime::{Posted, Session};

use flatout_train::config::Config;
use flatout_train::config::resolved::Resolved;
use flatout_train::device::Device;
use flatout_train::ranks::Ranks;
use flatout_train::resolve::compile::{Compiled, compile};
use flatout_train::resolve::prediction;
use flatout_train::resolve::windows;
use flatout_train::switches::{Switches, active};
use flatout_train::tasks::batch::{BatchSource, Draw};
use flatout_train::tasks::image_table;
use flatout_train::training::schedule::learning_rates;
use flatout_train::training::update::{accumulate, apply, collect, end_lanes};
use flatout_train::weights::pretrained;
use flatout_train::{Failure, UserError, refuse};
use rows::OpenData;
pub use spans::Span;
use spans::Spans;
pub use visit::{Timed, guarded};

/// Opens a stage and a bench for a config and makes the first update.
pub fn open(config: &Config) -> Result<Bench, Failure> {
    Stage::open(config)?.bench(config)
}

/// The device, the data and the ranks that measurements share.
pub struct Stage {
    device: Device,
    ranks: Rc<Ranks>,
    /// Open data, that of the first config and of others that need other data; empty where the first names none.
    data: RefCell<Vec<Rc<OpenData>>>,
    /// Number of progress reports that this rank has made.
    moved: Cell<usize>,
}

impl Stage {
    /// Opens the device that the config's `backend` selects, and its data where it names any. A config that cannot run on the
    /// device is refused before data is opened, which may take long.
    pub fn open(config: &Config) -> Result<Stage, Failure> {
        Stage::among(config, Device::open(config.switches.compute.backend)?, Rc::new(Ranks::alone()))
    }

    /// Opens a stage as one of several ranks, on a device that is open. Rank 0 opens the data first, so that the others find its
    /// caches.
    pub fn among(config: &Config, device: Device, ranks: Rc<Ranks>) -> Result<Stage, Failure> {
        compile(config, &ranks.target(device.target(&config.switches)))?;
        if ranks.are_many() && config.data.vision_cache.is_some() {
            refuse_cache()?;
        }
        let data = ranks.in_turn(|| OpenData::open(config, &device))?.map(Rc::new).into_iter().collect();
        // A rank that failed to open it is noticed here, and not as a failure of the first bench.
        ranks.meet()?;
        Ok(Stage { device, ranks, data: RefCell::new(data), moved: Cell::new(0) })
    }

    /// Number of ranks that measure together.
    pub fn ranks(&self) -> usize {
        self.ranks.count()
    }

    pub fn rank(&self) -> usize {
        self.ranks.rank()
    }

    /// The name of a rank for messages, with its host and process.
    pub fn named(&self, rank: usize) -> String {
        self.ranks.named(rank)
    }

    /// Whether this is rank 0, which decides and reports.
    pub fn is_first(&self) -> bool {
        self.ranks.is_first()
    }

    /// The compiler's target for this device under these switches, as one of the stage's ranks.
    pub fn target(&self, switches: &Switches) -> Target {
        self.ranks.target(self.device.target(switches))
    }

    /// The device and the ranks in words.
    pub fn sentence(&self) -> String {
        match self.ranks() {
            1 => self.device.sentence(),
            ranks if self.ranks.nodes() > 1 => {
                format!("{ranks} ranks on {} nodes of {}", self.ranks.nodes(), self.device.sentence())
            }
            ranks => format!("{ranks} ranks of {}", self.device.sentence()),
        }
    }

    /// Reports progress of this rank to those that watch the ranks.
    fn progressed(&self, doing: &str) {
        self.moved.set(self.moved.get() + 1);
        self.ranks.at(0, doing, self.moved.get());
    }

    pub fn device(&self) -> &Device {
        &self.device
    }
    /// Whether rows are loaded rather than random.
    pub fn has_data(&self) -> bool {
        !self.data.borrow().is_empty()
    }

    /// The source of the rows in words.
    pub fn data(&self) -> &'static str {
        self.data.borrow().first().map_or("tokens drawn at random", |data| data.named())
    }

    /// The data of a config, opened on first use; `None` where the stage has no data.
    fn data_of(&self, config: &Config) -> Result<Option<Rc<OpenData>>, Failure> {
        let mut all = self.data.borrow_mut();
        if let Some(known) = all.iter().find(|data| data.is_of(config)) {
            return Ok(Some(known.clone()));
        }
        if all.is_empty() {
            return Ok(None);
        }
        let other = OpenData::open(config, &self.device)?.map(Rc::new);
        all.extend(other.clone());
        Ok(other)
    }

    /// The plans of a config on this device.
    pub fn compile(&self, config: &Config) -> Result<Compiled, Failure> {
        let mut config = config.clone();
        match self.data_of(&config)? {
            Some(data) => {
                let mut resolved = Resolved::default();
                data.data().measure(&config, &mut resolved);
                config = resolved.over(&config);
                image_table::check(&config)?;
            }
            // Random images have no image table.
            None => image_table::without(&mut config)?,
        }
        self.progressed("compiling");
        compile(&config, &self.target(&config.switches))
    }

    /// Compiles a config, opens its session, writes its initial weights and makes its first update. The config must name the
    /// backend of the stage or none. Every rank calls this; a failure of one is returned on all.
    pub fn bench(&self, config: &Config) -> Result<Bench, Failure> {
        // A single rank lets panics through.
        let mut bench = match self.ranks() {
            1 => self.prepared(config)?,
            _ => self.ranks.attempt(|| guarded(|| self.prepared(config)))?,
        };
        bench.start.first_update_seconds = bench.steps(1)?[0] / 1e3;
        Ok(bench)
    }

    /// Opens a config without making an update.
    fn prepared(&self, config: &Config) -> Result<Bench, Failure> {
        let mut clock = Instant::now();
        let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed().as_secs_f64();
        let compiled = self.compile(config)?;
        let compile_seconds = lap();
        self.ranks.check_equal(
            "the plans",
            || compiled.plans.to_string(),
            "start the same program with the same settings on like hosts",
        )?;
        let mut session =
            self.device.session_among(compiled.plans.clone(), &compiled.settled, &self.ranks)?;
        let session_seconds = lap();
        pretrained::begin(config, &mut session)?;
        let weights_seconds = lap();
        let data = self.data_of(config)?;
        let horizon = match &data {
            Some(data) => data.data().total_steps(config)?,
            // Without data an epoch has no length; the first updates are the same for any horizon.
            None => config.train.steps.unwrap_or(u32::MAX.into()),
        };
        let horizon = config.schedule.horizon_steps.unwrap_or(horizon);
        let source = rows::source(config, &compiled, self.ranks.rank(), data.as_deref(), &mut session)?;
        Ok(Bench {
            ranks: Rc::clone(&self.ranks),
            config: config.clone(),
            start: Start { compile_seconds, session_seconds, weights_seconds, first_update_seconds: 0.0 },
            compiled,
            session,
            source,
            horizon,
            enqueued: 0,
            losses: vec![],
            waited: Waited::default(),
            spans: Spans::default(),
        })
    }
}

/// Refuses a cache of image features, which ranks cannot fill together.
fn refuse_cache() -> Result<(), UserError> {
    refuse!(
        "`data.vision_cache` can only be filled by a single process: leave it out, or measure with one rank"
    )
}

/// Time until the first update was done, by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Start {
    pub compile_seconds: f64,
    /// Allocating the arena, and on a GPU compiling kernels, timing candidates and capturing graphs.
    pub session_seconds: f64,
    /// Drawing or reading the initial weights, and writing them.
    pub weights_seconds: f64,
    pub first_update_seconds: f64,
}

impl Start {
    pub fn seconds(&self) -> f64 {
        self.compile_seconds + self.session_seconds + self.weights_seconds + self.first_update_seconds
    }
}

/// An open configuration, which trains from its first update on with the learning rates and rows of a run.
pub struct Bench {
    ranks: Rc<Ranks>,
    config: Config,
    start: Start,
    compiled: Compiled,
    session: Session,
    source: Box<dyn BatchSource>,
    horizon: u64,
    /// Updates enqueued so far.
    enqueued: u64,
    losses: Vec<f32>,
    waited: Waited,
    spans: Spans,
}

impl Bench {
    /// Makes updates and returns the milliseconds of each. As in training, the host enqueues an update while the one before is
    /// computed; all are done on return, so several benches may take turns. With several ranks, all make the same number of
    /// updates, and a failure of one is fatal for all, because the others wait for it inside an exchange.
    pub fn steps(&mut self, count: usize) -> Result<Vec<f64>, Failure> {
        match self.ranks.are_many() {
            true => Rc::clone(&self.ranks).in_step(|| guarded(|| self.timed_updates(count))),
            false => self.timed_updates(count),
        }
    }

    /// A barrier over all ranks.
    pub fn meet(&self) -> Result<(), Failure> {
        if self.ranks.are_many() { self.ranks.meet() } else { Ok(()) }
    }

    fn timed_updates(&mut self, count: usize) -> Result<Vec<f64>, Failure> {
        let mut times = Vec::with_capacity(count);
        let mut clock = Instant::now();
        let mut pending: Option<Posted> = None;
        for _ in 0..count {
            let posted = self.enqueue()?;
            let is_ready = posted.is_ready();
            if let Some(before) = pending.replace(posted) {
                self.report(before, &mut clock, &mut times)?;
            }
            if is_ready && let Some(now) = pending.take() {
                self.report(now, &mut clock, &mut times)?;
            }
        }
        if let Some(last) = pending {
            self.report(last, &mut clock, &mut times)?;
        }
        Ok(times)
    }

    /// Enqueues the micro-batches of an update and its `apply`.
    fn enqueue(&mut self) -> Result<Posted, Failure> {
        let draw = Draw { seed: self.config.train.seed, step: self.enqueued };
        let lanes = lanes_a_rank(&self.compiled.settled.options);
        let mut lane = 0;
        let grad = windows::role(&self.config.schedule, self.horizon, self.enqueued + 1);
        self.source.begin_update();
        while let Some(batch) = self.spans.within_some("rows", || self.source.next_batch())? {
            let batch = windows::planned(batch, grad);
            self.waited += batch.waited;
            end_lanes(&mut self.session, lane..batch.lane, lanes)?;
            lane = batch.lane;
            self.spans.within("grad", || accumulate(&mut self.session, &batch, draw))?;
        }
        end_lanes(&mut self.session, lane..lanes, lanes)?;
        self.enqueued += 1;
        self.ranks.called("apply");
        self.ranks.at(0, "measuring", self.enqueued as usize);
        let rates = learning_rates(&self.config, self.horizon, self.enqueued);
        Ok(self.spans.within("apply", || apply(&mut self.session, &rates))?)
    }

    fn report(&mut self, posted: Posted, clock: &mut Instant, times: &mut Vec<f64>) -> Result<(), Failure> {
        let results = self.spans.within("results", || collect(&mut self.session, posted))?;
        self.losses.push(results.loss);
        times.push(1e3 * clock.elapsed().as_secs_f64());
        *clock = Instant::now();
        Ok(())
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn compiled(&self) -> &Compiled {
        &self.compiled
    }

    /// The session between updates: everything enqueued is done.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    pub fn start(&self) -> Start {
        self.start
    }

    /// The loss of every update so far.
    pub fn losses(&self) -> &[f32] {
        &self.losses
    }

    /// Time that updates spent waiting for rows.
    pub fn waited(&self) -> Waited {
        self.waited
    }

    /// Makes updates as `steps` does and returns spans of the host's work: `rows` waits for rows, `grad` and `apply` write inputs
    /// and enqueue a plan (on the CPU they compute it), `results` waits for the results of an update.
    pub fn spans(&mut self, count: usize) -> Result<Vec<Span>, Failure> {
        self.spans.begin();
        let made = self.steps(count);
        let spans = self.spans.take();
        made.map(|_| spans)
    }

    /// The plans that an update runs and how often: of a typical update where lengths vary, of the first one where windows do.
    pub fn runs(&self) -> Vec<(Role, u64)> {
        let batch = self.config.train.batch;
        match self.compiled.windows[..] {
            [] => prediction::typical_runs(&self.compiled, batch),
            _ => {
                let first = windows::role(&self.config.schedule, self.horizon, 1);
                prediction::runs_of_window(&self.compiled, batch, first)
            }
        }
    }

    /// Micro-batches per update.
    pub fn parts(&self) -> usize {
        self.runs().iter().filter(|(role, _)| role.is_grad()).map(|(_, runs)| *runs as usize).sum()
    }

    pub fn tokens_per_update(&self) -> usize {
        prediction::tokens_per_update(&self.config, &self.compiled)
    }

    /// Launches per update: `grad` for every micro-batch, then `apply`.
    pub fn launches(&self) -> usize {
        let of = |role| self.compiled.plans.plan(role).map_or(0, |plan| plan.launches.len());
        self.runs().into_iter().map(|(role, runs)| runs as usize * of(role)).sum()
    }

    pub fn arena_bytes(&self) -> u64 {
        self.compiled.plans.arena_bytes as u64
    }

    /// Memory that the driver allocated besides the arena, measured; 0 on the CPU.
    pub fn driver_bytes(&self) -> u64 {
        self.session.driver_bytes()
    }

    /// Peak memory: nothing is allocated once it is open.
    pub fn peak_bytes(&self) -> u64 {
        self.arena_bytes() + self.driver_bytes()
    }

    /// The state of every switch, read from the compiled plans and the session.
    pub fn active(&self) -> BTreeMap<String, String> {
        let prepared = active::Prepared::session(&self.session, &self.compiled.settled);
        active::active(&self.compiled.plans, &self.compiled.target, prepared)
    }
}

#[cfg(test)]
mod tests;
