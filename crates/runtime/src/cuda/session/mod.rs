//! A session on a GPU: allocates the arena, prepares every launch and captures every plan as a graph before the first run.

pub mod clock;
mod landing;
pub mod noise;
mod queues;
pub mod snapshot;
pub mod spin;
pub mod staging;
pub mod stand_in;
mod timing;
mod traffic;
pub mod tuned;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use flatout_ir::types::contiguous_strides;
use flatout_ir::{Launch, Plan, PlanSet, Queue, View};

use super::context::{CudaError, Facts, Function, Kernel, Prepare, Source, Work};
use super::driver::cache::{Cache, Compiled};
use super::driver::device::Device;
use super::driver::nccl::{Communicators, Windows};
use super::driver::nvrtc;
use super::driver::store::Store;
use super::driver::{DeviceMemory, Event, Graph, Module, Modules, OwnedStream};
use super::kernels::attention::choice::{self, AttentionKernel, Chosen};
use super::kernels::products::choice::{self as product_choice, ProductKernel};
use crate::cpu::kernels::movement::copy;
use crate::timing::Samples;
use crate::{Copying, Laps, RuntimeError, launch};
use clock::{Clock, Sums};
use flatout_waits::{self as waits, Unit};
use noise::Noise;
use queues::WireStream;
use timing::Timer;
use traffic::{Traffic, written};
use tuned::{Tuned, Tuning};

/// How many algorithms of a matrix product are timed to find the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Autotune {
    Quick,
    /// Takes the library's first choice.
    Off,
    Full,
}

impl Autotune {
    pub const ALL: &[Autotune] = &[Autotune::Quick, Autotune::Off, Autotune::Full];

    pub const fn name(self) -> &'static str {
        match self {
            Autotune::Quick => "quick",
            Autotune::Off => "off",
            Autotune::Full => "full",
        }
    }
}

/// How a session runs its plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Replay each plan as one CUDA graph instead of launching its kernels one by one.
    pub graphs: bool,
    /// Equal inputs give equal bits: algorithms are chosen by shape alone.
    pub deterministic: bool,
    /// Which candidates of matrix products are timed; ignored with `deterministic`.
    pub autotune: Autotune,
    /// Synchronise after every launch, so that an error names the launch that failed. Turns graphs off.
    pub check_each_launch: bool,
    /// The attention kernel to use.
    pub attention: AttentionKernel,
    /// The product kernel to use, for launches it supports.
    pub product: ProductKernel,
    /// With communicators: let NCCL allocate the arena and register it as a window with each of them.
    pub window: bool,
}

impl Options {
    /// Number of candidates per product; 1 means none is timed. Timing eight finds most of the possible gain; the library
    /// proposes up to a few dozen.
    pub(super) fn candidates(&self) -> usize {
        match self.autotune {
            _ if self.deterministic => 1,
            Autotune::Off => 1,
            Autotune::Quick => 8,
            Autotune::Full => 64,
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            graphs: true,
            deterministic: false,
            autotune: Autotune::Off,
            check_each_launch: false,
            attention: AttentionKernel::Auto,
            product: ProductKernel::Auto,
            window: false,
        }
    }
}

/// Fields are dropped in declaration order: users before what they use, the device last.
pub struct Session {
    graphs: Vec<Graph>,
    /// One work per launch of every plan.
    works: Vec<Vec<Box<dyn Work>>>,
    /// The arena ranges that each plan writes.
    written: Vec<Vec<Range<usize>>>,
    traffic: RefCell<Traffic>,
    /// After the graphs and works that use the arena through them, and before the communicators that they belong to.
    windows: Option<Windows>,
    /// After the graphs and works that use them, and before the memory that they move.
    communicators: Option<Arc<Communicators>>,
    arena: DeviceMemory,
    /// The stream of exchanges between ranks.
    wire_stream: WireStream,
    /// The stream of everything else in a plan.
    stream: OwnedStream,
    options: Options,
    compiled: Compiled,
    tuning: Tuning,
    notes: Vec<String>,
    attention: Vec<Chosen>,
    /// Number of products per kernel.
    products: BTreeMap<&'static str, usize>,
    driver_bytes: u64,
    wire_bytes: u64,
    /// Time spent opening the session, by phase.
    laps: Laps,
    device: Device,
}

