//! The backward pass on Hopper: chooses kernels and their tile shapes, and launches them.
//!
//! Row statistics first; then dk and dv by tiles of keys, and dq by tiles of queries, which is deterministic. Without
//! `deterministic`, two kinds of sequences have kernels that need 5 products per tile instead of 7: `backward_fused` for long
//! sequences with small heads, `backward_whole` for short ones that fit in a block.

use std::borrow::Cow;

use flatout_ir::Launch;
use flatout_ir::ops::attention::Mask;
use flatout_ir::types::DType;

use super::{PANEL, backward_fused, backward_whole, is_hopper, is_written};
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{Arg, CudaError, Facts, Prepare, Source, Work, sequence};
use crate::cuda::kernels::attention::Problem;
use crate::cuda::kernels::attention::call::{self, Call, Rows};
use crate::cuda::kernels::attention::scratch::{ALIGN, Scratch};
use crate::cuda::kernels::attention::tiles::{self, Heights};
use crate::cuda::tensor_map::{Swizzle, Tensor};

/// Rows of a warpgroup's tile and of a walked tile.
pub(super) const ROWS: usize = 64;
/// Bytes of a panel of ROWS rows.
pub(super) const PANEL_BYTES: usize = 2 * ROWS * PANEL;
/// Tokens per block of `wgmma_rows`.
const ROW_TOKENS: usize = 256;

/// The configuration of a kernel that walks tiles; backward.cuh explains the fields.
#[derive(Clone, Copy, Debug, PartialEq)]
struct BackwardConfig {
    /// Whether a block owns tiles of keys; otherwise of queries.
    of_keys: bool,
    groups: usize,
    heads: usize,
    blocks: usize,
    stages: usize,
    /// Stages for walked tiles of values; only the kernel of the queries has separate rings for keys and values.
    v_stages: usize,
    own_stages: usize,
    /// Registers per thread of the consumers and of the producer.
    registers: [usize; 2],
}

impl BackwardConfig {
    fn keys(p: &Problem) -> BackwardConfig {
        let form = BackwardConfig {
            of_keys: true,
            groups: 2,
            heads: 1,
            blocks: 1,
            stages: 4,
            v_stages: 0,
            own_stages: 2,
            registers: [232, 40],
        };
        match p.size {
            // Two small blocks per multiprocessor: tiles of 64 keys waste less on short sequences.
            ..=64 => BackwardConfig { groups: 1, blocks: 2, stages: 3, registers: [216, 40], ..form },
            65..=128 => BackwardConfig { stages: 3, own_stages: 1, ..form },
            _ => BackwardConfig { stages: 2, own_stages: 1, ..form },
        }
    }

    /// Processes the query heads of a key head side by side, one per warpgroup, if they divide; a tile is then 64 tokens high.
    fn queries(p: &Problem) -> BackwardConfig {
        let side_by_side = |n: usize| if (p.heads / p.kv_heads).is_multiple_of(n) { n } else { 1 };
        let form = BackwardConfig {
            of_keys: false,
            groups: 2,
            heads: side_by_side(2),
            blocks: 1,
            stages: 3,
            v_stages: 2,
            own_stages: 2,
            registers: [224, 56],
        };
        match p.size {
            ..=64 => BackwardConfig { groups: 3, heads: side_by_side(3), registers: [152, 56], ..form },
            65..=128 => form,
            _ => {
                let registers = if p.mask == Mask::TwoIntervals { [232, 40] } else { [224, 56] };
                BackwardConfig { stages: 2, v_stages: 1, own_stages: 1, registers, ..form }
            }
        }
    }

    fn threads(&self) -> u32 {
        128 * (self.groups as u32 + 1)
    }

    /// Tokens per tile; above head size 128, two warpgroups of the kernel of the keys share a tile.
    fn height(&self, size: usize) -> usize {
        if self.of_keys && size > 128 { ROWS } else { ROWS * self.groups / self.heads }
    }

