//! Rotary positions; the kernel is `rope.cu`.
//!
//! `rotation.cuh` holds the code that `qk_norm_rope.cu` shares with it.

use std::fmt::Write;

use flatout_ir::ops::frequency::Frequencies;
use flatout_ir::ops::rope::Pairs;
use flatout_ir::target::Layout;
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use crate::cuda::context::Kernel;
use crate::cuda::kernels::address::{Walk, most, widths};
use crate::cuda::kernels::stage::{
    Draft, Stage, Stages, Value, at, at_or_nothing, blocks, c_type, count32, staged,
};
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] =
    &[staged!(kernel_row("cuda.rope", OpKind::Rope, FLOATS, Layout::Rows), |l, _| stages(l))];

/// The rotation of the heads of a [T, H, K] tensor, shared by rope and the fused norm + rope.
pub(crate) struct Rotation<'a> {
    pub freq: Frequencies,
    pub axis_of_freq: &'a [u8],
    pub pairs: Pairs,
    pub positions: &'a View,
    pub table: Option<&'a View>,
}

/// Threads per head, and the share of each.
pub(crate) struct Cover {
    pub lanes: usize,
    /// Heads that share a thread's cosines.
    pub chunk: usize,
}

/// Registers in which a thread may keep heads.
#[derive(Clone, Copy)]
pub(crate) struct RegisterBudget {
    pub words: usize,
    /// The limit for all heads of a token, if the kernel supports heads of two weights in one thread.
    pub words_of_all: usize,
}

impl Rotation<'_> {
    /// The source for heads, and vectors of a head, that are read or written in `views`; a thread keeps heads of the first
    /// view. Heads from `first` have a different weight than those before.
    pub(crate) fn draft(
        &self,
        name: &'static str,
        views: &[&View],
        first: usize,
        budget: RegisterBudget,
    ) -> (Draft, Cover) {
        let half = self.axis_of_freq.len();
        let heads = views[0].dims[1];
        // Interleaved, VEC pairs are 2 VEC neighbours; in halves, VEC and VEC.
        let factor = if self.pairs == Pairs::Interleaved { 2 } else { 1 };
        let fits = |vec: &usize| {
            half.is_multiple_of(*vec)
                && views.iter().all(|v| {
                    let walk = Walk::of(v);
                    // The second half starts at K / 2, which must be equally aligned.
                    walk.takes(vec * factor, v.dtype, v.offset)
                        && (factor == 2
                            || (half * v.dtype.bytes()).is_multiple_of((vec * v.dtype.bytes()).min(16)))
                })
        };
        let vec = widths(most(views)).find(fits);
        // Without a suitable vector access, elements are read one by one.
        let (vec, pair) = vec.map_or((1, 1), |vec| (vec, 2 * vec));
        let lanes = half.div_ceil(vec).next_power_of_two().min(32);
        let turns = half.div_ceil(vec * lanes);
        let a_head = 2 * vec * turns * views[0].dtype.bytes() / 4;
        let divides = |c: &usize| heads.is_multiple_of(*c) && first.is_multiple_of(*c);
        let some = [4, 3, 2].into_iter().find(|c| divides(c) && c * a_head <= budget.words);
        // If weights divide the heads unevenly, a thread takes all heads of a token, to read its angles once.
        let all = (first > 0 && heads * a_head <= budget.words_of_all).then_some(heads);
        let chunk = some.or(all).unwrap_or(1);
        let mut draft = Draft::new(name)
            .define("HEADS", heads)
            .define("LANES", lanes)
            .define("TURNS", turns)
            .define("CHUNK", chunk);
        for (name, value) in self.defines(vec, pair) {
            draft = draft.define(name, value);
        }
        draft = draft.text(&self.constants());
        (draft, Cover { lanes, chunk })
    }

    /// The defines of `rotation.cuh` for a thread that holds `vec` neighbouring frequencies and reads `pair` elements of
    /// interleaved pairs at once.
    pub(crate) fn defines(&self, vec: usize, pair: usize) -> [(&'static str, String); 9] {
        let half = self.axis_of_freq.len();
        let axes = self.axis_of_freq.iter().max().map_or(1, |a| *a as usize + 1);
        // A table row is read as vectors if frequencies are contiguous; 0 reads word by word.
        let table_vec = self.table.map_or(0, |t| {
            let whole = Walk::of(t);
            let side_by_side = |n: &usize| whole.takes(2 * n, t.dtype, t.offset) && half.is_multiple_of(*n);
            widths(vec).find(side_by_side).unwrap_or(0)
        });
        let table_vec = if self.table.is_some_and(|t| t.strides[1] != 2 && half > 1) { 0 } else { table_vec };
        [
            ("HALF", half.to_string()),
            ("VEC", vec.to_string()),
            ("PAIR", pair.to_string()),
            ("AXES", axes.to_string()),
            ("TABLE_VEC", table_vec.to_string()),
            ("TABLE", (self.table.is_some() as u8).to_string()),
            ("AMPLITUDE", format!("{:e}f", self.freq.amplitude())),
            ("T_TABLE", c_type(self.table.map_or(DType::F32, |t| t.dtype)).into()),
            ("INTERLEAVED", ((self.pairs == Pairs::Interleaved) as u8).to_string()),
        ]
    }

    /// The frequencies in half turns per position, their axes, and the address functions of positions and table.
    pub(crate) fn constants(&self) -> String {
        let half = self.axis_of_freq.len();
        let mut text = format!("__constant__ double FREQUENCIES[{half}] = {{");
        let turns = self.freq.turns(half);
        turns.iter().for_each(|turn| _ = write!(text, "{:e}, ", turn / std::f64::consts::PI));
        _ = write!(text, "}};\n__constant__ unsigned char AXIS[{half}] = {{");
        self.axis_of_freq.iter().for_each(|axis| _ = write!(text, "{axis}, "));
        text.push_str("};\n");
        let positions = Walk::new(&self.positions.dims[..1], &self.positions.strides[..1]);
        text.push_str(&positions.function("position_at", "u32"));
        if let Some(table) = self.table {
            let (row, column) = (table.strides[0], table.strides[1]);
            _ = writeln!(
                text,
                "__device__ __forceinline__ i64 table_at(int p, int f) {{ return (i64)p * {row} + (i64)f * {column}; }}"
            );
        }
        text
    }

    pub(crate) fn table_rows(&self) -> Value {
        Value::I32(self.table.map_or(0, |t| i32::try_from(t.dims[0]).unwrap_or(i32::MAX)))
    }
}