impl Session {
    /// Validates every launch, allocates the arena, compiles and prepares every kernel, and runs every launch once on a zeroed
    /// arena: libraries load their kernels on the first call, and a launch that cannot run is reported here by name. Then
    /// captures the graphs and zeroes the arena.
    ///
    /// Plans with collectives over several ranks need communicators. `barrier` waits for all ranks. It is called before the
    /// first exchange, when everything else that may fail here has succeeded, because NCCL would wait for ever for a failed
    /// rank. It is called again after NCCL allocated a resource; a rank whose allocation failed reports `RuntimeError::Wire`.
    pub fn new(
        plans: &PlanSet,
        device: &Device,
        options: Options,
        communicators: Option<Arc<Communicators>>,
        barrier: &dyn Fn() -> Result<(), RuntimeError>,
    ) -> Result<Session, RuntimeError> {
        Session::open(plans, device, options, communicators, barrier, None)
    }

    /// One of several simulated ranks: a kernel that takes the time given by `times` replaces every exchange. The results are
    /// meaningless; the schedule is that of real ranks.
    pub fn with_stand_in(
        plans: &PlanSet,
        device: &Device,
        options: Options,
        times: &stand_in::Times<'_>,
    ) -> Result<Session, RuntimeError> {
        Session::open(plans, device, options, None, &|| Ok(()), Some(times))
    }

