//! Our own attention kernel, for what cuDNN does not serve: f32, ragged segments, windows that look ahead, two
//! intervals, odd head sizes, GPUs without cuDNN. Deterministic in both directions.

use std::borrow::Cow;

use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::types::DType;
use flatout_ir::{Launch, View};

use super::Problem;
use crate::cuda::context::{Arg, CudaError, Prepare, Source, Work, launch as kernel_launch, sequence};

const THREADS: u32 = 128;
/// Head sizes the kernel's registers and shared memory are laid out for.
const MOST_SIZE: usize = 256;

/// Rows of the tile a block owns and of the tiles it walks over, so that they fit in 99 KiB of shared memory, the
/// least of the GPUs from sm_80 on, and sums fit in registers.
fn tiles(p: &Problem) -> (usize, usize) {
    match (p.grad, p.size) {
        (false, ..=64) => (64, 64),
        (false, ..=128) => (64, 32),
        (false, _) => (32, 32),
        (true, ..=128) => (32, 32),
        (true, _) => (16, 16),
    }
}

/// Dynamic shared memory: tiles of the owned and the walked rows, and matrices of weights between them.
fn shared_bytes(p: &Problem, owned: usize, walked: usize, weights: usize) -> u32 {
    let (own, walk) = tiles(p);
    let pitch = p.size.next_multiple_of(8) + 1;
    (4 * ((owned * own + walked * walk) * pitch + weights * own * (walk + 1))) as u32
}

/// The backward pass keeps the rows' sums of do * o.
pub(super) fn workspace(p: &Problem) -> usize {
    if p.grad { (4 * p.tq * p.heads).next_multiple_of(256) } else { 0 }
}

fn is_ragged(segments: Segments) -> bool {
    matches!(segments, Segments::Ragged { .. })
}

pub(super) fn source(p: &Problem) -> Source {
    let (own, walk) = tiles(p);
    let mask = match p.mask {
        Mask::Full => 0,
        Mask::Causal => 1,
        Mask::Window { .. } => 2,
        Mask::TwoIntervals => 3,
    };
    let defines = [
        ("T_X", if p.dtype == DType::BF16 { "bf16" } else { "float" }.to_string()),
        ("SIZE", p.size.to_string()),
        ("GRAD", (p.grad as u32).to_string()),
        ("OWN", own.to_string()),
        ("WALK", walk.to_string()),
        ("MASK", mask.to_string()),
        ("Q_RAGGED", (is_ragged(p.q) as u32).to_string()),
        ("K_RAGGED", (is_ragged(p.k) as u32).to_string()),
    ];
    Source {
        name: "attention/flash.cu",
        code: Cow::Borrowed(concat!(include_str!("../prelude.cuh"), include_str!("flash.cu"))),
        defines: defines.into_iter().map(|(name, value)| (name.into(), value)).collect(),
    }
}

/// A launch on its way to kernel arguments.
struct Call<'a> {
    problem: &'a Problem,
    launch: &'a Launch,
    p: &'a Prepare<'a>,
    source: Source,
}

