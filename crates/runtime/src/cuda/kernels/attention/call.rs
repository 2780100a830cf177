//! The argument struct of our attention kernels: the layout of `call.cuh`, word by word.

use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::{Launch, View};

use super::Problem;
use crate::cuda::argument::Block;
use crate::cuda::context::{Arg, Prepare};

/// `Rows` of call.cuh.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rows {
    pub at: u64,
    pub token: i64,
    pub head: i64,
}

impl Rows {
    fn of(view: Option<&View>, at: &Prepare<'_>) -> Rows {
        // An axis of extent one has no meaningful stride; use that of a dense tensor, which is aligned.
        let stride = |view: &View, axis: usize| {
            let dense: usize = view.dims[axis + 1..].iter().product();
            if view.dims[axis] == 1 { dense as i64 } else { view.strides[axis] as i64 }
        };
        let rows = |view: &View| Rows { at: at.address(view), token: stride(view, 0), head: stride(view, 1) };
        view.map_or(Rows::default(), rows)
    }
}

/// `Call` of call.cuh. Addresses of absent tensors are 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Call {
    pub q: Rows,
    pub k: Rows,
    pub v: Rows,
    pub o: Rows,
    pub d_o: Rows,
    pub dq: Rows,
    pub dk: Rows,
    pub dv: Rows,
    pub lse: u64,
    /// Allocated from scratch by the families that need it.
    pub delta: u64,
    pub scratch: u64,
    pub q_start: u64,
    pub q_len: u64,
    pub k_start: u64,
    pub k_len: u64,
    pub intervals: u64,
    /// Filled by `tiles::prepare`, with the counts.
    pub q_tiles: u64,
    pub k_tiles: u64,
    pub lse_row: i64,
    pub interval_row: i64,
    pub tq: i32,
    pub tk: i32,
    pub q_longest: i32,
    pub k_longest: i32,
    pub segments: i32,
    pub q_tile_count: i32,
    pub k_tile_count: i32,
    pub heads: i32,
    pub kv_heads: i32,
    pub back: i32,
    pub ahead: i32,
    pub scale: f32,
}

/// Longer windows are equivalent to this one, which keeps sums of positions within 32 bits.
const LONGEST_REACH: usize = 1 << 28;