    fn open(
        plans: &PlanSet,
        device: &Device,
        options: Options,
        communicators: Option<Arc<Communicators>>,
        barrier: &dyn Fn() -> Result<(), RuntimeError>,
        stand_in: Option<&stand_in::Times<'_>>,
    ) -> Result<Session, RuntimeError> {
        let system = |why: CudaError| RuntimeError::Resources(why.to_string());
        let mut laps = Laps::begin();
        let facts = device.facts(options);
        let mut kernels = Vec::with_capacity(plans.plans.len());
        for plan in &plans.plans {
            let admitted = plan.launches.iter().map(|l| admit(l, plans.arena_bytes));
            kernels.push(admitted.collect::<Result<Vec<_>, _>>()?);
        }
        device.bind().map_err(system)?;
        let driver = device.driver();
        let stream = OwnedStream::new(driver).map_err(system)?;
        let mut wire_stream = WireStream::new(driver, &plans.plans).map_err(system)?;
        let has_clock = communicators.as_ref().is_some_and(|all| all.mesh().ranks() > 1);
        let more = stand_in.map(|_| stand_in::source()).into_iter().chain(has_clock.then(clock::source));
        let (modules, compiled) = build(plans, &kernels, more, &facts, device).map_err(system)?;
        if has_clock {
            wire_stream.set_clock(Clock::new(driver, &modules, stream.get()).map_err(system)?);
        }
        laps.lap("kernels");
        let windowed = communicators.as_ref().filter(|_| options.window);
        let arena = match windowed {
            Some(communicators) => {
                let calls = communicators.windows().map_err(system)?;
                DeviceMemory::of_nccl(driver, calls, plans.arena_bytes)
            }
            None => DeviceMemory::new(driver, plans.arena_bytes),
        };
        let arena = arena.map_err(|why| {
            RuntimeError::Resources(format!(
                "the GPU has no {} bytes for the arena: {why}",
                plans.arena_bytes
            ))
        })?;
        arena.fill(0, stream.get()).map_err(system)?;
        let tuned = Tuned::new(Store::of_this_user("products"), device.tuned_on(), options.candidates());
        if tuned.candidates() > 1 {
            // Zeros would draw less power in the tensor cores than real data, and other algorithms would win.
            let function = modules.function(&noise::source(), "noise").map_err(system)?;
            let words = arena.bytes() / size_of::<u32>();
            // SAFETY: the range is the whole arena, which outlives the work on its stream.
            unsafe { noise::fill(&function, arena.address(), words, 1, Noise::WIDE, stream.get()) }
                .map_err(system)?;
        }

        let (notes, chosen) = (RefCell::new(vec![]), RefCell::new(vec![]));
        let products = RefCell::default();
        let prepare = Prepare {
            arena: arena.address(),
            facts: &facts,
            modules: &modules,
            driver,
            lt: device.lt(),
            cudnn: device.cudnn(),
            tuned: &tuned,
            stream: stream.get(),
            notes: &notes,
            chosen: &chosen,
            products: &products,
            communicators: communicators.as_deref(),
            next: None,
        };
        let launches: usize = plans.plans.iter().map(|plan| plan.launches.len()).sum();
        let wait = waits::begin("timing and preparing", Unit::Things("launches"), Some(launches as u64));
        let mut works: Vec<Vec<Box<dyn Work>>> = Vec::with_capacity(plans.plans.len());
        for (plan, kernels) in plans.plans.iter().zip(&kernels) {
            let resolved = plan.launches.iter().zip(kernels).enumerate().map(|(i, (l, k))| {
                let prepare = Prepare { next: plan.launches.get(i + 1), ..prepare };
                let work = match stand_in {
                    Some(times) if l.queue == Queue::Wire => stand_in::prepare(l, times(l), &prepare),
                    _ => (k.prepare)(l, &prepare),
                };
                wait.add(1);
                work.map_err(named(l))
            });
            works.push(resolved.collect::<Result<_, _>>()?);
        }
        drop(wait);
        laps.lap("products");
        let _wait = waits::begin("running every launch once", Unit::Nothing, None);
        // Timing candidates may have left arbitrary data.
        arena.fill(0, stream.get()).map_err(system)?;
        let (mut wire_bytes, mut windows) = (0, None);
        if let Some(communicators) = &communicators {
            stream.synchronize().map_err(system)?;
            barrier()?;
            let (before, _) = driver.memory().map_err(system)?;
            if windowed.is_some() {
                // SAFETY: the session drops the windows before the arena.
                let registered = unsafe { Windows::register(communicators, arena.address(), arena.bytes()) };
                windows = Some(registered.map_err(|why| RuntimeError::Wire(why.to_string()))?);
                // Either all ranks have a window, or all learn which of them has none.
                barrier()?;
            }
            first_exchanges(plans, &works, &stream)?;
            let (after, _) = driver.memory().map_err(system)?;
            wire_bytes = communicators.bytes() + before.saturating_sub(after);
        }
        for (plan, works) in plans.plans.iter().zip(&works) {
            one_by_one(plan, works, &stream, &wire_stream)?;
        }
        let mut graphs = vec![];
        if options.graphs && !options.check_each_launch {
            for (plan, works) in plans.plans.iter().zip(&works) {
                let graph =
                    stream.capture(|stream| wire_stream.enqueue(plan, works, stream).map_err(|(_, why)| why));
                let role = plan.role.name();
                graphs.push(graph.map_err(|why| {
                    RuntimeError::Resources(format!("the plan `{role}` cannot be captured as a graph: {why}"))
                })?);
            }
        }
        arena.fill(0, stream.get()).map_err(system)?;
        let traffic = Traffic::new(plans, device).map_err(system)?;
        stream.synchronize().map_err(system)?;
        // An unwritable cache folder costs time at every start, so it is reported, once.
        let mut notes = notes.into_inner();
        let tuning = tuned.tuning();
        notes.extend(compiled.note.clone().or(tuning.note.clone()));
        let (free, _) = driver.memory().map_err(system)?;
        let taken = device.free_bytes().saturating_sub(free);
        let driver_bytes = taken.saturating_sub(arena.bytes() as u64 + wire_bytes);
        laps.lap("graphs");
        Ok(Session {
            graphs,
            works,
            written: plans.plans.iter().map(written).collect(),
            traffic: RefCell::new(traffic),
            windows,
            communicators,
            arena,
            wire_stream,
            stream,
            options,
            compiled,
            tuning,
            notes,
            attention: chosen.into_inner(),
            products: products.into_inner(),
            driver_bytes,
            wire_bytes,
            laps,
            device: device.clone(),
        })
    }

    pub fn arena_bytes(&self) -> usize {
        self.arena.bytes()
    }

    /// Device memory of the process besides the arena: context, modules, graphs.
    pub fn driver_bytes(&self) -> u64 {
        self.driver_bytes
    }

    /// Device memory that NCCL allocated; 0 without communicators.
    pub fn wire_bytes(&self) -> u64 {
        self.wire_bytes
    }

    /// Name and version of the library that moves tensors between ranks; `None` without communicators.
    pub fn wire(&self) -> Option<String> {
        self.communicators.as_ref().map(|communicators| communicators.words())
    }

    /// Whether the arena is registered as a window of every communicator, so that exchanges can use it directly.
    pub fn has_window(&self) -> bool {
        self.windows.as_ref().is_some_and(|windows| windows.count() > 0)
    }

    /// This rank's number in the plans' mesh.
    pub fn rank(&self) -> usize {
        self.communicators.as_ref().map_or(0, |communicators| communicators.rank())
    }