impl Call<'_> {
    fn address(&self, view: Option<&View>) -> Arg {
        Arg::Ptr(view.map_or(0, |view| self.p.address(view)))
    }

    /// Starts and lengths of both sides, the intervals, and the intervals' row; zero where there are none.
    fn segments(&self) -> Vec<Arg> {
        let mut rest = self.launch.ins[3..self.problem.inputs()].iter();
        let mut next = |is_there: bool| self.address(rest.by_ref().take(is_there as usize).next());
        let (q, k) = (is_ragged(self.problem.q), is_ragged(self.problem.k));
        let mut args = vec![next(q), next(q), next(k), next(k)];
        let two = self.problem.mask == Mask::TwoIntervals;
        args.push(next(two));
        let last = &self.launch.ins[self.problem.inputs() - 1];
        args.push(Arg::I64(if two { last.strides[0] as i64 } else { 0 }));
        args
    }

    /// Extents, tiles on the owned side, the group of heads that share keys, scale and window.
    fn extents(&self, longest: usize) -> Vec<Arg> {
        let p = self.problem;
        let int = |x: usize| Arg::I32(x.min(i32::MAX as usize) as i32);
        // Windows beyond any sequence behave like the longest one and keep sums of positions in 32 bits.
        let reach = |x: usize| Arg::I32(x.min(1 << 28) as i32);
        let (back, ahead) = if let Mask::Window { back, ahead } = p.mask { (back, ahead) } else { (0, 0) };
        vec![
            int(p.tq),
            int(p.tk),
            int(p.q_longest()),
            int(p.k_longest()),
            int(self.tiles(longest)),
            int(p.heads / p.kv_heads),
            Arg::F32(p.scale),
            reach(back),
            reach(ahead),
        ]
    }

    fn tiles(&self, longest: usize) -> usize {
        longest.div_ceil(tiles(self.problem).0)
    }

    fn kernel(
        &self,
        entry: &str,
        grid: [usize; 2],
        shared: u32,
        args: Vec<Arg>,
    ) -> Result<Box<dyn Work>, CudaError> {
        let [Ok(x), Ok(y)] = grid.map(i32::try_from) else {
            return Err(CudaError::new(format!("{grid:?} blocks are more than a launch may have")));
        };
        if y > 65535 {
            return Err(CudaError::new(format!("{y} heads are more than a launch may have")));
        }
        let function = self.p.function(&self.source, entry)?;
        Ok(kernel_launch(function, [x as u32, y as u32, 1], THREADS, shared, args))
    }

    /// Zeros in every row of an output whose segments may leave rows out.
    fn clear(&self, view: Option<&View>, segments: Segments) -> Result<Option<Box<dyn Work>>, CudaError> {
        let Some(view) = view.filter(|_| is_ragged(segments)) else { return Ok(None) };
        let mut args = vec![self.address(Some(view))];
        args.extend(strides(view));
        args.push(Arg::I32(view.dims[1] as i32));
        self.kernel("flash_clear", [view.dims[0], 1], 0, args).map(Some)
    }
}

/// Of tokens and heads.
fn strides(view: &View) -> [Arg; 2] {
    [Arg::I64(view.strides[0] as i64), Arg::I64(view.strides[1] as i64)]
}

fn row(lse: Option<&View>) -> Arg {
    Arg::I64(lse.map_or(0, |lse| lse.strides[0] as i64))
}

pub(super) fn prepare(
    problem: &Problem,
    launch: &Launch,
    p: &Prepare<'_>,
) -> Result<Box<dyn Work>, CudaError> {
    if problem.size > MOST_SIZE {
        let size = problem.size;
        return Err(CudaError::new(format!(
            "a head size of {size} is more than the {MOST_SIZE} attention takes"
        )));
    }
    let call = Call { problem, launch, p, source: source(problem) };
    let works = if problem.grad { backward(&call)? } else { forward(&call)? };
    Ok(sequence(works))
}

fn forward(call: &Call<'_>) -> Result<Vec<Box<dyn Work>>, CudaError> {
    let (p, ins) = (call.problem, &call.launch.ins);
    let (o, lse) = (call.launch.outs[0].as_ref(), call.launch.outs[1].as_ref());
    let mut works: Vec<Box<dyn Work>> = call.clear(o, p.q)?.into_iter().collect();
    if let Some(lse) = lse.filter(|_| is_ragged(p.q)) {
        let args = vec![call.address(Some(lse)), row(Some(lse)), Arg::I32(p.heads as i32)];
        works.push(call.kernel("flash_clear_lse", [p.tq, 1], 0, args)?);
    }
    let mut args: Vec<Arg> = ins[..3].iter().map(|view| call.address(Some(view))).collect();
    args.extend([call.address(o), call.address(lse)]);
    args.extend(call.segments());
    args.extend(ins[..3].iter().flat_map(strides));
    args.extend(o.map_or([Arg::I64(0); 2], strides));
    args.push(row(lse));
    args.extend(call.extents(p.q_longest()));
    let grid = [call.tiles(p.q_longest()) * p.segments(), p.heads];
    works.push(call.kernel("flash_forward", grid, shared_bytes(p, 1, 1, 1), args)?);
    Ok(works)
}

