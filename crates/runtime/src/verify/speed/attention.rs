//! Times every attention kernel that serves a shape, against the others and cuDNN.
//!
//! Each measurement is one call of a model's layer, on noise; kernels take turns.
//!
//! Rates count the unmasked pairs of the actual segments, so a kernel gains nothing by unnecessary work. If one set of tensors
//! would stay in cache, several copies are allocated and calls cycle through them.

use flatout_ir::ops::attention::Mask;
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op};

use crate::Session;
use crate::cuda::{self, AttentionKernel};
use crate::verify::real::attention::{Problem, decode, equal, packed, trees};
use crate::verify::real::{Bench, Fill, WIDE, message};
use crate::verify::{CaseDevice, KernelSelection};

/// Number of turns; the median counts.
const TURNS: usize = 5;
/// Approximate duration of a turn.
const TURN_MS: f64 = 25.0;
const MOST_CALLS: usize = 40;
/// Copies of the tensors together take this many times the cache.
const CACHES: usize = 4;
const MOST_COPIES: usize = 8;

/// The kernels to compare on one shape and direction.
pub struct Race {
    pub name: String,
    problem: Problem,
    grad: bool,
    /// The same sequences padded to one length, which cuDNN runs as equal ones.
    padded: Option<Problem>,
    /// Whether the shape is bound by memory rather than arithmetic: a copy of as many bytes is timed too.
    by_memory: bool,
}

/// A race's problem, so that other implementations can run the same.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub backward: bool,
    pub causal: bool,
    pub heads: usize,
    pub kv_heads: usize,
    pub size: usize,
    /// Numbers of queries and keys of each sequence; sequences are contiguous on one axis.
    pub lengths: Vec<(usize, usize)>,
    /// The length that sequences are padded to by implementations without packing.
    pub padded_to: Option<usize>,
}

/// The time of one call of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Lap {
    pub kernel: String,
    /// The median of the turns, the shortest and the longest.
    pub ms: f64,
    pub shortest_ms: f64,
    pub longest_ms: f64,
    /// FLOPs of the unmasked pairs, whatever else the kernel computes.
    pub flops: u64,
    /// Tensors read and written once, counting only rows in segments.
    pub bytes: u64,
}

impl Lap {
    pub fn teraflops(&self) -> f64 {
        self.flops as f64 / self.ms / 1e9
    }

    pub fn gigabytes_a_second(&self) -> f64 {
        self.bytes as f64 / self.ms / 1e6
    }
}

/// The lap that others are compared with: cuDNN on equal sequences, or padded ones if the problem is packed.
pub const PADDED: &str = "cudnn, padded";
pub const COPY: &str = "copy";

/// The shapes by which attention is judged, both directions each.
pub fn races() -> Vec<Race> {
    let tokens = 65536;
    let plain = |problem| (problem, None, false);
    let ragged = |mask, heads, kv_heads, size| {
        let problem = packed("packed", tokens, 325, 512, heads, kv_heads, size, mask);
        let padded = equal(mask, 325, 512, heads, kv_heads, size);
        (problem, Some(padded), false)
    };
    let problems = [
        plain(equal(Mask::Causal, 32, 2048, 12, 4, 64)),
        plain(equal(Mask::Causal, 16, 2048, 16, 8, 128)),
        plain(equal(Mask::Full, 256, 257, 12, 12, 64)),
        plain(equal(Mask::Causal, 64, 512, 4, 1, 256)),
        ragged(Mask::Causal, 12, 4, 64),
        ragged(Mask::Full, 12, 4, 64),
        ragged(Mask::Causal, 4, 1, 256),
        ragged(Mask::Full, 4, 1, 256),
        plain(packed("packed long", tokens, 28, 4096, 12, 4, 64, Mask::Causal)),
        plain(packed("packed long", tokens, 28, 4096, 16, 8, 128, Mask::Causal)),
        plain(trees(8, 1536, 16, 8, 128)),
        plain(trees(8, 1536, 12, 4, 64)),
        (decode(64, 4096, 32, 8, 128), None, true),
        (decode(256, 512, 12, 4, 64), None, true),
    ];
    let mut all = vec![];
    for (problem, padded, by_memory) in problems {
        for grad in [false, true] {
            let Problem { what, mask, heads, kv_heads, size, .. } = &problem;
            let direction = if grad { "backward" } else { "forward" };
            let name = format!("{direction} {mask:?}, {what}, {heads} heads on {kv_heads} of {size}, bf16");
            let (problem, padded) = (problem.clone(), padded.clone());
            all.push(Race { name, problem, grad, padded, by_memory });
        }
    }
    all
}

/// Number of keys that a query with two intervals attends to, if they do not overlap.
fn seen_by(intervals: &[f64]) -> u64 {
    ((intervals[1] - intervals[0]) + (intervals[3] - intervals[2])) as u64
}