    /// Time spent opening the session: loading kernels, choosing algorithms of products, first run and capture of every plan.
    pub fn laps(&self) -> &Laps {
        &self.laps
    }

    /// Whether every plan was captured as a graph, to be replayed by each run.
    pub fn replays_graphs(&self) -> bool {
        !self.graphs.is_empty()
    }

    /// Launches that fell back to another implementation, and why.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The kernels that attention runs on, in one line; `None` if there is none.
    pub fn attention(&self) -> Option<String> {
        choice::describe(&self.attention)
    }

    /// Number of products per kernel, in one line; `None` if there are none.
    pub fn products(&self) -> Option<String> {
        product_choice::describe(&self.products)
    }

    /// How many kernels were compiled and how many came from the cache.
    pub fn compiled(&self) -> &Compiled {
        &self.compiled
    }

    /// How many algorithms of products were timed and how many came from the cache.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Whether algorithms of products are chosen by measured times.
    pub fn is_tuned(&self) -> bool {
        self.options.candidates() > 1
    }

    /// Fills a dense tensor of floats with noise.
    pub fn fill_noise(&mut self, view: &View, seed: u32, noise: Noise) -> Result<(), RuntimeError> {
        self.bind()?;
        let (stream, bytes) = (self.stream.get(), view.span_bytes());
        let is_words = view.is_dense() && bytes.is_multiple_of(4) && view.offset.is_multiple_of(4);
        if !is_words || view.offset + bytes > self.arena.bytes() {
            return Err(RuntimeError::Unsound(format!("{view:?} is no run of whole words in the arena")));
        }
        let function = self.function(noise::source(), "noise").map_err(late)?;
        let range = view.offset..view.offset + bytes;
        self.traffic.get_mut().before(&self.arena, &[range], stream).map_err(late)?;
        let at = self.arena.address() + view.offset as u64;
        // SAFETY: the range was checked to lie in the arena, which outlives the work on its stream.
        unsafe { noise::fill(&function, at, bytes / 4, seed, noise, stream) }.map_err(late)?;
        // The kernel's module is unloaded when this returns.
        self.stream.synchronize().map_err(late)
    }

    /// Compiles a kernel that belongs to no launch.
    fn function(&self, source: Source, entry: &str) -> Result<Function, CudaError> {
        let arch = nvrtc::arch(&self.device.facts(self.options));
        let (cubins, _) =
            Cache::of_this_user().cubins(&[source].into(), &arch, self.device.nvrtc(), &|| ())?;
        Arc::new(Module::load(self.device.driver(), &cubins[0].1)?).function(entry)
    }

    /// Times every launch of these plans, in passes over all of them. Exchanges are timed separately and left out of the
    /// passes, so with exchanges the arena holds no meaningful results afterwards.
    pub(crate) fn time(&mut self, plans: &[(usize, &Plan)], passes: usize) -> Result<Samples, RuntimeError> {
        self.bind()?;
        let (stream, function) = (self.stream.get(), self.function(spin::source(), "spin").map_err(late)?);
        let mut timer = Timer::new(self.device.driver(), function, stream).map_err(late)?;
        let launches = || plans.iter().map(|(_, plan)| plan.launches.len());
        let mut samples = Samples::new(launches(), passes);
        self.time_exchanges(plans, passes, &timer, &mut samples)?;
        let computes: Vec<Vec<usize>> =
            plans.iter().map(|(_, plan)| of_queue(plan, Queue::Compute)).collect();
        // Repetitions of each launch between its events; `None` until a first run was timed.
        let mut repeats: Vec<Vec<Option<usize>>> = launches().map(|count| vec![None; count]).collect();
        // If the host is late, a pass is discarded; after this many passes the host is assumed to be busy.
        for _ in 0..4 * passes.max(1) + 4 {
            for (which, (index, plan)) in plans.iter().enumerate() {
                self.traffic.get_mut().before(&self.arena, &self.written[*index], stream).map_err(late)?;
                let compute = &computes[which];
                let times: Vec<usize> = compute.iter().map(|i| repeats[which][*i].unwrap_or(1)).collect();
                for range in timing::batches(&times) {
                    let works = compute[range.clone()].iter().map(|i| &*self.works[*index][*i]);
                    let works: Vec<_> = works.zip(times[range.clone()].iter().copied()).collect();
                    let failed = |(i, why)| named(&plan.launches[compute[range.start + i]])(why);
                    let seconds = timer.seconds(&works).map_err(failed)?;
                    for (&i, seconds) in compute[range].iter().zip(seconds.into_iter().flatten()) {
                        let is_repeatable = || launch::is_repeatable(&plan.launches[i]);
                        match repeats[which][i] {
                            Some(_) => samples.add(which, i, seconds),
                            None => repeats[which][i] = Some(timing::repeats(seconds, is_repeatable())),
                        }
                    }
                }
            }
            if samples.are_enough() {
                break;
            }
        }
        Ok(samples)
    }