    /// Matches AT_BARRIERS in the sources, plus the barriers.
    fn shared_bytes(&self, p: &Problem) -> usize {
        let panels = p.size.div_ceil(PANEL) * PANEL_BYTES;
        let rows = 2 * 4 * ROWS;
        let task = 32 * self.own_stages;
        if !self.of_keys {
            let walked = self.stages + self.v_stages;
            let own = self.own_stages * self.groups;
            return 2 * own * panels
                + walked * panels
                + own * rows
                + task
                + 32
                + 16 * (walked + self.own_stages);
        }
        let own = self.own_stages * self.height(p.size) / ROWS;
        let is_two_intervals = p.mask == Mask::TwoIntervals;
        let exchanged = match p.size {
            ..=128 => 0,
            _ => 4 * ROWS * ROWS * if is_two_intervals { 1 } else { 2 },
        };
        let seen = if is_two_intervals { 16 * ROWS } else { 0 };
        let walked = self.stages * (2 * panels + rows + seen + 16);
        2 * own * panels + walked + exchanged + task + 16 * (self.stages + self.own_stages + 2)
    }

    fn source(&self, p: &Problem) -> Source {
        let own = [
            ("SIZE", p.size),
            ("GROUPS", self.groups),
            ("HEADS", self.heads),
            ("BLOCKS", self.blocks),
            ("STAGES", self.stages),
            ("V_STAGES", self.v_stages),
            ("OWN_STAGES", self.own_stages),
            ("REGISTERS", self.registers[0]),
            ("FEEDER_REGISTERS", self.registers[1]),
        ];
        let (name, code) = match self.of_keys {
            true => ("attention/hopper/backward_keys.cu", backward_source!("backward_keys.cu")),
            false => ("attention/hopper/backward_queries.cu", backward_source!("backward_queries.cu")),
        };
        let defines = own.map(|(name, value)| (name.into(), value.to_string()));
        Source {
            name,
            code: Cow::Borrowed(code),
            defines: defines.into_iter().chain(call::defines(p)).collect(),
        }
    }
}

pub(in super::super) fn serves(p: &Problem, facts: &Facts) -> bool {
    p.grad && is_written(p) && is_hopper(facts)
}

/// Two numbers per row, rows padded to multiples of 8, and the tile counters; with two intervals also eight numbers per run of
/// 16 rows, starting 16 bytes after the counters.
pub(super) fn statistics_bytes(p: &Problem) -> usize {
    let outlines = if p.mask == Mask::TwoIntervals { 16 + 32 * p.tq.div_ceil(16) } else { 8 };
    (4 * 2 * p.heads * p.tq.next_multiple_of(8) + outlines).next_multiple_of(ALIGN)
}

fn heights(p: &Problem) -> Heights {
    Heights {
        q: Some(BackwardConfig::queries(p).height(p.size)),
        k: Some(BackwardConfig::keys(p).height(p.size)),
    }
}

/// Enough for any of the kernels, because the choice also depends on the outputs.
pub(in super::super) fn workspace(p: &Problem) -> usize {
    if !p.grad || !is_written(p) {
        return 0;
    }
    (statistics_bytes(p) + tiles::workspace(p, heights(p))).max(backward_fused::workspace(p))
}

/// The source that computes row statistics. If dq `is_summed`, also clears and rounds its sums, as `backward_fused` needs.
pub(super) fn rows_source(p: &Problem, is_summed: bool) -> Source {
    let own = [("SIZE", p.size), ("SUMMED", is_summed as usize), ("GROUPS", 1), ("HEADS", 1)];
    let defines = own.map(|(name, value)| (name.into(), value.to_string()));
    Source {
        name: "attention/hopper/backward_rows.cu",
        code: Cow::Borrowed(backward_source!("sums.cuh", "backward_rows.cu")),
        defines: defines.into_iter().chain(call::defines(p)).collect(),
    }
}

/// The sources of all kernels that may run.
pub(in super::super) fn sources(p: &Problem, facts: &Facts) -> Vec<Source> {
    if backward_whole::takes(p, facts) {
        return vec![backward_whole::source(p)];
    }
    let mut sources = tiles::sources(p);
    if backward_fused::takes(p, facts) {
        sources.extend(backward_fused::sources(p));
    }
    sources.extend([
        rows_source(p, false),
        BackwardConfig::keys(p).source(p),
        BackwardConfig::queries(p).source(p),
    ]);
    sources
}

