//! Rows by index: gather, deterministic scatter-add and row replacement; the kernel is `index.cu`.

use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, OpKind, View};

use super::copy;
use crate::cuda::context::Kernel;
use crate::cuda::kernels::address::{Walk, most, widths};
use crate::cuda::kernels::stage::{
    Draft, Stage, Stages, Value, at, at_or_nothing, blocks, c_bits, count32, staged,
};
use crate::rows::{ANY_TYPE, FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[
    staged!(kernel_row("cuda.gather", OpKind::Gather, ANY_TYPE, Layout::Rows), |l, _| gather(l)),
    staged!(
        KernelRow {
            workspace: |s| Scratch::new(s.ins[0].dims[0], s.ins[0].elements(), s.outs[0].dims[0]).bytes,
            ..kernel_row("cuda.scatter_add", OpKind::ScatterAdd, FLOATS, Layout::Rows)
        },
        |l, _| scatter_add(l)
    ),
    staged!(
        KernelRow {
            workspace: winners,
            ..kernel_row("cuda.row_scatter", OpKind::RowScatter, ANY_TYPE, Layout::Rows)
        },
        |l, _| row_scatter(l)
    ),
];

/// Elements per thread of rows whose inner axes the views share.
fn vector(views: &[&View], width: usize) -> usize {
    let fits = |n: &usize| {
        let takes = |v: &&View| {
            let access = (n * v.dtype.bytes()).min(16);
            // The row's own stride must preserve the alignment too.
            Walk::inner(v).takes(*n, v.dtype, v.offset)
                && (v.strides[0] * v.dtype.bytes()).is_multiple_of(access)
        };
        *n == 1 || (width.is_multiple_of(*n) && views.iter().all(takes))
    };
    widths(most(views)).find(fits).unwrap_or(1)
}

fn row_elements(view: &View) -> usize {
    view.dims[1..].iter().product()
}

/// The mark for rows with an index past the last: NaN, or the smallest integer.
fn mark(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "0x7fc0",
        DType::I32 => "0x80000000u",
        _ => "0x7fc00000u",
    }
}

fn gather(launch: &Launch) -> Stages {
    let (table, index) = (&launch.ins[0], &launch.ins[1]);
    let Some(out) = &launch.outs[0] else { return Ok(vec![]) };
    let (count, width) = (out.elements(), row_elements(out));
    if count == 0 {
        return Ok(vec![]);
    }
    let vec = vector(&[table, out], width);
    let source = Draft::new("index.cu")
        .flag("GATHER", true)
        .define("VEC", vec)
        .define("WIDTH", width)
        .define("T_X", c_bits(table.dtype))
        .define("MARK", mark(table.dtype))
        .define("ROW_TABLE", table.strides[0])
        .define("ROW_OUT", out.strides[0])
        .text(&Walk::inner(table).function("inner_table", "u32"))
        .text(&Walk::inner(out).function("inner_out", "u32"))
        .source(include_str!("index.cu"));
    Ok(vec![Stage {
        source,
        entry: "gather",
        grid: [blocks(count, 256 * vec)?, 1],
        block: 256,
        args: vec![at(table), at(index), at(out), Value::I64(count as i64), count32("rows", table.dims[0])?],
    }])
}

/// Up to this many rows check for later ones with the same destination themselves, in one launch.
const FEW: usize = 256;

/// One integer per row of the base, if many rows are replaced.
fn winners(shapes: &Shapes<'_>) -> usize {
    if shapes.ins[1].dims[0] <= FEW { 0 } else { shapes.ins[0].dims[0] * 4 }
}

fn row_scatter(launch: &Launch) -> Stages {
    let (base, from, index) = (&launch.ins[0], &launch.ins[1], &launch.ins[2]);
    let Some(out) = &launch.outs[0] else { return Ok(vec![]) };
    let mut stages = if base.offset == out.offset { vec![] } else { copy::copy(base, out)? };
    let (count, n, rows, width) = (from.elements(), from.dims[0], base.dims[0], row_elements(from));
    if count == 0 || rows == 0 {
        return Ok(stages);
    }
    let vec = vector(&[from, out], width);
    let source = Draft::new("index.cu")
        .flag("GATHER", false)
        .flag("ROW_SCATTER", true)
        .define("VEC", vec)
        .define("WIDTH", width)
        .define("T_X", c_bits(base.dtype))
        .define("ROW_FROM", from.strides[0])
        .define("ROW_OUT", out.strides[0])
        .text(&Walk::inner(from).function("inner_from", "u32"))
        .text(&Walk::inner(out).function("inner_out", "u32"))
        .source(include_str!("index.cu"));
    let (n_value, rows_value) = (count32("rows", n)?, count32("rows", rows)?);
    let mut push = |entry, items, args| {
        let grid = [blocks(items, 256)?, 1];
        stages.push(Stage { source: source.clone(), entry, grid, block: 256, args });
        Ok(())
    };
    let Some(winner) = launch.workspace.as_ref().filter(|_| n > FEW) else {
        let args = vec![at(from), at(index), at(out), Value::I64(count as i64), n_value, rows_value];
        push("row_scatter_few", count / vec, args)?;
        return Ok(stages);
    };
    push("unclaimed", rows, vec![at(winner), rows_value])?;
    push("claim", n, vec![at(index), at(winner), n_value, rows_value])?;
    let args = vec![at(from), at(index), at(winner), at(out), Value::I64(count as i64), rows_value];
    push("row_scatter", count / vec, args)?;
    Ok(stages)
}

