//! The time that exchanges between ranks take on this machine, by kernel and size: the points that plans of several ranks are
//! predicted by.
//!
//! Every rank runs the same exchanges as often as the others, so that none waits for one that never comes: ranks agree on the
//! number of runs before each measurement, and the slowest rank's time counts.

use flatout_ir::ops::collective::{Combine, Order};
use flatout_ir::timings::{Point, Size, Timings};
use flatout_ir::{
    Axis, Builder, DType, Launch, Mesh, Op, Options, Plan, PlanSet, Program, Queue, Role, compile,
};
use flatout_runtime::{Session, cuda};
use flatout_train::Failure;
use flatout_train::device::Device;
use flatout_train::ranks::{Ranks, target_among};
use flatout_train::switches::{Switches, Toggle};

/// The smallest and the largest tensor that is exchanged, as bytes of all ranks together.
const SMALLEST: u64 = 64 << 10;
const LARGEST_ON_GPUS: u64 = 256 << 20;
/// Sockets between processes take a second for what GPUs exchange in a millisecond.
const LARGEST_ON_CPUS: u64 = 16 << 20;
/// From one size to the next.
const STEP: u64 = 4;
/// Exchanges of a small tensor in a run of a plan, so that starting it does not count.
const IN_A_RUN: usize = 4;
/// The largest that is small.
const SMALL: u64 = 8 << 20;
/// Measurements of each exchange, of which the median counts.
const ROUNDS: usize = 5;
/// The least time of a measurement, and the most runs in one.
const ROUND_SECONDS: f64 = 0.02;
const MOST_RUNS: usize = 50;

/// An exchange of one size, and how long it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    pub op: Op,
    pub kernel: &'static str,
    /// Of the tensor that all ranks have together: what is gathered, or what is added up.
    pub bytes: u64,
    pub seconds: f64,
    size: Size,
}

impl Timed {
    /// The bytes that a rank sends a second over its link, whatever the number of ranks: by what an exchange must move at least.
    pub fn bus_bytes_per_second(&self) -> f64 {
        let ways = self.op.ways().unwrap_or(1) as f64;
        let passes = if matches!(self.op, Op::AllReduce { .. }) { 2.0 } else { 1.0 };
        passes * (ways - 1.0) / ways * self.bytes as f64 / self.seconds
    }
}

/// The points of some exchanges, as timings keep them.
pub fn points(timed: &[Timed]) -> Timings {
    Timings::new(timed.iter().map(|one| Point { size: one.size.clone(), seconds: one.seconds }))
}

/// Times every exchange that plans of this many ranks may have, on a device that every rank has opened. All ranks call this. `say`
/// is told of each kernel and size, on rank 0 as on the others.
pub fn exchanges(
    device: &Device,
    ranks: &Ranks,
    say: &mut dyn FnMut(&str, u64),
) -> Result<Vec<Timed>, Failure> {
    let (orders, largest): (&[Order], u64) = match device {
        Device::Cpu { .. } => (&[Order::Tree], LARGEST_ON_CPUS),
        Device::Cuda(_) => (&[Order::Any, Order::Tree], LARGEST_ON_GPUS),
    };
    let mut timed = vec![];
    for order in orders {
        let plans = plans(device, ranks.count(), *order, largest)?;
        ranks.check_equal(
            "the exchanges",
            || format!("{:?}", plans.plans),
            "start the same program on all",
        )?;
        let options = cuda::Options { deterministic: *order == Order::Tree, ..Default::default() };
        let mut session = device.session_with(plans, options, ranks)?;
        // Others may wait for a rank that fails here inside an exchange, and so would a session that is dropped.
        let of_order = ranks.at_once(|| time(&mut session, ranks, say)).inspect_err(|why| ranks.tell(why))?;
        // An exchange that adds nothing has no order, and is timed once.
        timed.extend(of_order.into_iter().filter(|one| *order != Order::Tree || is_ordered(one, orders)));
    }
    Ok(timed)
}

fn is_ordered(one: &Timed, orders: &[Order]) -> bool {
    orders.len() == 1 || !matches!(one.op, Op::AllGather { .. })
}

/// The sizes that are timed.
fn sizes(largest: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(SMALLEST), |bytes| Some(STEP * bytes))
        .take_while(move |bytes| *bytes <= largest)
}

/// A plan an exchange, of all sizes, over one arena.
fn plans(device: &Device, ranks: usize, order: Order, largest: u64) -> Result<PlanSet, Failure> {
    let mut switches = Switches::default();
    switches.kernels.deterministic = if order == Order::Tree { Toggle::On } else { Toggle::Off };
    let target = target_among(ranks, device.target(&switches));
    let (axis, ways) = (Axis::Shard, ranks);
    let b = Builder::new();
    // Blocks of whole vectors for every rank, of the size or a little more.
    let block =
        |bytes: u64| (bytes / DType::F32.bytes() as u64).div_ceil(ways as u64).next_multiple_of(64) as usize;
    let x = b.input("x", DType::F32, &[ways * block(largest)]);
    for bytes in sizes(largest) {
        let (own, all) = (x.slice(0, 0, block(bytes)), x.slice(0, 0, ways * block(bytes)));
        b.result(&format!("gathered.{bytes}"), b.op(Op::AllGather { axis, ways }, &[own]));
        let scatter = Op::ReduceScatter { axis, ways, order, base: false };
        b.result(&format!("scattered.{bytes}"), b.op(scatter, &[all]));
        let sum = Op::AllReduce { axis, ways, by: Combine::Sum, order };
        b.result(&format!("sum.{bytes}"), b.op(sum, &[all]));
    }
    let program = Program { role: Role::Eval, graph: b.finish() };
    let options = Options { mesh: Mesh::new(1, ranks), order, ..Options::default() };
    let refused = |why| Failure::Environment(format!("exchanges cannot be planned: {why}"));
    let mut plans = compile(&[program], &target, &options).map_err(refused)?;
    let exchanges = plans.plans.iter().flat_map(|plan| plan.launches.clone());
    let exchanges = exchanges.filter(|launch| launch.queue == Queue::Wire);
    let plan = |(number, launch): (usize, Launch)| {
        let times = if bytes(&launch) <= SMALL { IN_A_RUN } else { 1 };
        let launches = vec![Launch { joins: None, ..launch }; times];
        // Any role that has numbers.
        Plan { role: Role::Fold(number), launches, results: vec![] }
    };
    plans.plans = exchanges.enumerate().map(plan).collect();
    Ok(plans)
}