/// The address function of head h of a [T, H, K] tensor.
pub(crate) fn head_function(view: &View, name: &str) -> String {
    Walk::rows(view).function(name, "u32")
}

pub(crate) fn heads_of(view: &View) -> usize {
    view.dims[0] * view.dims[1]
}

fn stages(launch: &Launch) -> Stages {
    let Op::Rope { freq, ref axis_of_freq, pairs, inverse, table } = launch.op else {
        unreachable!("the row is for rope")
    };
    let (x, positions) = (&launch.ins[0], &launch.ins[1]);
    let Some(y) = &launch.outs[0] else { return Ok(vec![]) };
    let heads = heads_of(x);
    if x.elements() == 0 {
        return Ok(vec![]);
    }
    let rotation = Rotation { freq, axis_of_freq, pairs, positions, table: table.then(|| &launch.ins[2]) };
    let (draft, cover) = rotation.draft("rope.cu", &[x, y], 0, RegisterBudget { words: 32, words_of_all: 0 });
    let source = draft
        .dtype("T_X", x.dtype)
        .flag("INVERSE", inverse)
        .text(&head_function(x, "head_x"))
        .text(&head_function(y, "head_y"))
        .source(concat!(include_str!("rotation.cuh"), include_str!("rope.cu")));
    count32("heads", heads)?;
    Ok(vec![Stage {
        source,
        entry: "rope",
        grid: [blocks(heads, 256 / cover.lanes * cover.chunk)?, 1],
        block: 256,
        args: vec![
            at(x),
            at(positions),
            at_or_nothing(rotation.table),
            at(y),
            Value::I64(heads as i64),
            rotation.table_rows(),
        ],
    }])
}