/// Dynamic shared memory of a source's kernel, to check against the device's limit.
pub(in super::super) fn shared_bytes(p: &Problem, facts: &Facts, of: &Source) -> usize {
    if backward_whole::takes(p, facts) && *of == backward_whole::source(p) {
        return backward_whole::shared_bytes(p);
    }
    if backward_fused::takes(p, facts) && *of == backward_fused::source(p) {
        return backward_fused::shared_bytes(p);
    }
    let forms = [BackwardConfig::keys(p), BackwardConfig::queries(p)];
    forms.iter().find(|form| form.source(p) == *of).map_or(0, |form| form.shared_bytes(p))
}

pub(in super::super) fn prepare(
    p: &Problem,
    launch: &Launch,
    at: &Prepare<'_>,
) -> Result<Box<dyn Work>, CudaError> {
    let facts = at.facts();
    if backward_whole::takes(p, facts) {
        return backward_whole::prepare(p, launch, at);
    }
    let mut call = Call::of(p, launch, at);
    let has_keys = call.dk.at != 0 || call.dv.at != 0;
    if backward_fused::takes(p, facts) && has_keys && call.dq.at != 0 {
        return backward_fused::prepare(p, launch, at);
    }
    let mut scratch = Scratch::of(launch, at);
    call.delta = scratch.take(statistics_bytes(p))?;
    let mut works: Vec<Box<dyn Work>> = vec![];
    works.extend(tiles::prepare(p, &mut call, heights(p), &mut scratch, at)?);
    works.push(measure(p, launch, &call, &rows_source(p, false), at)?);

    let maps = walked_maps(p, &call, at)?;
    let mut walk = |form: BackwardConfig, entry: &str| {
        let (tiles, heads) = match form.of_keys {
            true => (call.k_tile_count, p.kv_heads),
            false => (call.q_tile_count, p.heads / form.heads),
        };
        let work = tiles as usize * heads;
        if i32::try_from(work).is_err() {
            return Err(CudaError::new(format!("{work} tiles are too many")));
        }
        let mut args = vec![call.block()];
        args.extend(maps.iter().cloned());
        args.push(Block::from(Arg::I32(section(p, form.of_keys, form.heads, facts))));
        let grid = [work.min(facts.sms as usize * form.blocks), 1, 1];
        let function = at.function(&form.source(p), entry)?;
        works.push(launch_blocks(function, grid, form.threads(), form.shared_bytes(p) as u32, args)?);
        Ok(())
    };
    if has_keys {
        walk(BackwardConfig::keys(p), "wgmma_dkv")?;
    }
    if call.dq.at != 0 {
        walk(BackwardConfig::queries(p), "wgmma_dq")?;
    }
    Ok(sequence(works))
}

/// The launch that computes row statistics, from a source of `rows_source`.
pub(super) fn measure(
    p: &Problem,
    launch: &Launch,
    call: &Call,
    source: &Source,
    at: &Prepare<'_>,
) -> Result<Box<dyn Work>, CudaError> {
    let args = [call.block()].into_iter().chain(call::d_lse(p, launch, at)).collect();
    let grid = [p.tq.div_ceil(ROW_TOKENS) * p.heads, 1, 1];
    launch_blocks(at.function(source, "wgmma_rows")?, grid, 256, 0, args)
}

/// Tensor maps of q, do, k and v, in the kernels' order, with boxes of one panel of one head.
pub(super) fn walked_maps(p: &Problem, call: &Call, at: &Prepare<'_>) -> Result<Vec<Block>, CudaError> {
    let map = |rows: Rows, tokens: usize, heads: usize| {
        at.tensor_map(&Tensor {
            at: rows.at,
            dtype: DType::BF16,
            dims: [p.size, heads, tokens].map(|n| n as u64).to_vec(),
            steps: vec![rows.head as u64, rows.token as u64],
            box_dims: vec![PANEL as u32, 1, ROWS as u32],
            swizzle: Swizzle::Bytes128,
        })
    };
    let of_queries = [call.q, call.d_o].map(|rows| map(rows, p.tq, p.heads));
    let of_keys = [call.k, call.v].map(|rows| map(rows, p.tk, p.kv_heads));
    of_queries.into_iter().chain(of_keys).collect()
}