fn backward(call: &Call<'_>) -> Result<Vec<Box<dyn Work>>, CudaError> {
    let (p, ins) = (call.problem, &call.launch.ins);
    let n = p.inputs();
    let (o, lse, d_o) = (&ins[n], &ins[n + 1], &ins[n + 2]);
    let [dq, dk, dv] = [0, 1, 2].map(|i| call.launch.outs[i].as_ref());
    let delta = call.launch.workspace.as_ref();
    let heads = Arg::I32(p.heads as i32);
    let mut works: Vec<Box<dyn Work>> = vec![];
    for (view, segments) in [(dq, p.q), (dk, p.k), (dv, p.k)] {
        works.extend(call.clear(view, segments)?);
    }

    let rows = p.tq * p.heads;
    let mut args = vec![call.address(Some(o)), call.address(Some(d_o)), call.address(delta)];
    args.extend([o, d_o].into_iter().flat_map(strides));
    args.extend([heads, Arg::I64(rows as i64)]);
    works.push(call.kernel("flash_delta", [rows.div_ceil(THREADS as usize / 32), 1], 0, args)?);

    let read: Vec<Arg> = [&ins[0], &ins[1], &ins[2], d_o, lse]
        .into_iter()
        .map(|view| call.address(Some(view)))
        .chain([call.address(delta)])
        .collect();
    let steps: Vec<Arg> = [&ins[0], &ins[1], &ins[2], d_o].into_iter().flat_map(strides).collect();
    if let Some(dq) = dq {
        let mut args = read.clone();
        args.push(call.address(Some(dq)));
        args.extend(call.segments());
        args.extend(steps.iter().copied().chain(strides(dq)));
        args.push(row(Some(lse)));
        args.extend(call.extents(p.q_longest()));
        args.push(heads);
        let grid = [call.tiles(p.q_longest()) * p.segments(), p.heads];
        works.push(call.kernel("flash_dq", grid, shared_bytes(p, 2, 2, 1), args)?);
    }
    if dk.is_some() || dv.is_some() {
        let mut args = read;
        args.extend([call.address(dk), call.address(dv)]);
        args.extend(call.segments());
        args.extend(steps);
        args.extend([dk, dv].into_iter().flat_map(|view| view.map_or([Arg::I64(0); 2], strides)));
        args.push(row(Some(lse)));
        args.extend(call.extents(p.k_longest()));
        args.push(heads);
        let grid = [call.tiles(p.k_longest()) * p.segments(), p.kv_heads];
        works.push(call.kernel("flash_dkv", grid, shared_bytes(p, 2, 2, 2), args)?);
    }
    Ok(works)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 99 KiB is what sm_86 and sm_89 have; a kilobyte of it is the runtime's and the kernels' own.
    #[test]
    fn tiles_fit_in_the_smallest_shared_memory() {
        for size in 1..=MOST_SIZE {
            for grad in [false, true] {
                let p = Problem {
                    grad,
                    dtype: DType::F32,
                    tq: 8,
                    tk: 8,
                    heads: 1,
                    kv_heads: 1,
                    size,
                    scale: 1.0,
                    mask: Mask::Full,
                    q: Segments::Uniform { len: 8 },
                    k: Segments::Uniform { len: 8 },
                };
                let bytes = if grad { shared_bytes(&p, 2, 2, 2) } else { shared_bytes(&p, 1, 1, 1) };
                assert!(bytes <= 96 << 10, "{p:?} takes {bytes}");
            }
        }
    }
}
