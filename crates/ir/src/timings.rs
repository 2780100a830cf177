//! Measured times of launches on a device, and predictions for launches that were not timed.
//!
//! A launch that was timed is predicted to take as long again. Any other is predicted to take the shortest measured time, as
//! fixed cost, plus its roofline over an efficiency taken from the nearest points: of the same kernel in the same units, or,
//! where there is none, of the same kind of work. Distance is measured in the logarithms of arithmetic, traffic and the
//! innermost extent, which is the head size for attention and the row width for a norm.
//!
//! An exchange between ranks is predicted only from points of the same kernel and number of ranks, by linear interpolation in
//! bytes: the memory's bandwidth says nothing about it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::attr::{Attr, named};
use crate::graph::{Graph, Node};
use crate::ops::Op;
use crate::ops::product::Compute;
use crate::plan::Launch;
use crate::target::{Rates, Target};
use crate::types::{DType, TensorType};
use crate::work::Work;

named! {
    /// The units that multiply, whose rate bounds a launch.
    pub enum Units {
        F32 = "f32",
        Tf32 = "tf32",
        Bf16 = "bf16",
        Fp8 = "fp8",
    }
}

impl Units {
    pub fn of(launch: &Launch) -> Units {
        Units::reading(launch.ins.first().map(|v| v.dtype), &launch.op)
    }

    /// The units of an operation, by the type of its first input.
    fn reading(first: Option<DType>, op: &Op) -> Units {
        match (first, op.compute()) {
            (Some(DType::BF16), _) => Units::Bf16,
            (Some(DType::E4M3 | DType::E5M2), _) => Units::Fp8,
            (Some(DType::F32), Some(Compute::Tf32)) => Units::Tf32,
            _ => Units::F32,
        }
    }
}

/// The features of a launch that determine its time; addresses do not matter.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size {
    pub work: Work,
    pub kernel: String,
    pub units: Units,
    /// The last extent of the first input; 1 where there is none.
    pub inner: u64,
    pub flops: u64,
    pub bytes: u64,
    /// Number of ranks that exchange; 1 if the launch is not an exchange.
    pub ways: u64,
}

impl Size {
    pub fn of(launch: &Launch) -> Size {
        Size {
            work: launch.op.kind().work(),
            kernel: launch.kernel.into(),
            units: Units::of(launch),
            inner: launch.ins.first().and_then(|view| view.dims.last()).map_or(1, |n| *n as u64),
            flops: launch.flops,
            bytes: launch.bytes(),
            ways: launch.op.ways().unwrap_or(1) as u64,
        }
    }

    /// The size of the launch that a node will become if its inputs are read without copies.
    pub fn of_node(g: &Graph, node: &Node, is_used: impl Fn(usize) -> bool, target: &Target) -> Size {
        let ins: Vec<&TensorType> = node.ins.iter().map(|v| g.ty(*v)).collect();
        let kind = node.op.kind();
        let float = ins.iter().copied().chain(&node.outs).find(|t| t.dtype.is_float());
        let kernel = target.kernel(kind, float.map_or(DType::I32, |t| t.dtype));
        let outs = node.outs.iter().enumerate().filter(|(out, _)| is_used(*out)).map(|(_, ty)| ty);
        // A broadcast value is read once, as `Launch::bytes` counts it.
        let read = node.ins.iter().map(|v| match g.node(v.node) {
            Node { op: Op::Broadcast { .. }, ins, .. } => g.ty(ins[0]),
            _ => g.ty(*v),
        });
        Size {
            work: kind.work(),
            kernel: kernel.map_or(kind.name(), |row| row.name).into(),
            units: Units::reading(ins.first().map(|t| t.dtype), &node.op),
            inner: ins.first().and_then(|t| t.dims.last()).map_or(1, |n| *n as u64),
            flops: node.op.flops(node, g),
            bytes: read.chain(outs).map(|t| t.bytes() as u64).sum(),
            ways: node.op.ways().unwrap_or(1) as u64,
        }
    }

    /// Arithmetic over its rate or bytes over bandwidth, whichever is longer.
    pub fn roofline_seconds(&self, rates: &Rates) -> f64 {
        (self.flops as f64 / rates.of(self.units)).max(self.bytes as f64 / rates.memory_bytes)
    }

    /// Bytes of an exchange's first input, which is one-dimensional.
    fn exchanged_bytes(&self) -> u64 {
        self.inner
            * match self.units {
                Units::F32 | Units::Tf32 => 4,
                Units::Bf16 => 2,
                Units::Fp8 => 1,
            }
    }

