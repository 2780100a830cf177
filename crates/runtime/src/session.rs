//! A session: runs plans over one arena, on either backend. Write slots, run a plan, read slots and results.

use std::cell::Cell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flatout_ir::block8::e4m4_to_f32;
use flatout_ir::fp8::{e4m3_to_f32, e5m2_to_f32};
use flatout_ir::types::{DType, bf16_to_f32};
use flatout_ir::{Launch, PlanSet, Role, View};
use flatout_world::Wire;

use crate::cuda::driver::Event;
use crate::cuda::driver::nccl::Communicators;
use crate::cuda::session::clock::{PlanTimes, Sums};
use crate::cuda::session::noise::Noise;
use crate::ranks::{self, Ranks};
use crate::timing::{LaunchTime, missing};
use crate::{Copying, cpu, cuda, launch};

/// Errors that a compiled plan may meet on a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuntimeError {
    /// The system refuses memory or threads.
    Resources(String),
    /// The plan set has no such slot, result or plan, or the value has another size.
    Name(String),
    /// A launch that failed validation: a compiler bug.
    Unsound(String),
    /// A launch that failed on its data, such as an index outside its table, or whose exchange with other ranks was cut short.
    Launch(String),
    /// Plans for several ranks without a wire between them.
    Wire(String),
}

impl fmt::Display for RuntimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (RuntimeError::Resources(why)
        | RuntimeError::Name(why)
        | RuntimeError::Unsound(why)
        | RuntimeError::Launch(why)
        | RuntimeError::Wire(why)) = self;
        f.write_str(why)
    }
}

impl std::error::Error for RuntimeError {}

/// Requested results that may still be on their way from the device.
pub struct Posted(PostedState);

enum PostedState {
    Ready(Vec<f32>),
    /// On their way into pinned memory: `count` values starting at index `place`.
    Pending {
        place: usize,
        count: usize,
    },
}

impl Posted {
    /// Whether `collect` would return without waiting.
    pub fn is_ready(&self) -> bool {
        matches!(self.0, PostedState::Ready(_))
    }
}

/// A point in the order of a session's work; on a GPU, the completion of all work enqueued before it.
pub struct Mark(MarkState);

enum MarkState {
    Host(Instant),
    Device(Event, Option<ClockReading>),
}

/// The device clock at a mark: the index its sums are copied to, and the sums once read, because that index is reused.
struct ClockReading {
    place: usize,
    sums: Cell<Option<Sums>>,
}

pub struct Session {
    plans: PlanSet,
    backend: Backend,
}

enum Backend {
    Cpu(cpu::session::Session),
    Cuda(Box<cuda::session::Session>),
}

impl Session {
    /// A session on the CPU. Allocates the zeroed arena and validates every launch, so that running needs no further checks.
    pub fn new(plans: PlanSet, threads: usize) -> Result<Session, RuntimeError> {
        Session::among(plans, threads, None)
    }

    /// As `new`, for one of several ranks connected by a wire, which collectives need; all ranks must run these plans in the
    /// same order.
    pub fn among(
        plans: PlanSet,
        threads: usize,
        wire: Option<Arc<dyn Wire>>,
    ) -> Result<Session, RuntimeError> {
        let ranks = Ranks::new(&plans, wire)?;
        let backend = Backend::Cpu(cpu::session::Session::new(&plans, threads, ranks)?);
        check_placement(&plans)?;
        Ok(Session { plans, backend })
    }

    /// A session on a GPU: as on the CPU, but also compiles every kernel and instantiates every graph.
    pub fn cuda(
        plans: PlanSet,
        device: &cuda::Device,
        options: cuda::Options,
    ) -> Result<Session, RuntimeError> {
        Session::cuda_among(plans, device, options, None, &|| Ok(()))
    }

