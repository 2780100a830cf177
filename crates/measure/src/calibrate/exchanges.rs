//! Times exchanges between ranks on this machine, by kernel and size. From these points plans of several ranks are predicted.
//! Every rank runs each exchange equally often, because one that waits for an exchange that others do not run waits for ever:
//! ranks agree on the number of runs before each measurement. The slowest rank's time counts.

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
/// Factor from one size to the next.
const STEP: u64 = 4;
/// Exchanges of a small tensor per run of a plan, which amortise the cost of starting it.
const IN_A_RUN: usize = 4;
/// The largest tensor that counts as small, in bytes.
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
    /// Bytes of the tensor over all ranks: the gathered result, or the input of a sum.
    pub bytes: u64,
    pub seconds: f64,
    size: Size,
}

impl Timed {
    /// Bus bandwidth: the bytes per second over a rank's link, from the least that the exchange must move, so that numbers of
    /// ranks can be compared.
    pub fn bus_bytes_per_second(&self) -> f64 {
        let ways = self.op.ways().unwrap_or(1) as f64;
        let passes = if matches!(self.op, Op::AllReduce { .. }) { 2.0 } else { 1.0 };
        passes * (ways - 1.0) / ways * self.bytes as f64 / self.seconds
    }
}

/// Converts timed exchanges to the points that timings keep.
pub fn points(timed: &[Timed]) -> Timings {
    Timings::new(timed.iter().map(|one| Point { size: one.size.clone(), seconds: one.seconds }))
}

/// Times every exchange that plans of this many ranks may have, on a device that every rank has opened. All ranks call this.
/// `say` is called with each kernel and size on every rank.
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
        // Where this rank fails, others may wait for it inside an exchange, and so would dropping the session: tell them first.
        let of_order = ranks.at_once(|| time(&mut session, ranks, say)).inspect_err(|why| ranks.tell(why))?;
        // An exchange without a sum has no order of summation, and is timed once.
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

/// One plan for each exchange and size, all over one arena.
fn plans(device: &Device, ranks: usize, order: Order, largest: u64) -> Result<PlanSet, Failure> {
    let mut switches = Switches::default();
    switches.kernels.deterministic = if order == Order::Tree { Toggle::On } else { Toggle::Off };
    let target = target_among(ranks, device.target(&switches));
    let (axis, ways) = (Axis::Shard, ranks);
    let b = Builder::new();
    // A rank's block, rounded up to whole vectors.
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
        // `Fold` serves as a role that has numbers.
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
        // The first exchange of a kind sets up its connections and is not timed.
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
        Op::AllGather { .. } => launch.outs[0].as_ref().expect("its result is read"),
        _ => &launch.ins[0],
    };
    view.span_bytes() as u64
}

/// Seconds that `count` runs of a plan take on the slowest rank. Every rank gets the same number.
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

    /// Plans for a number of ranks on the CPU have each exchange of each size, repeated where the tensor is small.
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
    fn bus_bandwidth_counts_the_bytes_that_must_move() {
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