/// Query-key pairs of one head.
fn pairs(problem: &Problem) -> u64 {
    if problem.mask == Mask::TwoIntervals {
        return problem.intervals.chunks(4).map(seen_by).sum();
    }
    let of_segment = |q: u64, k: u64| match problem.mask {
        Mask::Causal if q <= k => q * (k - q) + q * (q + 1) / 2,
        Mask::Causal => k * (k + 1) / 2,
        _ => q * k,
    };
    problem.segments.iter().map(|(q, k)| of_segment(q.len() as u64, k.len() as u64)).sum()
}

/// Two products per pair forward, five backward.
fn flops(problem: &Problem, grad: bool) -> u64 {
    let products = if grad { 5 } else { 2 };
    2 * products * pairs(problem) * (problem.heads * problem.size) as u64
}

/// The backward pass reads q, k, v, o, do and lse, and writes dq, dk and dv.
fn bytes(problem: &Problem, grad: bool) -> u64 {
    let segments = || problem.segments.iter();
    let of_q = segments().map(|(q, _)| q.len()).sum::<usize>() as u64 * problem.heads as u64;
    let of_k = segments().map(|(_, k)| k.len()).sum::<usize>() as u64 * problem.kv_heads as u64;
    let (q_tensors, k_tensors) = if grad { (4, 4) } else { (2, 2) };
    2 * problem.size as u64 * (q_tensors * of_q + k_tensors * of_k) + 4 * of_q
}

/// The approximate lse of rows of noise: the logarithm of the number of keys attended to, plus half the scores' variance.
fn statistics(problem: &Problem) -> Vec<f64> {
    const HALF_VARIANCE: f64 = 0.076;
    let mut lse = vec![0.0; problem.tokens * problem.heads];
    for (q, k) in &problem.segments {
        for (i, row) in q.clone().enumerate() {
            let seen = match problem.mask {
                Mask::Causal => (i + 1 + k.len()).saturating_sub(q.len()).max(1),
                Mask::TwoIntervals => seen_by(&problem.intervals[4 * row..]) as usize,
                _ => k.len(),
            };
            let value = (seen as f64).ln() + HALF_VARIANCE;
            lse[row * problem.heads..(row + 1) * problem.heads].fill(value);
        }
    }
    lse
}

/// Lays out enough copies of one call that its tensors do not stay in cache.
fn lay(problem: &Problem, grad: bool, bench: &mut Bench<'_>, copies: usize) -> Result<(), String> {
    for _ in 0..copies {
        let mut ins = problem.lay(bench);
        if grad {
            let q = ins[0].dims.clone();
            let o = bench.input(DType::BF16, &q, WIDE);
            let lse = bench.input(DType::F32, &q[..2], Fill::Values(statistics(problem)));
            let d = bench.input(DType::BF16, &q, WIDE);
            ins.extend([o, lse, d]);
        }
        bench.launch(problem.op(grad, problem.q, problem.k), &ins)?;
    }
    Ok(())
}

/// A session that runs one call repeatedly.
struct Runner {
    kernel: String,
    session: Session,
    copies: usize,
    calls: usize,
    flops: u64,
    bytes: u64,
    ms: Vec<f64>,
}

impl Runner {
    fn time(&mut self, calls: usize) -> Result<f64, String> {
        let session = self.session.as_cuda().expect("made on a device");
        Ok(session.time_ms(0, calls).map_err(message)? / self.copies as f64)
    }

    fn lap(mut self) -> Lap {
        self.ms.sort_by(f64::total_cmp);
        Lap {
            kernel: self.kernel,
            ms: self.ms[self.ms.len() / 2],
            shortest_ms: self.ms[0],
            longest_ms: self.ms[self.ms.len() - 1],
            flops: self.flops,
            bytes: self.bytes,
        }
    }
}

impl Race {
    /// Times every kernel that serves the problem; one that cannot run reports why.
    pub fn run(&self, device: &cuda::Device) -> Result<Vec<Lap>, String> {
        let mut runners = vec![];
        for selection in self.selections(&self.problem, device)? {
            runners.push(self.runner(&self.problem, selection.attention.name().into(), selection, device)?);
        }
        if let Some(padded) = &self.padded {
            let selection = KernelSelection::attention(AttentionKernel::Cudnn);
            if self.selections(padded, device)?.contains(&selection) {
                let mut runner = self.runner(padded, PADDED.into(), selection, device)?;
                // Counts the requested work, without what padding adds.
                (runner.flops, runner.bytes) =
                    (flops(&self.problem, self.grad), bytes(&self.problem, self.grad));
                runners.push(runner);
            }
        }
        if self.by_memory {
            runners.push(self.copy(device)?);
        }
        for runner in &mut runners {
            let once = runner.time(1)? * runner.copies as f64;
            runner.calls = ((TURN_MS / once) as usize).clamp(1, MOST_CALLS);
        }
        for _ in 0..TURNS {
            for runner in &mut runners {
                let ms = runner.time(runner.calls)?;
                runner.ms.push(ms);
            }
        }
        Ok(runners.into_iter().map(Runner::lap).collect())
    }