    /// As `cuda`, for one of several ranks connected by communicators. Plans with collectives need them; all ranks must run
    /// these plans in the same order. `barrier` waits for all ranks, and is called before their first exchange.
    pub fn cuda_among(
        plans: PlanSet,
        device: &cuda::Device,
        options: cuda::Options,
        communicators: Option<Arc<Communicators>>,
        barrier: &dyn Fn() -> Result<(), RuntimeError>,
    ) -> Result<Session, RuntimeError> {
        check_placement(&plans)?;
        ranks::check(&plans, communicators.as_ref().map(|all| all.mesh().ranks()))?;
        let session = cuda::session::Session::new(&plans, device, options, communicators, barrier)?;
        Ok(Session { plans, backend: Backend::Cuda(Box::new(session)) })
    }

    /// Simulates one of several ranks on a single GPU: a kernel that takes the time given by `times` replaces every exchange.
    pub fn with_stand_in(
        plans: PlanSet,
        device: &cuda::Device,
        options: cuda::Options,
        times: &cuda::session::stand_in::Times<'_>,
    ) -> Result<Session, RuntimeError> {
        check_placement(&plans)?;
        let session = cuda::session::Session::with_stand_in(&plans, device, options, times)?;
        Ok(Session { plans, backend: Backend::Cuda(Box::new(session)) })
    }

    pub fn plans(&self) -> &PlanSet {
        &self.plans
    }

