//! What a product's result goes through before it is stored: row by row, from f32 where the product was summed.

use flatout_ir::ops::epilogue::Epilogue;

use super::context::{Context, chunk};
use super::math::{self, vectorised};
use super::product::in_row_tasks;
use super::reduce::Shared;
use super::tensor::Tensor;

vectorised! {
    fn add(x: &mut [f32], bias: &[f32]) {
        x.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
    }
    fn gelu(x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = math::gelu(*x));
    }
    fn relu(x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = x.max(0.0));
    }
    fn times_slope(x: &mut [f32], h: &[f32]) {
        x.iter_mut().zip(h).for_each(|(x, h)| *x *= math::gelu_slope(*h));
    }
}

/// From the product, which lies in `at` or, wider, in its dense f32 copy, to the launch's outputs.
pub(super) fn finish(epilogue: Epilogue, at: &Tensor<'_>, copy: Option<Shared>, cx: &Context<'_>) {
    let product = at.rows();
    let width = product.width;
    let mut bias = vec![0.0; if epilogue.has_bias() { width } else { 0 }];
    if epilogue.has_bias() {
        // SAFETY: the bias has a column of the product's elements, and nobody writes it.
        unsafe { cx.input(2).rows().load(0, 0, &mut bias) };
    }
    let slope_at = (epilogue == Epilogue::GeluGrad).then(|| cx.input(2).rows());
    let y = cx.output(0).map(|y| y.rows());
    let h = if epilogue.has_gelu() { cx.output(1).map(|h| h.rows()) } else { None };
    in_row_tasks(&product, cx, |row, x| {
        // SAFETY: a row of the product, its copy and each output belongs to one task; what is read is not written.
        unsafe {
            match copy {
                Some(copy) => x.copy_from_slice(copy.slice(row * width..(row + 1) * width)),
                None => product.load(row, 0, x),
            }
            add(x, &bias);
            if let Some(h) = &h {
                h.store(row, 0, x);
            }
            if epilogue.has_gelu() {
                gelu(x);
            }
            if epilogue == Epilogue::Relu {
                relu(x);
            }
            if let Some(slope_at) = &slope_at {
                let mut buffer = vec![0.0; width];
                times_slope(x, slope_at.get(row, &mut buffer));
            }
            if let Some(y) = &y {
                y.store(row, 0, x);
            }
        }
    });
}

/// Columns a task sums.
const COLUMNS: usize = 64;

/// The sum over k of a [M, K], stored transposed where said; in f64, in the order of k.
pub(super) fn sum(a: &Tensor<'_>, transposed: bool, sums: &Tensor<'_>, cx: &Context<'_>) {
    let (rows, to) = (a.rows(), sums.rows());
    let (m, k) = if transposed { (rows.width, rows.count) } else { (rows.count, rows.width) };
    cx.parallel(m.div_ceil(COLUMNS), 8 * COLUMNS * k, |task| {
        let mine = chunk(task, COLUMNS, m);
        let mut totals = vec![0.0_f64; mine.len()];
        let mut line = vec![0.0; if transposed { mine.len() } else { k }];
        // SAFETY: the input is only read; the task's sums are its own.
        unsafe {
            if transposed {
                for l in 0..k {
                    rows.load(l, mine.start, &mut line);
                    totals.iter_mut().zip(&line).for_each(|(total, x)| *total += *x as f64);
                }
            } else {
                for (total, i) in totals.iter_mut().zip(mine.clone()) {
                    rows.load(i, 0, &mut line);
                    *total = line.iter().map(|x| *x as f64).sum();
                }
            }
            let totals: Vec<f32> = totals.iter().map(|x| *x as f32).collect();
            to.store(0, mine.start, &totals);
        }
    });
}
