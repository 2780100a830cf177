//! Rows by index: gather, scatter-add and row replacement.
//!
//! A negative index is dropped; one past the last row is an error.
//!
//! The sum is deterministic: rows are sorted by destination, stably, and each destination row is summed by one task in f32 and
//! written once. Moves the index, the rows in, each touched row in and out.

use flatout_ir::target::Layout;
use flatout_ir::{Launch, OpKind, View};

use super::copy::row_copies;
use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::math::vectorised;
use crate::cpu::tensor::Tensor;
use crate::rows::{ANY_TYPE, FLOATS, kernel_row};

pub const KERNELS: &[Kernel] = &[
    Kernel { row: kernel_row("gather", OpKind::Gather, ANY_TYPE, Layout::Any), run: gather },
    Kernel { row: kernel_row("scatter_add", OpKind::ScatterAdd, FLOATS, Layout::Any), run: scatter_add },
    Kernel { row: kernel_row("row_scatter", OpKind::RowScatter, ANY_TYPE, Layout::Any), run: row_scatter },
];

/// The index, with every entry checked to be below `rows`.
fn checked(index: &Tensor<'_>, rows: usize) -> Result<Vec<i32>, String> {
    // SAFETY: an index is never an output of the launch.
    let index = unsafe { index.i32s() };
    match index.iter().position(|i| *i >= rows as i32) {
        Some(at) => Err(format!("index {} at place {at} is outside the {rows} rows", index[at])),
        None => Ok(index),
    }
}

/// Rows per task: about 16 KiB.
fn rows_a_task(width: usize) -> usize {
    (4096 / width.max(1)).max(1)
}

fn gather(_: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Some(out) = cx.output(0) else { return Ok(()) };
    let table = cx.input(0);
    let index = checked(&cx.input(1), table.dims[0])?;
    let width: usize = table.dims[1..].iter().product();
    if width == 0 {
        return Ok(());
    }
    let zero =
        View { offset: 0, dtype: out.dtype, dims: out.dims.to_vec(), strides: vec![0; out.dims.len()] };
    // SAFETY: every stride is 0, so only the first element is read, and nothing writes it.
    let zero = unsafe { Tensor::new((&raw const ZERO).cast_mut().cast(), &zero) };
    let n = rows_a_task(width);
    cx.parallel(index.len().div_ceil(n), 2 * n * width * out.dtype.bytes(), |task| {
        let rows = chunk(task, n, index.len());
        // SAFETY: the table is only read; a task writes only its own rows.
        unsafe {
            let found = rows.clone().filter(|&r| index[r] >= 0).map(|r| (index[r] as usize, r));
            row_copies(&table, &out, found);
            row_copies(&zero, &out, rows.filter(|&r| index[r] < 0).map(|r| (0, r)));
        }
    });
    Ok(())
}

/// Zero in every type, aligned for the widest.
static ZERO: u32 = 0;

fn row_scatter(_: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Some(out) = cx.output(0) else { return Ok(()) };
    let (base, rows) = (cx.input(0), cx.input(1));
    let index = checked(&cx.input(2), base.dims[0])?;
    if out.elements() == 0 {
        return Ok(());
    }
    // SAFETY: single-threaded; the rows overlap no output, and the base only if it is the output.
    unsafe {
        if !cx.is_in_place(0, 0) {
            row_copies(&base, &out, (0..base.dims[0]).map(|r| (r, r)));
        }
        row_copies(&rows, &out, (0..index.len()).filter(|&r| index[r] >= 0).map(|r| (r, index[r] as usize)));
    }
    Ok(())
}

vectorised! {
    fn add(x: &[f32], sum: &mut [f32]) {
        sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
    }
}

fn scatter_add(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Some(out) = cx.output(0) else { return Ok(()) };
    let count = out.dims[0];
    let index = checked(&cx.input(1), count)?;
    let base = (launch.ins.len() == 3).then(|| cx.input(2).rows());
    let is_in_place = base.is_some() && cx.is_in_place(2, 0);
    let (from, to) = (cx.input(0).rows(), out.rows());
    // A row of the first axis is `lines` rows of the last.
    let lines = to.count.checked_div(count).unwrap_or(0);
    let sorted = ByDestination::new(&index, count);
    let n = rows_a_task(lines * to.width);
    let bytes = 4 * lines * to.width * (n + index.len().div_ceil(count.max(1)));
    cx.parallel(count.div_ceil(n), bytes, |task| {
        let (mut sum, mut buffer) = (vec![0.0; to.width], vec![0.0; from.width]);
        for row in chunk(task, n, count) {
            let sources = sorted.sources(row);
            if sources.is_empty() && is_in_place {
                continue;
            }
            for line in 0..lines {
                let at = row * lines + line;
                // SAFETY: a destination row belongs to one task; it is read into `sum` before it is written.
                unsafe {
                    match &base {
                        Some(base) => base.load(at, 0, &mut sum),
                        None => sum.fill(0.0),
                    }
                    for &source in sources {
                        add(from.get(source as usize * lines + line, &mut buffer), &mut sum);
                    }
                    to.store(at, 0, &sum);
                }
            }
        }
    });
    Ok(())
}

/// The entries of an index sorted stably by destination.
struct ByDestination {
    starts: Vec<u32>,
    places: Vec<u32>,
}

impl ByDestination {
    fn new(index: &[i32], rows: usize) -> Self {
        let mut starts = vec![0_u32; rows + 1];
        for &i in index.iter().filter(|i| **i >= 0) {
            starts[i as usize + 1] += 1;
        }
        (0..rows).for_each(|r| starts[r + 1] += starts[r]);
        let mut next = starts.clone();
        let mut places = vec![0; starts[rows] as usize];
        for (place, &i) in index.iter().enumerate().filter(|(_, i)| **i >= 0) {
            places[next[i as usize] as usize] = place as u32;
            next[i as usize] += 1;
        }
        ByDestination { starts, places }
    }

    fn sources(&self, row: usize) -> &[u32] {
        &self.places[self.starts[row] as usize..self.starts[row + 1] as usize]
    }
}