    pub fn shape(&self) -> Shape {
        let Problem { mask, heads, kv_heads, size, segments, .. } = &self.problem;
        Shape {
            backward: self.grad,
            causal: *mask == Mask::Causal,
            heads: *heads,
            kv_heads: *kv_heads,
            size: *size,
            lengths: segments.iter().map(|(q, k)| (q.len(), k.len())).collect(),
            padded_to: self.padded.as_ref().map(|padded| padded.segments[0].0.len()),
        }
    }

    /// One call, for compiling ahead.
    pub fn launches(&self, device: &cuda::Device) -> Result<Vec<Launch>, String> {
        let mut bench = Bench::new(CaseDevice::Cuda(device), KernelSelection::default());
        for problem in [Some(&self.problem), self.padded.as_ref()].into_iter().flatten() {
            lay(problem, self.grad, &mut bench, 1)?;
        }
        Ok(bench.launches)
    }

    fn selections(&self, problem: &Problem, device: &cuda::Device) -> Result<Vec<KernelSelection>, String> {
        let place = CaseDevice::Cuda(device);
        let mut bench = Bench::new(place, KernelSelection::default());
        lay(problem, self.grad, &mut bench, 1)?;
        Ok(place.selections(&bench.launches, cuda::Options::default()))
    }

    fn runner(
        &self,
        problem: &Problem,
        kernel: String,
        selection: KernelSelection,
        device: &cuda::Device,
    ) -> Result<Runner, String> {
        let (flops, bytes) = (flops(problem, self.grad), bytes(problem, self.grad));
        let cache = device.facts(cuda::Options::default()).l2_bytes as u64;
        let copies = ((CACHES as u64 * cache).div_ceil(bytes) as usize).clamp(1, MOST_COPIES);
        let mut bench = Bench::new(CaseDevice::Cuda(device), selection);
        lay(problem, self.grad, &mut bench, copies)?;
        let session = bench.open().map_err(|why| format!("{kernel}: {why}"))?;
        Ok(Runner { kernel, session, copies, calls: 1, flops, bytes, ms: vec![] })
    }

    /// A copy that reads half of the problem's bytes and writes half.
    fn copy(&self, device: &cuda::Device) -> Result<Runner, String> {
        let wide = 4096;
        let rows = (bytes(&self.problem, self.grad) as usize / (4 * wide)).max(1);
        let mut bench = Bench::new(CaseDevice::Cuda(device), KernelSelection::default());
        let from = bench.input(DType::BF16, &[rows, wide], WIDE);
        bench.launch(Op::Reshape { dims: vec![4 * rows, wide / 4] }, &[from])?;
        let bytes = (4 * rows * wide) as u64;
        let session = bench.open()?;
        Ok(Runner { kernel: COPY.into(), session, copies: 1, calls: 1, flops: 0, bytes, ms: vec![] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_what_the_mask_leaves() {
        let causal = equal(Mask::Causal, 32, 2048, 12, 4, 64);
        assert_eq!(pairs(&causal), 32 * 2048 * 2049 / 2);
        assert_eq!(flops(&causal, false), 4 * 64 * 12 * 32 * 2048 * 2049 / 2);
        assert_eq!(2 * flops(&causal, true), 5 * flops(&causal, false));
        assert_eq!(pairs(&decode(1, 100, 1, 1, 8)), 100);
        // A prompt of four and two answers of four.
        assert_eq!(pairs(&trees(1, 12, 1, 1, 8)), 10 + 2 * (4 * 4 + 10));
        let both = equal(Mask::Full, 2, 10, 4, 2, 8);
        assert_eq!(bytes(&both, false), 2 * 8 * 20 * (4 + 4 + 2 + 2) + 4 * 20 * 4);
    }

    /// Documents of mean length 200 in sequences of 512: four times the work.
    #[test]
    fn padding_is_several_times_the_work_of_packing() {
        let packed_ones: Vec<Race> = races().into_iter().filter(|race| race.padded.is_some()).collect();
        assert_eq!(packed_ones.len(), 8);
        for race in packed_ones {
            let tokens = |p: &Problem| p.segments.iter().map(|(q, _)| q.len()).sum::<usize>();
            let (ours, theirs) = (&race.problem, race.padded.as_ref().expect("they are padded"));
            assert!((60_000..=65_536).contains(&tokens(ours)), "{} tokens", tokens(ours));
            assert_eq!((ours.segments.len(), theirs.segments.len()), (325, 325));
            assert!(ours.segments.iter().all(|(q, _)| (1..=512).contains(&q.len())));
            let more = pairs(theirs) as f64 / pairs(ours) as f64;
            assert!((3.0..5.5).contains(&more), "{more:.2} times the work");
        }
    }

    #[test]
    fn every_shape_is_one_the_kernels_take() {
        for race in races() {
            for problem in [Some(&race.problem), race.padded.as_ref()].into_iter().flatten() {
                let mut bench = Bench::new(CaseDevice::Cpu, KernelSelection::default());
                lay(problem, race.grad, &mut bench, 1).unwrap_or_else(|why| panic!("{}: {why}", race.name));
                bench.check().unwrap_or_else(|why| panic!("{}: {why}", race.name));
            }
        }
    }
}