    /// Times the exchanges of plans, equally often on every rank.
    fn time_exchanges(
        &mut self,
        plans: &[(usize, &Plan)],
        passes: usize,
        timer: &Timer,
        samples: &mut Samples,
    ) -> Result<(), RuntimeError> {
        let of_plan = |(which, (index, plan)): (usize, &(usize, &'_ Plan))| {
            of_queue(plan, Queue::Wire).into_iter().map(move |i| (which, *index, i)).collect::<Vec<_>>()
        };
        let all: Vec<(usize, usize, usize)> = plans.iter().enumerate().flat_map(of_plan).collect();
        if all.is_empty() {
            return Ok(());
        }
        for (index, _) in plans {
            let (arena, written) = (&self.arena, &self.written[*index]);
            self.traffic.get_mut().before(arena, written, self.stream.get()).map_err(late)?;
        }
        let works: Vec<&dyn Work> = all.iter().map(|(_, index, i)| &*self.works[*index][*i]).collect();
        let timed = timing::exchanges(self.device.driver(), timer, &works, passes.max(1) + 1);
        let named = |(at, why): (usize, CudaError)| {
            let (which, _, i) = all[at];
            named(&plans[which].1.launches[i])(why)
        };
        for round in &timed.map_err(named)?[1..] {
            for ((which, _, i), seconds) in all.iter().zip(round) {
                samples.add(*which, *i, *seconds);
            }
        }
        Ok(())
    }

    /// Enqueues plan `index` of the set given to `new`, without waiting.
    pub fn run(&mut self, index: usize, plan: &Plan) -> Result<(), RuntimeError> {
        self.bind()?;
        let stream = self.stream.get();
        self.traffic.get_mut().before(&self.arena, &self.written[index], stream).map_err(late)?;
        if self.options.check_each_launch {
            return one_by_one(plan, &self.works[index], &self.stream, &self.wire_stream);
        }
        match self.graphs.get(index) {
            Some(graph) => graph.launch(stream).map_err(|why| {
                RuntimeError::Launch(format!("the plan `{}` does not start: {why}", plan.role.name()))
            }),
            None => {
                let enqueued = self.wire_stream.enqueue(plan, &self.works[index], stream);
                enqueued.map_err(|(launch, why)| named(launch)(why))
            }
        }
    }

    /// Enqueues the launches of a plan in order, launch `i` `times[i]` times. Requires a session without other ranks.
    pub fn run_repeated(&mut self, index: usize, plan: &Plan, times: &[usize]) -> Result<(), RuntimeError> {
        self.bind()?;
        let stream = self.stream.get();
        self.traffic.get_mut().before(&self.arena, &self.written[index], stream).map_err(late)?;
        for ((work, launch), times) in self.works[index].iter().zip(&plan.launches).zip(times) {
            for _ in 0..*times {
                work.enqueue(stream).map_err(named(launch))?;
            }
        }
        Ok(())
    }

    /// The device, for queries unrelated to running plans.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Mean milliseconds per run of a plan, over `calls` runs.
    pub fn time_ms(&self, index: usize, calls: usize) -> Result<f64, RuntimeError> {
        self.bind()?;
        let stream = self.stream.get();
        let mut traffic = self.traffic.borrow_mut();
        traffic.before(&self.arena, &self.written[index], stream).map_err(late)?;
        let run = || match self.graphs.get(index) {
            Some(graph) => graph.launch(stream),
            None => self.works[index].iter().try_for_each(|work| work.enqueue(stream)),
        };
        self.device.driver().time_ms(stream, calls, run).map_err(late)
    }

    pub fn write(&mut self, view: &View, bytes: &[u8]) -> Result<(), RuntimeError> {
        self.bind()?;
        let stream = self.stream.get();
        if view.is_dense() {
            return self.traffic.get_mut().write(&self.arena, view.offset, bytes, stream).map_err(late);
        }
        // A strided view: reads the whole span, changes the elements and writes it back.
        let mut span = self.span(view)?;
        copy::scatter(&View { offset: 0, ..view.clone() }, &mut span, bytes);
        self.traffic.get_mut().write(&self.arena, view.offset, &span, stream).map_err(late)
    }

    pub fn read(&self, view: &View) -> Result<Vec<u8>, RuntimeError> {
        self.bind()?;
        let span = self.span(view)?;
        if view.strides == contiguous_strides(&view.dims) {
            return Ok(span);
        }
        Ok(copy::gather(&View { offset: 0, ..view.clone() }, &span))
    }

    /// Enqueues copies of single values to the host; returns the index to pass to `collect`.
    pub fn post(&mut self, views: &[&View]) -> Result<usize, RuntimeError> {
        self.bind()?;
        let offsets: Vec<usize> = views.iter().map(|view| view.offset).collect();
        self.traffic.get_mut().post(&self.arena, &offsets, self.stream.get()).map_err(late)
    }

    /// Waits for posted values and returns them.
    pub fn collect(&mut self, place: usize, count: usize) -> Result<Vec<f32>, RuntimeError> {
        self.bind()?;
        self.traffic.get_mut().collect(place, count).map_err(late)
    }

    /// An event after all work enqueued so far.
    pub fn mark(&self) -> Result<Event, RuntimeError> {
        self.bind()?;
        let event = Event::new(self.device.driver()).map_err(late)?;
        event.record(self.stream.get()).map_err(late)?;
        Ok(event)
    }

    /// Enqueues a copy of the device clock's sums after all work enqueued so far; returns the index to pass to `clock_at`.
    /// `None` without a clock, as on a single rank.
    pub fn post_clock(&self) -> Result<Option<usize>, RuntimeError> {
        let Some(clock) = self.wire_stream.clock() else { return Ok(None) };
        self.bind()?;
        let (memory, offsets) = clock.sums();
        let posted = self.traffic.borrow_mut().post_from(memory, &offsets, self.stream.get());
        posted.map(Some).map_err(late)
    }

    /// Waits for posted clock sums and returns them.
    pub fn clock_at(&self, place: usize) -> Result<Sums, RuntimeError> {
        self.bind()?;
        let words = self.traffic.borrow().collect(place, 2).map_err(late)?;
        Ok(Sums::of([words[0], words[1]]))
    }

    /// The time between two events, waiting for the later one.
    pub fn between(&self, from: &Event, to: &Event) -> Result<Duration, RuntimeError> {
        self.bind()?;
        let ms = from.elapsed_ms(to).map_err(late)?;
        Ok(Duration::from_secs_f64((ms / 1e3).max(0.0)))
    }

    /// Begins to copy tensors out, as they are after all work enqueued so far. Plans that write none of them overlap the copy;
    /// a plan that writes one waits for it on the device.
    pub fn begin_copy(&mut self, views: &[View]) -> Result<Copying, RuntimeError> {
        self.bind()?;
        if views.iter().all(View::is_dense) {
            let ranges = views.iter().map(|view| view.offset..view.offset + view.span_bytes()).collect();
            let begun = self.traffic.get_mut().begin_copy(&self.arena, ranges, self.stream.get());
            if let Some(pending) = begun.map_err(late)? {
                return Ok(Copying::pending(pending));
            }
        }
        Ok(Copying::on_host(views.iter().map(|view| self.read(view)).collect::<Result<_, _>>()?))
    }

    pub fn fill(&mut self, byte: u8) -> Result<(), RuntimeError> {
        self.bind()?;
        let (stream, whole) = (self.stream.get(), 0..self.arena.bytes());
        self.traffic.get_mut().before(&self.arena, &[whole], stream).map_err(late)?;
        self.arena.fill(byte, stream).map_err(late)
    }

    /// The bytes from a view's first to its last element, after all work enqueued so far.
    fn span(&self, view: &View) -> Result<Vec<u8>, RuntimeError> {
        let mut traffic = self.traffic.borrow_mut();
        traffic.read(&self.arena, view.offset, view.span_bytes(), self.stream.get()).map_err(late)
    }

    fn bind(&self) -> Result<(), RuntimeError> {
        self.device.bind().map_err(late)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The objects dropped next belong to this context and may still be in use. Errors of a failed device are of no use
        // here.
        let _ = self.device.bind();
        let _ = self.stream.synchronize();
        let _ = self.wire_stream.synchronize();
        let _ = self.traffic.get_mut().synchronize();
    }
}

/// Validates a launch and finds its kernel.
fn admit(launch: &Launch, arena_bytes: usize) -> Result<&'static Kernel, RuntimeError> {
    let refuse = |why: String| RuntimeError::Unsound(format!("{}: {why}", launch::describe(launch)));
    let kernel = super::kernel(launch.kernel)
        .ok_or_else(|| refuse(format!("CUDA has no kernel `{}`", launch.kernel)))?;
    launch::check(launch, &kernel.row, arena_bytes, 1).map_err(refuse)?;
    Ok(kernel)
}