    /// The CUDA session behind this one; `None` on the CPU.
    pub fn as_cuda(&self) -> Option<&cuda::session::Session> {
        match &self.backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(session) => Some(session),
        }
    }

    /// This rank's number in the plans' mesh.
    pub fn rank(&self) -> usize {
        match &self.backend {
            Backend::Cpu(session) => session.rank(),
            Backend::Cuda(session) => session.rank(),
        }
    }

    pub fn arena_bytes(&self) -> usize {
        match &self.backend {
            Backend::Cpu(session) => session.arena_bytes(),
            Backend::Cuda(session) => session.arena_bytes(),
        }
    }

    /// Memory the driver allocated besides the arena, measured; 0 on the CPU.
    pub fn driver_bytes(&self) -> u64 {
        self.as_cuda().map_or(0, cuda::session::Session::driver_bytes)
    }

    /// Memory the communication library allocated besides both, measured; 0 on the CPU and without other ranks.
    pub fn wire_bytes(&self) -> u64 {
        self.as_cuda().map_or(0, cuda::session::Session::wire_bytes)
    }

    /// Launches that fell back to another implementation, and why: a library refused a shape, for example.
    pub fn notes(&self) -> &[String] {
        self.as_cuda().map_or(&[], cuda::session::Session::notes)
    }

    pub fn replays_graphs(&self) -> bool {
        self.as_cuda().is_some_and(cuda::session::Session::replays_graphs)
    }

    /// Runs the plan of a role. On a GPU this only enqueues; a failure on the device is reported by the next call that reads.
    pub fn run(&mut self, role: Role) -> Result<(), RuntimeError> {
        self.run_plan(self.index(role)?)
    }

    fn index(&self, role: Role) -> Result<usize, RuntimeError> {
        self.plans.plans.iter().position(|plan| plan.role == role).ok_or_else(|| missing(role))
    }

    /// Runs the launches of a plan in order.
    pub fn run_plan(&mut self, index: usize) -> Result<(), RuntimeError> {
        let plan = &self.plans.plans[index];
        match &mut self.backend {
            Backend::Cpu(session) => session.run(index, plan),
            Backend::Cuda(session) => session.run(index, plan),
        }
    }

    /// Runs the plan of a role with launch `i` repeated `times[i]` times, in the plan's order; launches that are not repeatable
    /// at most once. For measurements only, as accumulators and counters advance. Requires a session without other ranks.
    pub fn run_repeated(&mut self, role: Role, times: &[usize]) -> Result<(), RuntimeError> {
        let index = self.index(role)?;
        let plan = &self.plans.plans[index];
        let bounded = |(launch, times): (&Launch, &usize)| match launch::is_repeatable(launch) {
            true => *times,
            false => 1.min(*times),
        };
        let times: Vec<usize> = plan.launches.iter().zip(times).map(bounded).collect();
        match &mut self.backend {
            Backend::Cpu(session) => session.run_repeated(index, plan, &times),
            Backend::Cuda(session) => session.run_repeated(index, plan, &times),
        }
    }

    /// Whether a launch of a role's plan may run several times in a row.
    pub fn is_repeatable(&self, role: Role, index: usize) -> bool {
        let plan = self.plans.plan(role);
        plan.and_then(|plan| plan.launches.get(index)).is_some_and(launch::is_repeatable)
    }

    /// Times every launch of these plans individually: one vector per role, one time per launch, in the plan's order. A pass
    /// runs the plans in the given order, so `[Grad, Apply]` is one update; each launch is timed in `passes` passes or a few
    /// more. Afterwards accumulators and counters have advanced by that many runs, plus one warm-up run.
    pub fn time(&mut self, roles: &[Role], passes: usize) -> Result<Vec<Vec<LaunchTime>>, RuntimeError> {
        let indices = roles.iter().map(|role| self.index(*role)).collect::<Result<Vec<_>, _>>()?;
        let plans: Vec<_> = indices.into_iter().map(|i| (i, &self.plans.plans[i])).collect();
        let samples = match &mut self.backend {
            Backend::Cpu(session) => session.time(&plans, passes),
            Backend::Cuda(session) => session.time(&plans, passes),
        };
        samples?.times()
    }

    /// Sets every byte of the arena, for tests of which bytes a launch touches.
    pub(crate) fn fill(&mut self, byte: u8) -> Result<(), RuntimeError> {
        match &mut self.backend {
            Backend::Cpu(session) => {
                session.fill(byte);
                Ok(())
            }
            Backend::Cuda(session) => session.fill(byte),
        }
    }

    /// The elements of a view in row-major order.
    pub(crate) fn read_view(&self, view: &View) -> Result<Vec<u8>, RuntimeError> {
        match &self.backend {
            Backend::Cpu(session) => Ok(session.read(view)),
            Backend::Cuda(session) => session.read(view),
        }
    }

    /// Sets the elements of a dense view from row-major order.
    pub(crate) fn write_view(&mut self, view: &View, bytes: &[u8]) -> Result<(), RuntimeError> {
        match &mut self.backend {
            Backend::Cpu(session) => {
                session.write(view, bytes);
                Ok(())
            }
            Backend::Cuda(session) => session.write(view, bytes),
        }
    }

    /// Fills a dense tensor with noise that is identical on every backend.
    pub(crate) fn fill_noise(&mut self, view: &View, seed: u32, noise: Noise) -> Result<(), RuntimeError> {
        if let Backend::Cuda(session) = &mut self.backend {
            return session.fill_noise(view, seed, noise);
        }
        let words = (view.span_bytes() as u64).div_ceil(4);
        let mut bytes: Vec<u8> = (0..words).flat_map(|i| noise.word(seed, i).to_le_bytes()).collect();
        bytes.truncate(view.span_bytes());
        self.write_view(view, &bytes)
    }

    fn slot_view(&self, path: &str) -> Result<&View, RuntimeError> {
        let slot = self.plans.slot(path);
        slot.map(|s| &s.view).ok_or_else(|| RuntimeError::Name(format!("there is no slot `{path}`")))
    }

    /// A range of a slot's elements in row-major order. A slot that is not dense can only be taken whole.
    fn range_view(&self, path: &str, range: &Range<usize>) -> Result<View, RuntimeError> {
        let view = self.slot_view(path)?;
        let elements = view.elements();
        if *range == (0..elements) {
            return Ok(view.clone());
        }
        if range.start > range.end || range.end > elements || !view.is_dense() {
            return Err(RuntimeError::Name(format!(
                "`{path}` has {elements} elements, and none from {} to {}",
                range.start, range.end
            )));
        }
        let offset = view.offset + range.start * view.dtype.bytes();
        Ok(View { offset, dtype: view.dtype, dims: vec![range.len()], strides: vec![1] })
    }

    /// Sets a slot from its elements in row-major order, in the slot's own type.
    pub fn write_slot(&mut self, path: &str, bytes: &[u8]) -> Result<(), RuntimeError> {
        let view = self.slot_view(path)?.clone();
        let wanted = view.elements() * view.dtype.bytes();
        if bytes.len() != wanted {
            let got = bytes.len();
            return Err(RuntimeError::Name(format!("`{path}` takes {wanted} bytes, not {got}")));
        }
        self.write_view(&view, bytes)
    }

    /// Sets consecutive elements of a slot from element `first`, as many as `bytes` holds.
    pub fn write_range(&mut self, path: &str, first: usize, bytes: &[u8]) -> Result<(), RuntimeError> {
        let size = self.slot_view(path)?.dtype.bytes();
        let view = self.range_view(path, &(first..first + bytes.len() / size))?;
        if !bytes.len().is_multiple_of(size) {
            let got = bytes.len();
            return Err(RuntimeError::Name(format!(
                "`{path}` takes elements of {size} bytes, not {got} bytes"
            )));
        }
        if bytes.is_empty() { Ok(()) } else { self.write_view(&view, bytes) }
    }

    /// A range of a slot's elements in row-major order, in the slot's own type.
    pub fn read_range(&self, path: &str, range: Range<usize>) -> Result<Vec<u8>, RuntimeError> {
        let view = self.range_view(path, &range)?;
        if range.is_empty() { Ok(vec![]) } else { self.read_view(&view) }
    }

    /// The elements of a slot in row-major order, in the slot's own type.
    pub fn read_slot(&self, path: &str) -> Result<Vec<u8>, RuntimeError> {
        self.read_view(self.slot_view(path)?)
    }

    /// Copies ranges of slots as they are after all work requested so far. On a GPU the copy overlaps the plans that run next,
    /// and a plan that writes any of these elements waits for it on the device; on the CPU it is made before this returns.
    pub fn begin_copy<P: AsRef<str>>(
        &mut self,
        ranges: &[(P, Range<usize>)],
    ) -> Result<Copying, RuntimeError> {
        let views = ranges.iter().map(|(path, range)| self.range_view(path.as_ref(), range));
        let views = views.collect::<Result<Vec<View>, _>>()?;
        match &mut self.backend {
            Backend::Cpu(session) => {
                Ok(Copying::on_host(views.iter().map(|view| session.read(view)).collect()))
            }
            Backend::Cuda(session) => session.begin_copy(&views),
        }
    }

    pub fn write_f32(&mut self, path: &str, values: &[f32]) -> Result<(), RuntimeError> {
        self.expect(path, DType::F32)?;
        self.write_slot(path, bytes_of(values))
    }

    pub fn write_i32(&mut self, path: &str, values: &[i32]) -> Result<(), RuntimeError> {
        self.expect(path, DType::I32)?;
        self.write_slot(path, bytes_of(values))
    }

    pub fn write_u8(&mut self, path: &str, values: &[u8]) -> Result<(), RuntimeError> {
        self.expect(path, DType::U8)?;
        self.write_slot(path, values)
    }

    /// A slot of any float or integer type, as f32.
    pub fn read_f32(&self, path: &str) -> Result<Vec<f32>, RuntimeError> {
        let dtype = self.slot_view(path)?.dtype;
        Ok(as_f32(dtype, &self.read_slot(path)?))
    }

    /// A range of a slot's elements in row-major order, as f32.
    pub fn read_range_f32(&self, path: &str, range: Range<usize>) -> Result<Vec<f32>, RuntimeError> {
        let dtype = self.slot_view(path)?.dtype;
        Ok(as_f32(dtype, &self.read_range(path, range)?))
    }

    pub fn read_i32(&self, path: &str) -> Result<Vec<i32>, RuntimeError> {
        self.expect(path, DType::I32)?;
        Ok(words(&self.read_slot(path)?).map(i32::from_le_bytes).collect())
    }

    /// A result of the plan that ran last, as f32. A later run may overwrite it.
    pub fn result(&self, role: Role, name: &str) -> Result<Vec<f32>, RuntimeError> {
        let plan = self.plans.plan(role);
        let view = plan.and_then(|plan| plan.result(name)).ok_or_else(|| {
            RuntimeError::Name(format!("the plan `{}` has no result `{name}`", role.name()))
        })?;
        Ok(as_f32(view.dtype, &self.read_view(view)?))
    }

    /// Requests single-f32 results of the plan that ran last. On a GPU they are copied out in stream order while the host
    /// continues; collect them before the ring of `cuda::session::staging::Mailbox` wraps around.
    pub fn post(&mut self, role: Role, names: &[&str]) -> Result<Posted, RuntimeError> {
        match &mut self.backend {
            Backend::Cpu(_) => {
                let values = names.iter().map(|name| Ok(self.result(role, name)?[0]));
                Ok(Posted(PostedState::Ready(values.collect::<Result<_, RuntimeError>>()?)))
            }
            Backend::Cuda(session) => {
                let plan = self.plans.plan(role);
                let view = |name: &&str| {
                    let view =
                        plan.and_then(|plan| plan.result(name)).filter(|view| view.dtype == DType::F32);
                    view.ok_or_else(|| {
                        RuntimeError::Name(format!("`{}` has no f32 result `{name}`", role.name()))
                    })
                };
                let views = names.iter().map(view).collect::<Result<Vec<_>, _>>()?;
                Ok(Posted(PostedState::Pending { place: session.post(&views)?, count: names.len() }))
            }
        }
    }

    /// Returns requested results, waiting for those that have not arrived.
    pub fn collect(&mut self, posted: Posted) -> Result<Vec<f32>, RuntimeError> {
        match (posted.0, &mut self.backend) {
            (PostedState::Ready(values), _) => Ok(values),
            (PostedState::Pending { place, count }, Backend::Cuda(session)) => session.collect(place, count),
            (PostedState::Pending { .. }, Backend::Cpu(_)) => {
                Err(RuntimeError::Name("results of another session".into()))
            }
        }
    }

    /// Marks the end of all work enqueued so far.
    pub fn mark(&self) -> Result<Mark, RuntimeError> {
        Ok(Mark(match &self.backend {
            Backend::Cpu(_) => MarkState::Host(Instant::now()),
            Backend::Cuda(session) => {
                let reading = |place| ClockReading { place, sums: Cell::new(None) };
                MarkState::Device(session.mark()?, session.post_clock()?.map(reading))
            }
        }))
    }

    /// The time between two marks, waiting for the later one.
    pub fn between(&self, from: &Mark, to: &Mark) -> Result<Duration, RuntimeError> {
        match (&from.0, &to.0, &self.backend) {
            (MarkState::Host(from), MarkState::Host(to), _) => Ok(to.saturating_duration_since(*from)),
            (MarkState::Device(from, _), MarkState::Device(to, _), Backend::Cuda(session)) => {
                session.between(from, to)
            }
            _ => Err(RuntimeError::Name("marks of another session".into())),
        }
    }

    /// How long plans ran on the device between two marks, and how long of that they waited for exchanges with other ranks.
    /// Waits for the later mark. `None` on the CPU and without other ranks, where it is not measured. Read marks in order, and
    /// before the ring of posted values wraps around.
    pub fn plan_times(&self, from: &Mark, to: &Mark) -> Result<Option<PlanTimes>, RuntimeError> {
        let Backend::Cuda(session) = &self.backend else { return Ok(None) };
        let sums = |mark: &Mark| {
            let MarkState::Device(_, Some(reading)) = &mark.0 else { return Ok(None) };
            if reading.sums.get().is_none() {
                reading.sums.set(Some(session.clock_at(reading.place)?));
            }
            Ok::<_, RuntimeError>(reading.sums.get())
        };
        Ok(sums(from)?.zip(sums(to)?).map(|(from, to)| from.until(to)))
    }

    fn expect(&self, path: &str, dtype: DType) -> Result<(), RuntimeError> {
        let found = self.slot_view(path)?.dtype;
        if found == dtype {
            return Ok(());
        }
        Err(RuntimeError::Name(format!("`{path}` holds {}, not {}", found.name(), dtype.name())))
    }
}

