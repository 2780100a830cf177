//! Tests the ordering guarantees of a session, on the CPU always and on a GPU if there is one.
//!
//! Inputs are written while a plan runs, values are posted, copies are taken of state that plans keep changing, and launches
//! are timed one by one.
//!
//! A machine without a GPU skips the GPU's half with a message; with FLATOUT_REQUIRE_GPU set, it fails.

use flatout_ir::graph::{Class, Graph, Init, Slot};
use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::passes::input_path;
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Op, Options, Program, Role, Target, compile};
use flatout_runtime::cuda::{self, Device, Gpu};
use flatout_runtime::{Copying, Session, cpu};

/// Large enough that copies and plans overlap.
const N: usize = 1 << 20;
const ROUNDS: usize = 24;

/// sum <- sum + x, with the largest element as a result.
fn program() -> Program {
    let mut graph = Graph::default();
    let mut slot = |path: &str, class: Class| {
        let ty = TensorType::new(DType::F32, [N]);
        graph.add_slot(Slot { path: path.into(), ty, class, init: Init::Zeros, part: None })
    };
    let (sum, x) = (slot("sum", Class::Moment), slot("x", Class::Input));
    let reads = [sum, x].map(|slot| graph.add(Op::Read { slot }, vec![], ""));
    let next = graph.add(Op::Map { f: E::Add }, reads.to_vec(), "");
    let most = graph.add(Op::Reduce { axis: 0, by: Fold::Max }, vec![next], "");
    graph.writes.push((sum, next));
    graph.results.push(("most".into(), most));
    Program { role: Role::Eval, graph }
}

fn plans(target: &Target) -> flatout_ir::PlanSet {
    compile(&[program()], target, &Options::default()).expect("a plan")
}

/// The input of a round: small integers, so that sums are exact.
fn input(round: usize) -> Vec<f32> {
    (0..N).map(|i| ((i * 31 + round * 17) % 64) as f32).collect()
}

/// Enqueues every round without waiting, then checks all results.
fn sums_stay_in_order(session: &mut Session) {
    let path = input_path(Role::Eval, "x");
    session.write_f32("sum", &vec![1.0; N]).unwrap();
    let mut copies: Vec<Copying> = vec![];
    let mut posted = vec![];
    for round in 0..ROUNDS {
        session.write_f32(&path, &input(round)).unwrap();
        copies.push(session.begin_copy(&[("sum", 0..N)]).unwrap());
        session.run(Role::Eval).unwrap();
        posted.push(session.post(Role::Eval, &["most"]).unwrap());
        // A write that no run follows is overwritten by the next.
        session.write_f32(&path, &[1e9; N]).unwrap();
    }
    let mut sum = vec![1.0; N];
    let copies = copies.into_iter().map(|copying| copying.finish().unwrap());
    for (round, (copied, posted)) in copies.zip(posted).enumerate() {
        let bytes: Vec<u8> = sum.iter().flat_map(|x: &f32| x.to_le_bytes()).collect();
        assert!(copied.tensor(0) == bytes, "round {round}: the copy holds another moment");
        sum.iter_mut().zip(input(round)).for_each(|(sum, x)| *sum += x);
        let most = sum.iter().copied().fold(0.0, f32::max);
        assert_eq!(session.collect(posted).unwrap(), [most], "round {round}");
    }
    assert!(session.read_f32("sum").unwrap() == sum);
    assert_eq!(session.read_f32(&path).unwrap()[0], 1e9, "an input is read as it was written last");
}

/// Timing runs the plan a whole number of times, and every launch of it is timed.
fn timing_leaves_what_runs_leave(session: &mut Session, passes: usize) {
    session.write_f32("sum", &vec![1.0; N]).unwrap();
    session.write_f32(&input_path(Role::Eval, "x"), &input(0)).unwrap();
    let times = session.time(&[Role::Eval], passes).unwrap();
    let launches = session.plans().plan(Role::Eval).unwrap().launches.len();
    assert_eq!(
        times[0].iter().map(|time| time.launch).collect::<Vec<_>>(),
        (0..launches).collect::<Vec<_>>()
    );
    for time in &times[0] {
        assert!(
            0.0 < time.least_seconds && time.least_seconds <= time.seconds && time.seconds < 10.0,
            "{time:?}"
        );
    }
    let sum = session.read_f32("sum").unwrap();
    let at = input(0).iter().position(|x| *x == 1.0).unwrap();
    let runs = sum[at] - 1.0;
    assert!(runs > passes as f32 && runs.fract() == 0.0, "{runs} runs for {passes} passes");
    assert!(sum.iter().zip(input(0)).all(|(sum, x)| *sum == 1.0 + runs * x));
    assert_eq!(session.time(&[Role::Decode], 1).unwrap_err().to_string(), "there is no plan `decode`");
}

#[test]
fn the_cpu_keeps_order() {
    let mut session = Session::new(plans(&cpu::target(2)), 2).unwrap();
    sums_stay_in_order(&mut session);
    timing_leaves_what_runs_leave(&mut session, 3);
}

/// The GPU, or prints a line that says why there is none.
pub fn gpu() -> Option<Device> {
    let why = match &cuda::probe().gpu {
        Gpu::Usable(_) => return Some(Device::open(0).expect("a usable GPU opens")),
        Gpu::None(why) | Gpu::Unusable(why) => why,
    };
    assert!(std::env::var_os("FLATOUT_REQUIRE_GPU").is_none(), "nothing ran on a GPU: {why}");
    eprintln!("SKIPPED: nothing ran on a GPU: {why}");
    None
}

#[test]
fn the_gpu_keeps_order() {
    let Some(device) = gpu() else { return };
    let plans = plans(&cuda::target(&device, false));
    assert_eq!(plans.landings.len(), 2, "inputs land beside their place");
    for graphs in [true, false] {
        let options = cuda::Options { graphs, ..Default::default() };
        let mut session = Session::cuda(plans.clone(), &device, options).unwrap();
        sums_stay_in_order(&mut session);
        timing_leaves_what_runs_leave(&mut session, 3);
    }
}