/// Number of (segment, head) pairs processed concurrently, such that what their tiles walk fits in half of the L2 cache. Ragged
/// segments keep the order of their list.
pub(super) fn section(p: &Problem, of_keys: bool, heads: usize, facts: &Facts) -> i32 {
    let (group, half) = (p.heads / p.kv_heads, facts.l2_bytes as usize / 2);
    // Two bf16 tensors.
    let pairs = match of_keys {
        true => half / (4 * group * p.q_longest() * p.size),
        false => half / (4 * p.k_longest() * p.size) * group / heads,
    };
    pairs.clamp(1, i32::MAX as usize / 2) as i32
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::attention::Segments;
    use flatout_ir::ops::cap::Cap;
    use flatout_ir::types::DType;

    fn problem(size: usize, mask: Mask, len: usize) -> Problem {
        let uniform = Segments::Uniform { len };
        Problem {
            grad: true,
            d_lse: false,
            dtype: DType::BF16,
            tq: 4 * len,
            tk: 4 * len,
            heads: 12,
            kv_heads: 4,
            size,
            scale: 1.0,
            cap: Cap::NONE,
            mask,
            q: uniform,
            k: uniform,
        }
    }

    /// A block may have 227 KiB; the blocks of a multiprocessor share 228 KiB, of which the runtime takes 1 KiB per block.
    #[test]
    fn every_head_size_fits_in_shared_memory() {
        for size in (16..=256).step_by(8) {
            for mask in [Mask::Causal, Mask::TwoIntervals] {
                let p = problem(size, mask, 2048);
                for form in [BackwardConfig::keys(&p), BackwardConfig::queries(&p)] {
                    let bytes = form.shared_bytes(&p);
                    assert!(form.blocks * (bytes + 1024) <= 228 << 10, "{form:?} of {size} takes {bytes}");
                }
            }
        }
    }

    /// The redistributed registers must be those the block was given: 65,536 over its threads, in multiples of 8 per thread.
    #[test]
    fn registers_add_up_to_the_blocks_share() {
        for size in [64, 128, 256] {
            for mask in [Mask::Causal, Mask::TwoIntervals] {
                let p = problem(size, mask, 2048);
                for form in [BackwardConfig::keys(&p), BackwardConfig::queries(&p)] {
                    let share = 65536 / (form.threads() as usize * form.blocks) / 8 * 8;
                    let [compute, feed] = form.registers;
                    assert!(form.groups * compute + feed <= share * (form.groups + 1), "{form:?}");
                }
            }
        }
    }

    #[test]
    fn sums_of_dq_are_planned_only_where_they_pay() {
        let rows = statistics_bytes(&problem(64, Mask::Causal, 2048));
        assert_eq!(workspace(&problem(64, Mask::Causal, 2048)), rows + 4 * 8192 * 12 * 64);
        assert_eq!(workspace(&problem(256, Mask::Causal, 2048)), rows);
        assert!(workspace(&problem(64, Mask::Causal, 257)) < rows);
        let f32s = Problem { dtype: DType::F32, ..problem(64, Mask::Causal, 2048) };
        assert_eq!(workspace(&f32s), 0);
    }

    #[test]
    fn heads_of_a_group_go_side_by_side_where_they_divide() {
        let p = problem(64, Mask::Full, 100);
        assert_eq!((BackwardConfig::queries(&p).heads, heights(&p).q), (3, Some(64)));
        let even = Problem { heads: 8, ..p };
        assert_eq!((BackwardConfig::queries(&even).heads, heights(&even).q), (1, Some(192)));
        let large = Problem { heads: 8, size: 256, ..p };
        assert_eq!((BackwardConfig::queries(&large).heads, heights(&large).k), (2, Some(64)));
    }
}