fn time(session: &mut Session, ranks: &Ranks, say: &mut dyn FnMut(&str, u64)) -> Result<Vec<Timed>, Failure> {
    let plans: Vec<Plan> = session.plans().plans.clone();
    let mut timed = vec![];
    for Plan { role, launches, .. } in plans {
        let (launch, in_a_run) = (launches[0].clone(), launches.len());
        let bytes = bytes(&launch);
        say(launch.kernel, bytes);
        // Connects what the first exchange of a kind connects.
        runs(session, ranks, role, 1)?;
        let once = runs(session, ranks, role, 1)?;
        let count = ((ROUND_SECONDS / once) as usize).clamp(1, MOST_RUNS);
        let mut rounds =
            (0..ROUNDS).map(|_| runs(session, ranks, role, count)).collect::<Result<Vec<f64>, _>>()?;
        rounds.sort_by(f64::total_cmp);
        let seconds = rounds[ROUNDS / 2] / (count * in_a_run) as f64;
        timed.push(Timed { size: Size::of(&launch), op: launch.op, kernel: launch.kernel, bytes, seconds });
    }
    Ok(timed)
}

/// The bytes of the tensor that all ranks have together.
fn bytes(launch: &Launch) -> u64 {
    let view = match launch.op {
        Op::AllGather { .. } => launch.outs[0].as_ref().expect("somebody reads it"),
        _ => &launch.ins[0],
    };
    view.span_bytes() as u64
}

/// The seconds that some runs of a plan take together on the slowest rank; the same number on all of them.
fn runs(session: &mut Session, ranks: &Ranks, role: Role, count: usize) -> Result<f64, Failure> {
    ranks.meet()?;
    let begin = session.mark()?;
    (0..count).try_for_each(|_| session.run(role))?;
    let end = session.mark()?;
    let own = session.between(&begin, &end)?.as_secs_f64();
    Ok(ranks.gather(&own)?.into_iter().fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_go_from_64_kib_to_256_mib() {
        let all: Vec<u64> = sizes(LARGEST_ON_GPUS).collect();
        assert_eq!((all.first(), all.last(), all.len()), (Some(&(64 << 10)), Some(&(256 << 20)), 7));
        assert_eq!(sizes(LARGEST_ON_CPUS).last(), Some(16 << 20));
    }

    /// Plans for a number of ranks on the CPU: each exchange of each size once, over all ranks, and as often as a run has it.
    #[test]
    fn every_exchange_has_a_plan_of_each_size() {
        for ranks in [2, 3, 8] {
            let plans = plans(&Device::Cpu { threads: 1 }, ranks, Order::Tree, 16 << 20).unwrap();
            assert_eq!(plans.plans.len(), 3 * 5, "three kinds, five sizes");
            for plan in &plans.plans {
                let (launch, bytes) = (&plan.launches[0], bytes(&plan.launches[0]));
                assert_eq!(plan.launches.len(), if bytes < 16 << 20 { IN_A_RUN } else { 1 });
                assert_eq!(launch.op.ways(), Some(ranks));
                let is_near = sizes(16 << 20).any(|size| bytes >= size && bytes < size + 4096);
                assert!(is_near, "{} of {bytes}", launch.kernel);
            }
        }
    }

    #[test]
    fn the_bus_carries_what_an_exchange_must_move() {
        let timed = |op: Op| {
            let size = Size {
                work: flatout_ir::Work::Wire,
                kernel: "cuda.all_reduce".into(),
                units: flatout_ir::timings::Units::F32,
                inner: 1 << 20,
                flops: 0,
                bytes: 8 << 20,
                ways: 8,
            };
            Timed { op, kernel: "cuda.all_reduce", bytes: 4 << 20, seconds: 1e-3, size }
        };
        let (axis, ways, order) = (Axis::Shard, 8, Order::Any);
        let sum = timed(Op::AllReduce { axis, ways, by: Combine::Sum, order });
        // nccl-tests counts 2 (n - 1) / n of an all_reduce and (n - 1) / n of the others.
        assert!((sum.bus_bytes_per_second() - 1.75 * (4 << 20) as f64 / 1e-3).abs() < 1.0);
        let gather = timed(Op::AllGather { axis, ways });
        assert!((gather.bus_bytes_per_second() * 2.0 - sum.bus_bytes_per_second()).abs() < 1.0);
        let kept = points(&[sum]);
        assert!(kept.knows_exchanges(8) && !kept.knows_kernels() && kept.points().len() == 1);
    }
}