impl Call {
    /// The fields that follow from the launch; tiles and scratch are filled by the family.
    pub fn of(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Call {
        let ins = &launch.ins;
        let out = |i: usize| launch.outs.get(i).and_then(Option::as_ref);
        let rows = |view: Option<&View>| Rows::of(view, at);
        let n = p.inputs();
        let (o, lse, d_o, grads) = match p.grad {
            false => (out(0), out(1), None, [None; 3]),
            true => (Some(&ins[n]), Some(&ins[n + 1]), Some(&ins[n + 2]), [out(0), out(1), out(2)]),
        };
        let mut rest = ins[3..n].iter();
        let mut next = |is_there: bool| rest.by_ref().take(is_there as usize).next();
        let (q, k) = (is_ragged(p.q), is_ragged(p.k));
        let segments = [next(q), next(q), next(k), next(k)];
        let intervals = next(p.mask == Mask::TwoIntervals);
        let address = |view: Option<&View>| view.map_or(0, |view| at.address(view));
        let row = |view: Option<&View>| view.map_or(0, |view| view.strides[0] as i64);
        let [q_start, q_len, k_start, k_len] = segments.map(address);
        let int = |x: usize| i32::try_from(x).unwrap_or(i32::MAX);
        let (back, ahead) = if let Mask::Window { back, ahead } = p.mask { (back, ahead) } else { (0, 0) };
        Call {
            q: rows(Some(&ins[0])),
            k: rows(Some(&ins[1])),
            v: rows(Some(&ins[2])),
            o: rows(o),
            d_o: rows(d_o),
            dq: rows(grads[0]),
            dk: rows(grads[1]),
            dv: rows(grads[2]),
            lse: address(lse),
            q_start,
            q_len,
            k_start,
            k_len,
            intervals: address(intervals),
            lse_row: row(lse),
            interval_row: row(intervals),
            tq: int(p.tq),
            tk: int(p.tk),
            q_longest: int(p.q_longest()),
            k_longest: int(p.k_longest()),
            segments: int(p.segments()),
            heads: int(p.heads),
            kv_heads: int(p.kv_heads),
            back: int(back.min(LONGEST_REACH)),
            ahead: int(ahead.min(LONGEST_REACH)),
            scale: p.scale,
            ..Call::default()
        }
    }

    /// The bytes of the struct: 64-bit fields first, then pairs of 32-bit fields, without padding.
    pub fn block(&self) -> Block {
        let c = self;
        let mut words: Vec<u64> = vec![];
        for rows in [c.q, c.k, c.v, c.o, c.d_o, c.dq, c.dk, c.dv] {
            words.extend([rows.at, rows.token as u64, rows.head as u64]);
        }
        words.extend([c.lse, c.delta, c.scratch, c.q_start, c.q_len, c.k_start, c.k_len, c.intervals]);
        words.extend([c.q_tiles, c.k_tiles, c.lse_row as u64, c.interval_row as u64]);
        let halves = [
            [c.tq, c.tk],
            [c.q_longest, c.k_longest],
            [c.segments, c.q_tile_count],
            [c.k_tile_count, c.heads],
            [c.kv_heads, c.back],
            [c.ahead, c.scale.to_bits() as i32],
        ];
        words.extend(halves.map(|[low, high]| low as u32 as u64 | (high as u32 as u64) << 32));
        Block::of_words(&words)
    }
}

/// Address and row stride of the gradient of lse as arguments; zeros without one. The kernel that computes delta subtracts it.
pub(super) fn d_lse(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> [Block; 2] {
    let view = p.d_lse.then(|| &launch.ins[p.inputs() + 3]);
    let (address, row) = view.map_or((0, 0), |view| (at.address(view), view.strides[0] as i64));
    [Arg::Ptr(address).into(), Arg::I64(row).into()]
}

pub(super) fn is_ragged(segments: Segments) -> bool {
    matches!(segments, Segments::Ragged { .. })
}

/// The defines that call.cuh needs.
pub(super) fn defines(p: &Problem) -> Vec<(String, String)> {
    let mask = match p.mask {
        Mask::Full => 0,
        Mask::Causal => 1,
        Mask::Window { .. } => 2,
        Mask::TwoIntervals => 3,
    };
    let flags = [("MASK", mask), ("Q_RAGGED", is_ragged(p.q) as u32), ("K_RAGGED", is_ragged(p.k) as u32)];
    let flags = flags.map(|(name, value)| (name.to_string(), value.to_string()));
    let cap = p.cap.0.map(|cap| ("CAP".to_string(), format!("{cap:?}f")));
    flags.into_iter().chain(cap).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 8 tensors of 3 words, 10 addresses, 2 strides, 11 integers and a float: the size of the struct in C.
    #[test]
    fn call_layout_matches_the_struct() {
        let rows = Rows { at: 1, token: 2, head: 3 };
        let call = Call { q: rows, dv: rows, lse: 4, interval_row: 5, tq: 6, scale: 1.0, ..Call::default() };
        let block = call.block();
        assert_eq!(block.bytes(), 8 * 24 + 10 * 8 + 2 * 8 + 11 * 4 + 4);
        let mut words = [0; 42];
        words[..3].copy_from_slice(&[1, 2, 3]);
        words[21..25].copy_from_slice(&[1, 2, 3, 4]);
        words[35] = 5;
        words[36] = 6;
        words[41] = (1.0_f32.to_bits() as u64) << 32;
        assert_eq!(block, Block::of_words(&words));
    }
}
