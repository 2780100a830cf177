//! A set of plans over its arena: write slots, run a plan, read slots and results.

use std::fmt;

use flatout_ir::types::{DType, bf16_to_f32};
use flatout_ir::{Launch, PlanSet, Role, View};

use crate::arena::Arena;
use crate::cpu::{self, Run, context::Context, copy};
use crate::launch;

/// What can go wrong on a machine with a plan that compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuntimeError {
    /// The system does not give the memory or the threads.
    Resources(String),
    /// The plan set has no such slot, result or plan, or the value has another size.
    Name(String),
    /// A launch that may not run: a mistake of the compiler.
    Unsound(String),
    /// A launch that failed on its data, such as an index outside its table.
    Launch(String),
}

impl fmt::Display for RuntimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (RuntimeError::Resources(why)
        | RuntimeError::Name(why)
        | RuntimeError::Unsound(why)
        | RuntimeError::Launch(why)) = self;
        f.write_str(why)
    }
}

impl std::error::Error for RuntimeError {}

pub struct Session {
    arena: Arena,
    plans: PlanSet,
    /// The kernel of every launch of every plan.
    kernels: Vec<Vec<Run>>,
    pool: rayon::ThreadPool,
    threads: usize,
}

impl Session {
    /// Allocates the arena, zeroed, and checks every launch, so that running needs no more checks.
    pub fn new(plans: PlanSet, threads: usize) -> Result<Session, RuntimeError> {
        let threads = threads.max(1);
        let mut kernels = Vec::with_capacity(plans.plans.len());
        for plan in &plans.plans {
            kernels.push(
                plan.launches
                    .iter()
                    .map(|l| admit(l, plans.arena_bytes, threads))
                    .collect::<Result<_, _>>()?,
            );
            for (name, view) in &plan.results {
                launch::placed(view, plans.arena_bytes)
                    .map_err(|why| RuntimeError::Unsound(format!("the result `{name}` {why}")))?;
            }
        }
        for slot in &plans.slots {
            launch::placed(&slot.view, plans.arena_bytes)
                .map_err(|why| RuntimeError::Unsound(format!("the slot `{}` {why}", slot.path)))?;
        }
        let arena = Arena::new(plans.arena_bytes).ok_or_else(|| {
            RuntimeError::Resources(format!("the system has no {} bytes for the arena", plans.arena_bytes))
        })?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("flatout-{i}"))
            .build()
            .map_err(|why| RuntimeError::Resources(format!("{threads} threads cannot be started: {why}")))?;
        Ok(Session { arena, plans, kernels, pool, threads })
    }

    pub fn plans(&self) -> &PlanSet {
        &self.plans
    }

    /// Runs the plan of a role.
    pub fn run(&mut self, role: Role) -> Result<(), RuntimeError> {
        let index = self.plans.plans.iter().position(|p| p.role == role);
        let index = index.ok_or_else(|| RuntimeError::Name(format!("there is no plan `{}`", role.name())))?;
        self.run_plan(index)
    }

    /// Runs the launches of a plan in order.
    pub fn run_plan(&mut self, index: usize) -> Result<(), RuntimeError> {
        let (arena, threads) = (Address(self.arena.start()), self.threads);
        let (plan, kernels) = (&self.plans.plans[index], &self.kernels[index]);
        let run = || {
            for (launch, kernel) in plan.launches.iter().zip(kernels) {
                // SAFETY: `new` checked the launch against this arena, and `&mut self` keeps everyone else away.
                let context = unsafe { Context::new(launch, arena.get(), threads) };
                kernel(launch, &context)
                    .map_err(|why| RuntimeError::Launch(format!("{}: {why}", launch::describe(launch))))?;
            }
            Ok(())
        };
        self.pool.install(run)
    }

    /// The whole arena, for checks of what a launch touches.
    pub(crate) fn memory_mut(&mut self) -> &mut [u8] {
        self.arena.bytes()
    }

    fn slot_view(&self, path: &str) -> Result<&View, RuntimeError> {
        let slot = self.plans.slot(path);
        slot.map(|s| &s.view).ok_or_else(|| RuntimeError::Name(format!("there is no slot `{path}`")))
    }

    /// Sets a slot from its elements in row-major order, in the slot's own type.
    pub fn write_slot(&mut self, path: &str, bytes: &[u8]) -> Result<(), RuntimeError> {
        let view = self.slot_view(path)?.clone();
        let wanted = view.elements() * view.dtype.bytes();
        if bytes.len() != wanted {
            let got = bytes.len();
            return Err(RuntimeError::Name(format!("`{path}` takes {wanted} bytes, not {got}")));
        }
        copy::scatter(&view, self.arena.bytes(), bytes);
        Ok(())
    }

    /// The elements of a slot in row-major order, in the slot's own type.
    pub fn read_slot(&self, path: &str) -> Result<Vec<u8>, RuntimeError> {
        Ok(copy::gather(self.slot_view(path)?, self.arena.as_slice()))
    }

    pub fn write_f32(&mut self, path: &str, values: &[f32]) -> Result<(), RuntimeError> {
        self.expect(path, DType::F32)?;
        self.write_slot(path, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn write_i32(&mut self, path: &str, values: &[i32]) -> Result<(), RuntimeError> {
        self.expect(path, DType::I32)?;
        self.write_slot(path, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// A slot of any float or integer type, as f32.
    pub fn read_f32(&self, path: &str) -> Result<Vec<f32>, RuntimeError> {
        let dtype = self.slot_view(path)?.dtype;
        Ok(as_f32(dtype, &self.read_slot(path)?))
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
        Ok(as_f32(view.dtype, &copy::gather(view, self.arena.as_slice())))
    }

    fn expect(&self, path: &str, dtype: DType) -> Result<(), RuntimeError> {
        let found = self.slot_view(path)?.dtype;
        if found == dtype {
            return Ok(());
        }
        Err(RuntimeError::Name(format!("`{path}` holds {}, not {}", found.name(), dtype.name())))
    }
}

/// The kernel of a launch that may run.
fn admit(launch: &Launch, arena_bytes: usize, threads: usize) -> Result<Run, RuntimeError> {
    let refuse = |why: String| RuntimeError::Unsound(format!("{}: {why}", launch::describe(launch)));
    let kernel = cpu::kernel(launch.kernel)
        .ok_or_else(|| refuse(format!("the CPU has no kernel `{}`", launch.kernel)))?;
    launch::check(launch, &kernel.row, arena_bytes, threads).map_err(refuse)?;
    Ok(kernel.run)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.chunks_exact(4).map(|w| [w[0], w[1], w[2], w[3]])
}

pub(crate) fn as_f32(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => words(bytes).map(f32::from_le_bytes).collect(),
        DType::I32 => words(bytes).map(|w| i32::from_le_bytes(w) as f32).collect(),
        DType::BF16 => bytes.chunks_exact(2).map(|w| bf16_to_f32(u16::from_le_bytes([w[0], w[1]]))).collect(),
        DType::F64 => unreachable!("the CPU's target does not offer f64"),
    }
}

/// An arena's address on its way into the pool.
#[derive(Clone, Copy)]
struct Address(*mut u8);

impl Address {
    fn get(self) -> *mut u8 {
        self.0
    }
}

// SAFETY: `run_plan` holds the arena exclusively while the pool uses its address.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::graph::{Class, Init};
    use flatout_ir::plan::{PlacedSlot, Plan};
    use flatout_ir::{Op, TensorType};

    fn slot(path: &str, view: View) -> PlacedSlot {
        let ty = TensorType::new(view.dtype, view.dims.clone());
        PlacedSlot { path: path.into(), ty, class: Class::Input, init: Init::Zeros, is_whole: false, view }
    }

    /// Rows of a table of four by two, by an index of three.
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
        };
        PlanSet {
            arena_bytes: 192,
            persistent_bytes: 192,
            transient_bytes: 0,
            buffers: vec![],
            slots: vec![slot("table", table), slot("index", index)],
            plans: vec![Plan {
                role: Role::Eval,
                launches: vec![launch],
                results: vec![("rows".into(), rows)],
            }],
            done: vec![],
        }
    }

    #[test]
    fn slots_go_in_and_results_come_out() {
        let mut session = Session::new(gather("gather"), 2).unwrap();
        session.write_f32("table", &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]).unwrap();
        session.write_i32("index", &[3, -1, 1]).unwrap();
        session.run(Role::Eval).unwrap();
        assert_eq!(session.result(Role::Eval, "rows").unwrap(), [6.0, 7.0, 0.0, 0.0, 2.0, 3.0]);
        assert_eq!(session.read_f32("table").unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(session.read_i32("index").unwrap(), [3, -1, 1]);
    }

    #[test]
    fn failures_are_sentences_that_say_where() {
        let mut session = Session::new(gather("gather"), 1).unwrap();
        session.write_i32("index", &[3, 4, 1]).unwrap();
        for (error, said) in [
            (
                session.run(Role::Eval).unwrap_err(),
                "`embedding`: gather (f32[4,2], i32[3]) -> (f32[3,2]): index 4 at place 1 is outside the 4 rows",
            ),
            (session.run(Role::Grad).unwrap_err(), "there is no plan `grad`"),
            (session.read_slot("tabel").unwrap_err(), "there is no slot `tabel`"),
            (session.write_f32("table", &[1.0]).unwrap_err(), "`table` takes 32 bytes, not 4"),
            (session.write_f32("index", &[1.0; 3]).unwrap_err(), "`index` holds i32, not f32"),
            (session.result(Role::Eval, "row").unwrap_err(), "the plan `eval` has no result `row`"),
        ] {
            assert_eq!(error.to_string(), said);
        }
        let unknown = Session::new(gather("collect"), 1).err().expect("no such kernel");
        assert!(unknown.to_string().ends_with("the CPU has no kernel `collect`"), "{unknown}");
        let mut small = gather("gather");
        small.arena_bytes = 140;
        let outside = Session::new(small, 1).err().expect("an arena too small");
        assert!(outside.to_string().ends_with("output 0 ends at byte 152 of an arena of 140"), "{outside}");
    }
}