/// Checks that slots and results lie in the arena.
fn check_placement(plans: &PlanSet) -> Result<(), RuntimeError> {
    let slots = plans.slots.iter().map(|slot| ("slot", &slot.path, &slot.view));
    let results =
        plans.plans.iter().flat_map(|plan| &plan.results).map(|(name, view)| ("result", name, view));
    for (what, name, view) in slots.chain(results) {
        launch::check_placement(view, plans.arena_bytes)
            .map_err(|why| RuntimeError::Unsound(format!("the {what} `{name}` {why}")))?;
    }
    Ok(())
}

/// The bytes of four-byte words. Little-endian, as slots and all supported targets are.
fn bytes_of<T: Word>(values: &[T]) -> &[u8] {
    const { assert!(cfg!(target_endian = "little") && size_of::<T>() == 4) };
    // SAFETY: f32 and i32 have no padding and any byte of them may be read; the length is that of `values` in bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// A four-byte element type of slots.
trait Word {}
impl Word for f32 {}
impl Word for i32 {}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.chunks_exact(4).map(|w| [w[0], w[1], w[2], w[3]])
}

pub(crate) fn as_f32(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => words(bytes).map(f32::from_le_bytes).collect(),
        DType::I32 => words(bytes).map(|w| i32::from_le_bytes(w) as f32).collect(),
        DType::BF16 => bytes.chunks_exact(2).map(|w| bf16_to_f32(u16::from_le_bytes([w[0], w[1]]))).collect(),
        DType::U8 => bytes.iter().map(|b| *b as f32).collect(),
        DType::E4M3 => bytes.iter().map(|b| e4m3_to_f32(*b)).collect(),
        DType::E5M2 => bytes.iter().map(|b| e5m2_to_f32(*b)).collect(),
        DType::E4M4 => bytes.iter().map(|b| e4m4_to_f32(*b)).collect(),
        DType::F64 => unreachable!("no target offers f64"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::graph::{Class, Init};
    use flatout_ir::plan::{PlacedSlot, Plan};
    use flatout_ir::{Launch, Mesh, Op, TensorType};

    fn slot(path: &str, view: View) -> PlacedSlot {
        let ty = TensorType::new(view.dtype, view.dims.clone());
        PlacedSlot { path: path.into(), ty, class: Class::Input, init: Init::Zeros, is_whole: false, view }
    }

    /// A plan that gathers three rows from a table of four rows by two columns.
    fn gather(kernel: &'static str) -> PlanSet {
        let table = View { offset: 0, dtype: DType::F32, dims: vec![4, 2], strides: vec![3, 1] };
        let index = View::dense(64, &TensorType::new(DType::I32, [3]));
        let rows = View::dense(128, &TensorType::new(DType::F32, [3, 2]));
        let launch = Launch {
            kernel,
            op: Op::Gather {},
            ins: vec![table.clone(), index.clone()],
            outs: vec![Some(rows.clone())],
            workspace: None,
            path: "embedding".into(),
            key: 0,
            flops: 0,
            queue: flatout_ir::Queue::Compute,
            joins: None,
        };
        PlanSet {
            arena_bytes: 192,
            persistent_bytes: 192,
            transient_bytes: 0,
            buffers: vec![],
            slots: vec![slot("table", table), slot("index", index)],
            inputs: 0..0,
            landings: vec![],
            plans: vec![Plan {
                role: Role::Eval,
                launches: vec![launch],
                results: vec![("rows".into(), rows)],
            }],
            mesh: Mesh::ONE,
            sharded: vec![],
            done: vec![],
        }
    }

    #[test]
    fn slots_are_written_and_results_read() {
        let mut session = Session::new(gather("gather"), 2).unwrap();
        session.write_f32("table", &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]).unwrap();
        session.write_i32("index", &[3, -1, 1]).unwrap();
        session.run(Role::Eval).unwrap();
        assert_eq!(session.result(Role::Eval, "rows").unwrap(), [6.0, 7.0, 0.0, 0.0, 2.0, 3.0]);
        assert_eq!(session.read_f32("table").unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(session.read_i32("index").unwrap(), [3, -1, 1]);
    }

    #[test]
    fn a_copy_holds_the_state_at_its_request() {
        let mut session = Session::new(gather("gather"), 1).unwrap();
        let first = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        session.write_f32("table", &first).unwrap();
        session.write_i32("index", &[2, 1, 0]).unwrap();
        let copying = session.begin_copy(&[("index", 0..3), ("table", 0..8)]).unwrap();
        session.write_f32("table", &[9.0; 8]).unwrap();
        session.run(Role::Eval).unwrap();
        drop(session);
        // Any thread may finish the copy, even after the session is dropped.
        let copied = std::thread::spawn(|| copying.finish().unwrap()).join().unwrap();
        assert_eq!((copied.count(), copied.bytes()), (2, 44));
        assert_eq!(copied.tensor(0), bytes_of(&[2_i32, 1, 0]));
        assert_eq!(copied.tensor(1), bytes_of(&first));
        let mut session = Session::new(gather("gather"), 1).unwrap();
        let missing = session.begin_copy(&[("tabel", 0..8)]).err().expect("no such slot");
        assert_eq!(missing.to_string(), "there is no slot `tabel`");
    }

    #[test]
    fn ranges_of_slots_go_in_and_out() {
        let mut session = Session::new(gather("gather"), 1).unwrap();
        session.write_i32("index", &[7, 8, 9]).unwrap();
        session.write_range("index", 1, bytes_of(&[5_i32, 6])).unwrap();
        session.write_range("index", 3, &[]).unwrap();
        assert_eq!(session.read_range("index", 0..2).unwrap(), bytes_of(&[7_i32, 5]));
        assert_eq!(session.read_range_f32("index", 1..3).unwrap(), [5.0, 6.0]);
        assert!(session.read_range("index", 3..3).unwrap().is_empty());
        let copying = session.begin_copy(&[("index", 2..3), ("index", 0..2), ("index", 1..1)]).unwrap();
        session.write_i32("index", &[0; 3]).unwrap();
        let copied = copying.finish().unwrap();
        assert_eq!((copied.tensor(0), copied.tensor(1)), (bytes_of(&[6_i32]), bytes_of(&[7_i32, 5])));
        assert_eq!((copied.count(), copied.tensor(2).len(), session.rank()), (3, 0, 0));
        for (error, expected) in [
            (session.read_range("index", 1..4).unwrap_err(), "`index` has 3 elements, and none from 1 to 4"),
            (
                session.write_range("index", 3, &[0; 4]).unwrap_err(),
                "`index` has 3 elements, and none from 3 to 4",
            ),
            (
                session.write_range("index", 0, &[0; 5]).unwrap_err(),
                "`index` takes elements of 4 bytes, not 5 bytes",
            ),
            (session.read_range("indices", 0..0).unwrap_err(), "there is no slot `indices`"),
        ] {
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn errors_name_their_location() {
        let mut session = Session::new(gather("gather"), 1).unwrap();
        session.write_i32("index", &[3, 4, 1]).unwrap();
        for (error, expected) in [
            (
                session.run(Role::Eval).unwrap_err(),
                "`embedding`: gather (f32[4,2], i32[3]) -> (f32[3,2]): index 4 at place 1 is outside the 4 rows",
            ),
            (session.run(Role::GRAD).unwrap_err(), "there is no plan `grad`"),
            (session.read_slot("tabel").unwrap_err(), "there is no slot `tabel`"),
            (session.write_f32("table", &[1.0]).unwrap_err(), "`table` takes 32 bytes, not 4"),
            (session.write_f32("index", &[1.0; 3]).unwrap_err(), "`index` holds i32, not f32"),
            (session.result(Role::Eval, "row").unwrap_err(), "the plan `eval` has no result `row`"),
        ] {
            assert_eq!(error.to_string(), expected);
        }
        let unknown = Session::new(gather("collect"), 1).err().expect("no such kernel");
        assert!(unknown.to_string().ends_with("the CPU has no kernel `collect`"), "{unknown}");
        let mut small = gather("gather");
        small.arena_bytes = 140;
        let outside = Session::new(small, 1).err().expect("an arena too small");
        assert!(outside.to_string().ends_with("output 0 ends at byte 152 of an arena of 140"), "{outside}");
    }
}