/// Rows sorted per block, and sorted rows added per block: as in `index.cu`.
const TILE: usize = 2048;
const PIECE: usize = 32;

/// The workspace of scatter-add: offsets in bytes.
struct Scratch {
    /// Keys and row numbers, double-buffered: a pass reads one pair and writes the other.
    keys: [usize; 2],
    places: [usize; 2],
    counts: usize,
    partial: usize,
    bytes: usize,
    tiles: usize,
    /// Number of 8-bit digits for all destinations and the one past the last.
    passes: usize,
}

impl Scratch {
    fn new(n: usize, elements: usize, rows: usize) -> Scratch {
        let mut end = 0;
        let mut take = |bytes: usize| {
            let start = end;
            end = (end + bytes).next_multiple_of(256);
            start
        };
        let tiles = n.div_ceil(TILE);
        let bits = usize::BITS - rows.leading_zeros();
        let (keys, places) = ([take(4 * n), take(4 * n)], [take(4 * n), take(4 * n)]);
        let counts = take(4 * 256 * tiles);
        let partial = take(2 * n.div_ceil(PIECE) * elements.checked_div(n).unwrap_or(0) * 4);
        Scratch { keys, places, counts, partial, bytes: end, tiles, passes: bits.div_ceil(8).max(1) as usize }
    }
}

fn scatter_add(launch: &Launch) -> Stages {
    let (x, index) = (&launch.ins[0], &launch.ins[1]);
    let base = launch.ins.get(2);
    let Some(out) = &launch.outs[0] else { return Ok(vec![]) };
    let (n, rows, width) = (x.dims[0], out.dims[0], row_elements(out));
    if out.elements() == 0 {
        return Ok(vec![]);
    }
    let views: Vec<&View> = [Some(x), base, Some(out)].into_iter().flatten().collect();
    let vec = vector(&views, width);
    let block = width.div_ceil(vec).next_multiple_of(32).min(256);
    let base_type = base.map_or(DType::F32, |b| b.dtype);
    let mut draft = Draft::new("index.cu")
        .flag("GATHER", false)
        .flag("ROW_SCATTER", false)
        .define("VEC", vec)
        .define("WIDTH", width)
        .define("BLOCK", block)
        .flag("BASE", base.is_some())
        .dtype("T_X", x.dtype)
        .dtype("T_BASE", base_type)
        .dtype("T_OUT", out.dtype);
    for (name, view) in [("x", Some(x)), ("base", base), ("out", Some(out))] {
        let Some(view) = view else { continue };
        draft = draft
            .define(&format!("ROW_{}", name.to_uppercase()), view.strides[0])
            .text(&Walk::inner(view).function(&format!("inner_{name}"), "u32"));
    }
    let source = draft.source(include_str!("index.cu"));
    let scratch = Scratch::new(n, x.elements(), rows);
    let start = launch.workspace.as_ref().map_or(0, |view| view.offset);
    let place = |offset: usize| Value::At(start + offset);
    let (n_value, rows_value) = (count32("rows", n)?, count32("rows", rows)?);
    let mut stages = vec![];
    let mut push = |entry, grid: [usize; 2], block: usize, args| {
        let (grid, block) = ([blocks(grid[0], 1)?, blocks(grid[1], 1)?], block as u32);
        stages.push(Stage { source: source.clone(), entry, grid, block, args });
        Ok(())
    };
    let sorted = scratch.passes % 2;
    let columns = width.div_ceil(vec * block);
    let (keys, places) = (place(scratch.keys[sorted]), place(scratch.places[sorted]));
    if n > 0 {
        for pass in 0..scratch.passes {
            let (from, to) = (pass % 2, (pass + 1) % 2);
            let shift = Value::I32(8 * pass as i32);
            let (keys, counts) = (place(scratch.keys[from]), place(scratch.counts));
            let args = vec![at(index), keys, counts, n_value, rows_value, shift];
            push("digits", [scratch.tiles, 1], 256, args)?;
            let entries = count32("counts", 256 * scratch.tiles)?;
            push("starts_of_digits", [1, 1], 1024, vec![counts, entries])?;
            let (from, keys_to, places_to) =
                (place(scratch.places[from]), place(scratch.keys[to]), place(scratch.places[to]));
            let args = vec![at(index), keys, from, counts, keys_to, places_to, n_value, rows_value, shift];
            push("place", [scratch.tiles, 1], 256, args)?;
        }
        let (base, partial) = (at_or_nothing(base), place(scratch.partial));
        let grid = [n.div_ceil(PIECE), columns];
        let args = vec![at(x), keys, places, base, at(out), partial, n_value, rows_value];
        push("sum_pieces", grid, block, args)?;
        push("join_pieces", grid, block, vec![keys, base, at(out), partial, n_value, rows_value])?;
    }
    if base.is_none_or(|base| base.offset != out.offset) {
        let args = vec![keys, at_or_nothing(base), at(out), n_value, rows_value];
        push("untouched", [rows.div_ceil(8), 1], 256, args)?;
    }
    Ok(stages)
}