    fn distance(&self, other: &Size) -> f64 {
        let apart = |a: u64, b: u64| (a.max(1) as f64 / b.max(1) as f64).log2().powi(2);
        apart(self.flops, other.flops)
            + apart(self.bytes, other.bytes)
            + apart(self.inner, other.inner)
            + apart(self.ways, other.ways)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    pub size: Size,
    pub seconds: f64,
}

/// Points of one device, sorted by size, one per size. Clones share them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timings(Arc<[Point]>);

/// Number of points that an efficiency is computed from.
const NEAREST: usize = 4;
const HEADER: &str = "flatout timings 1";

impl Timings {
    /// Takes the median of several times of one size, and drops points with no positive time.
    pub fn new(points: impl IntoIterator<Item = Point>) -> Timings {
        let mut by_size: BTreeMap<Size, Vec<f64>> = BTreeMap::new();
        for Point { size, seconds } in points.into_iter().filter(|p| p.seconds > 0.0 && p.seconds.is_finite())
        {
            by_size.entry(size).or_default().push(seconds);
        }
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        Timings(by_size.into_iter().map(|(size, times)| Point { size, seconds: median(times) }).collect())
    }

    pub fn points(&self) -> &[Point] {
        &self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether launches other than exchanges between ranks were timed.
    pub fn knows_kernels(&self) -> bool {
        self.0.iter().any(|p| p.size.work != Work::Wire)
    }

    /// Whether exchanges among this many ranks were timed.
    pub fn knows_exchanges(&self, ways: usize) -> bool {
        self.0.iter().any(|p| p.size.work == Work::Wire && p.size.ways == ways as u64)
    }

    /// These points and others; the sizes of the two must differ.
    pub fn with(&self, others: &Timings) -> Timings {
        if others.is_empty() {
            return self.clone();
        }
        Timings::new(self.0.iter().chain(others.0.iter()).cloned())
    }

    /// These points without the exchanges among this many ranks.
    pub fn without_exchanges(&self, ways: usize) -> Timings {
        let is_other = |p: &&Point| p.size.work != Work::Wire || p.size.ways != ways as u64;
        Timings(self.0.iter().filter(is_other).cloned().collect())
    }

    /// The time that the points predict for a launch of this size; `None` where no point does the same kind of work.
    pub fn expect(&self, size: &Size, rates: &Rates) -> Option<f64> {
        match self.0.binary_search_by(|p| p.size.cmp(size)) {
            Ok(at) => Some(self.0[at].seconds),
            Err(_) if size.work == Work::Wire => self.expect_exchange(size),
            Err(_) => self.expect_unseen(size, rates),
        }
    }

    /// Predicts an exchange from the points of its kernel with the same number of ranks. One smaller than all points takes as
    /// long as the smallest, because latency dominates; one larger than all continues at the speed of the largest.
    fn expect_exchange(&self, size: &Size) -> Option<f64> {
        let is_kin = |p: &&Point| {
            p.size.work == Work::Wire && p.size.kernel == size.kernel && p.size.ways == size.ways
        };
        let mut kin: Vec<(f64, f64)> =
            self.0.iter().filter(is_kin).map(|p| (p.size.exchanged_bytes() as f64, p.seconds)).collect();
        kin.sort_by(|a, b| a.0.total_cmp(&b.0));
        let bytes = size.exchanged_bytes() as f64;
        let above = kin.partition_point(|(of, _)| *of < bytes);
        Some(match (above.checked_sub(1).map(|below| kin[below]), kin.get(above)) {
            (None, None) => return None,
            (None, Some((_, least))) => *least,
            (Some((most, seconds)), None) => seconds * bytes / most,
            (Some((from, low)), Some((to, high))) => low + (high - low) * (bytes - from) / (to - from),
        })
    }

    /// `expect` without the point of this size itself, to measure how well the other points predict it.
    pub fn expect_unseen(&self, size: &Size, rates: &Rates) -> Option<f64> {
        let floor = self.floor_seconds();
        let counts = |p: &&Point| p.size.work == size.work && p.size != *size;
        self.0.iter().find(counts)?;
        // A point close to the minimum says nothing about efficiency.
        let tells = |p: &&Point| counts(p) && p.seconds >= 2.0 * floor;
        let nearest = |is_kin: &dyn Fn(&Size) -> bool| {
            let kin = self.0.iter().filter(tells).filter(|p| is_kin(&p.size));
            let mut near: Vec<(f64, &Point)> = kin.map(|p| (size.distance(&p.size), p)).collect();
            near.sort_by(|a, b| a.0.total_cmp(&b.0));
            near.truncate(NEAREST);
            (!near.is_empty()).then_some(near)
        };
        let near = nearest(&|p| p.kernel == size.kernel && p.units == size.units)
            .or_else(|| nearest(&|p| p.kernel == size.kernel))
            .or_else(|| nearest(&|p| p.units == size.units))
            .or_else(|| nearest(&|_| true));
        let efficiency = near.map_or(1.0, |near| efficiency(&near, floor, rates));
        Some(floor + size.roofline_seconds(rates) / efficiency)
    }

    /// The shortest time of any launch. Exchanges are excluded, because they include waiting for other ranks.
    fn floor_seconds(&self) -> f64 {
        let launches = self.0.iter().filter(|p| p.size.work != Work::Wire);
        launches.map(|p| p.seconds).fold(f64::INFINITY, f64::min)
    }

    /// A header line, then one line per point. The line of an exchange ends with its number of ranks.
    pub fn to_text(&self) -> String {
        let line = |Point { size, seconds }: &Point| {
            let Size { work, kernel, units, inner, flops, bytes, ways } = size;
            let ways = if *ways == 1 { String::new() } else { format!(" {ways}") };
            format!("{} {kernel} {} {inner} {flops} {bytes} {seconds:e}{ways}\n", work.name(), units.name())
        };
        let lines = self.0.iter().map(line);
        [format!("{HEADER}\n# work kernel units inner flops bytes seconds\n")]
            .into_iter()
            .chain(lines)
            .collect()
    }

    /// Parses the text form; an error names the line.
    pub fn read(text: &str) -> Result<Timings, String> {
        let mut lines = text.lines().enumerate();
        if lines.next().is_none_or(|(_, line)| line != HEADER) {
            return Err(format!("the first line is not `{HEADER}`"));
        }
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let read = |(i, line): (usize, &str)| point(line).map_err(|why| format!("line {}: {why}", i + 1));
        Ok(Timings::new(lines.map(read).collect::<Result<Vec<_>, _>>()?))
    }
}

fn point(line: &str) -> Result<Point, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (words, ways) = match words[..] {
        [.., ways] if words.len() == 8 => (&words[..7], u64::read(ways)?),
        _ => (&words[..], 1),
    };
    let [work, kernel, units, inner, flops, bytes, seconds] = words[..] else {
        return Err(format!("{} words and not 7", words.len()));
    };
    let size = Size {
        work: Work::read(work)?,
        kernel: kernel.into(),
        units: Units::read(units)?,
        inner: u64::read(inner)?,
        flops: u64::read(flops)?,
        bytes: u64::read(bytes)?,
        ways,
    };
    let seconds = f64::read(seconds)?;
    if !(seconds > 0.0 && seconds.is_finite()) {
        return Err(format!("`{seconds}` is no time"));
    }
    Ok(Point { size, seconds })
}

/// Fraction of the roofline that the neighbours reach after the fixed cost is subtracted: their geometric mean, weighted by
/// nearness.
fn efficiency(near: &[(f64, &Point)], floor: f64, rates: &Rates) -> f64 {
    let (mut sum, mut weights) = (0.0, 0.0);
    for (distance, point) in near {
        let weight = 1.0 / (distance + 1e-9);
        sum += weight * (point.size.roofline_seconds(rates) / (point.seconds - floor)).ln();
        weights += weight;
    }
    (sum / weights).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: Rates = Rates {
        f32_flops: 1e12,
        tf32_flops: Some(4e12),
        bf16_flops: 8e12,
        fp8_flops: None,
        memory_bytes: 1e11,
    };

    fn size(kernel: &str, units: Units, flops: u64, bytes: u64) -> Size {
        Size { work: Work::Product, kernel: kernel.into(), units, inner: 64, flops, bytes, ways: 1 }
    }

    fn at(flops: u64, seconds: f64) -> Point {
        Point { size: size("product", Units::F32, flops, 1000), seconds }
    }

    #[test]
    fn timed_sizes_are_predicted_exactly() {
        let timings =
            Timings::new([at(1_000_000, 3e-6), at(1_000_000, 5e-6), at(1_000_000, 4e-6), at(7, 0.0)]);
        assert_eq!(timings.points().len(), 1, "one a size, and nothing that took no time");
        assert_eq!(timings.expect(&at(1_000_000, 0.0).size, &RATES), Some(4e-6));
        assert_eq!(timings.expect_unseen(&at(1_000_000, 0.0).size, &RATES), None);
    }

    #[test]
    fn efficiency_is_interpolated_between_points() {
        // A fixed cost of a microsecond, and half of the peak rate.
        let cost = |flops: u64| 1e-6 + flops as f64 / 5e11;
        let timings =
            Timings::new([1, 1_000_000, 8_000_000, 64_000_000, 512_000_000].map(|n| at(n, cost(n))));
        for flops in [1000, 2_000_000, 20_000_000, 200_000_000, 1_000_000_000] {
            let expected = timings.expect(&at(flops, 0.0).size, &RATES).unwrap();
            let ratio = expected / cost(flops);
            assert!((0.95..1.05).contains(&ratio), "{flops}: {ratio}");
        }
        // The same arithmetic in other units has another roofline and, without points of its own, the same efficiency.
        let bf16 = size("product", Units::Bf16, 512_000_000, 1000);
        let expected = timings.expect(&bf16, &RATES).unwrap();
        assert!((expected / (512e6 / 8e12) / 2.0 - 1.0).abs() < 0.1, "{expected}");
    }

    #[test]
    fn small_launches_do_not_affect_predictions_of_large_ones() {
        let timings = Timings::new([at(1, 2e-6), at(10, 2.5e-6)]);
        let expected = timings.expect(&at(1_000_000_000, 0.0).size, &RATES).unwrap();
        assert!((expected / 1.002e-3 - 1.0).abs() < 1e-6, "its roofline, and the least: {expected}");
    }

    #[test]
    fn kernels_without_points_use_points_of_their_kind() {
        let timings = Timings::new([at(1, 1e-9), at(1_000_000, 4e-6)]);
        let other = size("other", Units::F32, 2_000_000, 1000);
        assert!((timings.expect(&other, &RATES).unwrap() / 8e-6 - 1.0).abs() < 1e-3);
        let norm = Size { work: Work::Norm, ..other };
        assert_eq!(timings.expect(&norm, &RATES), None, "and nothing for what nobody timed");
        assert_eq!(Timings::default().expect(&at(1, 0.0).size, &RATES), None);
    }

    #[test]
    fn exchanges_are_interpolated_between_points_of_their_kernel_and_ranks() {
        let exchange = |kernel: &str, inner: u64, ways: u64| Size {
            work: Work::Wire,
            inner,
            ways,
            ..size(kernel, Units::F32, inner, 8 * inner)
        };
        let point = |inner: u64, seconds: f64| Point { size: exchange("all_reduce", inner, 8), seconds };
        let timings = Timings::new([point(1 << 14, 20e-6), point(1 << 16, 32e-6), point(1 << 18, 80e-6)]);
        let expect = |size: Size| timings.expect(&size, &RATES);
        assert_eq!(expect(exchange("all_reduce", 1 << 16, 8)), Some(32e-6));
        assert_eq!(expect(exchange("all_reduce", 100, 8)), Some(20e-6), "it waits as long as the smallest");
        let between = expect(exchange("all_reduce", 5 << 15, 8)).unwrap();
        assert!((between - 56e-6).abs() < 1e-9, "half of the way: {between}");
        assert!((expect(exchange("all_reduce", 1 << 20, 8)).unwrap() - 320e-6).abs() < 1e-9);
        assert_eq!(expect(exchange("all_gather", 1 << 16, 8)), None, "another kernel");
        assert_eq!(expect(exchange("all_reduce", 1 << 16, 4)), None, "other ranks");
        // The same bytes in another type, and with a base.
        let halves = Size { units: Units::Bf16, bytes: 1, flops: 1, ..exchange("all_reduce", 1 << 17, 8) };
        assert_eq!(expect(halves), Some(32e-6));
        assert!(timings.knows_exchanges(8) && !timings.knows_exchanges(4) && !timings.knows_kernels());
        // Exchanges and kernels in one set do not influence each other's predictions.
        let both = timings.with(&Timings::new([at(1, 1e-6), at(1_000_000, 4e-6)]));
        assert!(both.knows_kernels() && both.points().len() == 5);
        assert!((both.expect(&at(2_000_000, 0.0).size, &RATES).unwrap() / 7e-6 - 1.0).abs() < 0.01);
        assert_eq!(timings.expect(&at(1, 0.0).size, &RATES), None);
        assert_eq!(both.without_exchanges(8).points().len(), 2);
        assert_eq!(both.without_exchanges(4), both);
        assert_eq!(Timings::read(&both.to_text()).unwrap(), both);
    }

    #[test]
    fn text_reads_back() {
        let timings = Timings::new([at(1_000_000, 4.25e-6), at(2, 1.0 / 3.0)]);
        assert_eq!(Timings::read(&timings.to_text()).unwrap(), timings);
        let exchange = Size { work: Work::Wire, ways: 8, ..at(64, 0.0).size };
        let exchanges = Timings::new([Point { size: exchange, seconds: 0.5 }]);
        assert!(exchanges.to_text().ends_with(" 5e-1 8\n"), "{}", exchanges.to_text());
        assert_eq!(Timings::read(&exchanges.to_text()).unwrap(), exchanges);
        assert_eq!(Timings::read("").unwrap_err(), "the first line is not `flatout timings 1`");
        let line = |line: &str| Timings::read(&format!("{HEADER}\n\n{line}\n")).unwrap_err();
        assert_eq!(line("product product"), "line 3: 2 words and not 7");
        assert_eq!(line("product p f32 1 2 3 0"), "line 3: `0` is no time");
        assert!(line("produce p f32 1 2 3 1").starts_with("line 3: `produce` is not"));
    }
}