/// Loads every source of every launch from the cache, compiling those it does not have.
fn build(
    plans: &PlanSet,
    kernels: &[Vec<&'static Kernel>],
    more: impl IntoIterator<Item = Source>,
    facts: &Facts,
    device: &Device,
) -> Result<(Modules, Compiled), CudaError> {
    let launches = plans.plans.iter().flat_map(|plan| &plan.launches);
    let mut sources: HashSet<_> =
        launches.zip(kernels.iter().flatten()).flat_map(|(l, k)| (k.sources)(l, facts)).collect();
    sources.extend(facts.autotune.then(noise::source));
    sources.extend(more);
    let (cubins, compiled) =
        Cache::of_this_user().cubins(&sources, &nvrtc::arch(facts), device.nvrtc(), &|| ())?;
    let mut modules = Modules::default();
    for (source, cubin) in cubins {
        let module = Module::load(device.driver(), &cubin)
            .map_err(|why| CudaError::status(format!("{}: {}", source.name, why.what), why.code))?;
        modules.insert(source, module);
    }
    Ok((modules, compiled))
}

/// Compiles the sources that the cache lacks, so that the ranks of a host do not each compile the same ones.
pub fn compile_ahead(plans: &PlanSet, device: &Device, options: Options) -> Result<(), RuntimeError> {
    let facts = device.facts(options);
    let mut sources = HashSet::new();
    for launch in plans.plans.iter().flat_map(|plan| &plan.launches) {
        sources.extend((admit(launch, plans.arena_bytes)?.sources)(launch, &facts));
    }
    sources.extend(facts.autotune.then(noise::source));
    sources.insert(clock::source());
    let compiled = device.compile_ahead(&sources, &|| ());
    compiled.map_err(|why| RuntimeError::Resources(why.to_string()))
}

/// Runs every exchange of the plans once by itself; NCCL connects and allocates on the first call.
fn first_exchanges(
    plans: &PlanSet,
    works: &[Vec<Box<dyn Work>>],
    stream: &OwnedStream,
) -> Result<(), RuntimeError> {
    let launches = plans.plans.iter().zip(works).flat_map(|(plan, works)| plan.launches.iter().zip(works));
    for (launch, work) in launches.filter(|(launch, _)| launch.op.kind().is_collective()) {
        work.enqueue(stream.get()).and_then(|()| stream.synchronize()).map_err(named(launch))?;
    }
    Ok(())
}

/// Indices of a plan's launches on a queue.
fn of_queue(plan: &Plan, queue: Queue) -> Vec<usize> {
    (0..plan.launches.len()).filter(|i| plan.launches[*i].queue == queue).collect()
}

/// Runs the launches of a plan, synchronising both streams after each, so that an error is attributed to its launch.
fn one_by_one(
    plan: &Plan,
    works: &[Box<dyn Work>],
    stream: &OwnedStream,
    wire: &WireStream,
) -> Result<(), RuntimeError> {
    for (launch, work) in plan.launches.iter().zip(works) {
        work.enqueue(wire.stream_of(launch, stream.get()))
            .and_then(|()| stream.synchronize())
            .and_then(|()| wire.synchronize())
            .map_err(named(launch))?;
    }
    Ok(())
}

/// Turns an error of a launch into one that names its path, operation and types.
fn named(launch: &Launch) -> impl FnOnce(CudaError) -> RuntimeError {
    move |why| RuntimeError::Launch(format!("{}: {}: {why}", launch::describe(launch), launch.kernel))
}

/// An error that the driver reports after the call that caused it.
pub(crate) fn late(why: CudaError) -> RuntimeError {
    RuntimeError::Launch(format!("the GPU failed at this or an earlier launch: {why}"))
}
