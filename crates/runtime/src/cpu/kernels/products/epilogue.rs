//! A product's epilogue, row by row, from the f32 accumulation of the product.

use flatout_ir::ops::epilogue::Epilogue;

use super::product::in_row_tasks;
use crate::cpu::context::Context;
use crate::cpu::kernels::reductions::reduce::Shared;
use crate::cpu::math::{self, vectorised};
use crate::cpu::tensor::Tensor;

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

/// Takes the product from `at` or, if it was widened, from its dense f32 copy, and writes the launch's outputs.
pub(super) fn finish(epilogue: Epilogue, at: &Tensor<'_>, copy: Option<Shared>, cx: &Context<'_>) {
    let product = at.rows();
    let width = product.width;
    let mut bias = vec![0.0; if epilogue.has_bias() { width } else { 0 }];
    if epilogue.has_bias() {
        // SAFETY: the bias has as many elements as the product has columns, and nothing writes it.
        unsafe { cx.input(2).rows().load(0, 0, &mut bias) };
    }
    let slope_at = (epilogue == Epilogue::GeluGrad).then(|| cx.input(2).rows());
    let y = cx.output(0).map(|y| y.rows());
    let h = if epilogue.has_gelu() { cx.output(1).map(|h| h.rows()) } else { None };
    in_row_tasks(&product, cx, |row, x| {
        // SAFETY: a row of the product, its copy and each output belongs to one task; memory that is read is not written.
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
