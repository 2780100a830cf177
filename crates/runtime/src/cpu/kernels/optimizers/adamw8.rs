//! AdamW with 8-bit moments, in one pass.
//!
//! A block of 256 is decoded, updated, rounded stochastically and encoded. Moves 10 bytes in and 6 out per element, 8 with the
//! bf16 copy, and 16 per block for both scales.

use flatout_ir::block8::{BLOCK, Code};
use flatout_ir::target::Layout;
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind};

use super::adamw::{Update, draw, first_number, update};
use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::math::vectorised;
use crate::cpu::tensor::{Tensor, store};
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] =
    &[Kernel { row: kernel_row("adamw8", OpKind::AdamW8, &[DType::F32], Layout::Dense), run }];

/// A block of a moment: its codes, scale and values.
#[derive(Clone)]
struct Moment {
    codes: [u8; BLOCK],
    scale: f32,
    values: [f32; BLOCK],
}

impl Moment {
    const EMPTY: Moment = Moment { codes: [0; BLOCK], scale: 0.0, values: [0.0; BLOCK] };
}

vectorised! {
    fn decode(m: &mut Moment, v: &mut Moment) {
        for (value, code) in m.values.iter_mut().zip(&m.codes) {
            *value = Code::Signed.decode(*code) * m.scale;
        }
        for (value, code) in v.values.iter_mut().zip(&v.codes) {
            *value = Code::Unsigned.decode(*code) * v.scale;
        }
    }
    fn encode(words: &[u32], m: &mut Moment, v: &mut Moment) {
        let inverse;
        [m.scale, inverse] = Code::scale(largest(&m.values));
        for ((code, x), word) in m.codes.iter_mut().zip(&m.values).zip(words) {
            *code = Code::Signed.drawn(*x, inverse, *word as u16);
        }
        let inverse;
        [v.scale, inverse] = Code::scale(largest(&v.values));
        for ((code, x), word) in v.codes.iter_mut().zip(&v.values).zip(words) {
            *code = Code::Unsigned.drawn(*x, inverse, (*word >> 16) as u16);
        }
    }
}

/// The largest magnitude, compared by bits, which have the order of magnitudes.
#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    f32::from_bits(values.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7fff_ffff)))
}

const BLOCKS_A_TASK: usize = 16;

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::AdamW8 { beta1, beta2, eps, weight_decay, lr_scale, copy, first } = launch.op else {
        unreachable!("the row is for adamw8")
    };
    // SAFETY: the four scalars overlap no output.
    let [lr, scale, updates, is_finite] = std::array::from_fn(|i| unsafe { cx.input(6 + i).scalar() });
    let constants = Update::new([beta1, beta2, eps, weight_decay, lr_scale], [lr, scale, updates]);
    let ins: [Tensor<'_>; 6] = std::array::from_fn(|i| cx.input(i));
    let [p_out, m_out, v_out, m_scale_out, v_scale_out] = std::array::from_fn(|i| cx.output(i));
    let p_copy = copy.then(|| cx.output(5)).flatten();
    let count = ins[0].elements();
    let blocks = count.div_ceil(BLOCK);
    let first = first_number(first, 10, launch, cx);
    cx.parallel(blocks.div_ceil(BLOCKS_A_TASK), BLOCKS_A_TASK * BLOCK * 18, |task| {
        let (mut p, mut g) = ([0.0; BLOCK], [0.0; BLOCK]);
        let (mut m, mut v) = (Moment::EMPTY, Moment::EMPTY);
        let mut words = [[0; 4]; BLOCK / 4];
        for b in chunk(task, BLOCKS_A_TASK, blocks) {
            let start = b * BLOCK;
            let n = BLOCK.min(count - start);
            // Past the last element of a short block: zeros, which stay zeros and never are the largest.
            p[n..].fill(0.0);
            g[n..].fill(0.0);
            m.codes[n..].fill(0);
            v.codes[n..].fill(0);
            // SAFETY: every tensor is dense, a block belongs to one task, and its content is read before it is written.
            unsafe {
                read(&ins[0], start, &mut p[..n]);
                read(&ins[1], start, &mut g[..n]);
                read(&ins[2], start, &mut m.codes[..n]);
                read(&ins[3], start, &mut v.codes[..n]);
                read(&ins[4], b, std::slice::from_mut(&mut m.scale));
                read(&ins[5], b, std::slice::from_mut(&mut v.scale));
            }
            if is_finite != 0.0 {
                decode(&mut m, &mut v);
                update(constants, &mut p, &g, &mut m.values, &mut v.values);
                draw((first + start as u64) / 4, updates as u32, &mut words);
                encode(words.as_flattened(), &mut m, &mut v);
            }
            // SAFETY: as above.
            unsafe {
                write(&p_out, start, &p[..n]);
                write(&m_out, start, &m.codes[..n]);
                write(&v_out, start, &v.codes[..n]);
                write(&m_scale_out, b, &[m.scale]);
                write(&v_scale_out, b, &[v.scale]);
                if let Some(to) = &p_copy {
                    store(to.dtype, to.at(start), 1, &p[..n]);
                }
            }
        }
    });
    Ok(())
}

/// Reads elements of a dense tensor from element `start`.
///
/// # Safety
/// The tensors' contract; `T` has the size of the tensor's elements.
unsafe fn read<T: Copy>(from: &Tensor<'_>, start: usize, to: &mut [T]) {
    debug_assert_eq!(from.dtype.bytes(), size_of::<T>());
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(from.at(start).cast(), to.as_mut_ptr(), to.len()) }
}

/// Writes elements of a dense tensor, if there is one, from element `start`.
///
/// # Safety
/// As for `read`.
unsafe fn write<T: Copy>(to: &Option<Tensor<'_>>, start: usize, values: &[T]) {
    let Some(to) = to else { return };
    debug_assert_eq!(to.dtype.bytes(), size_of::<T>());
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), to.at(start).cast(), values.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::random::normal;

    /// Blocks of second moments whose gradients are noise with magnitudes that differ a hundredfold, over several times the
    /// horizon of beta 0.999: no bias, and their roots off by 8%.
    #[test]
    fn slow_second_moments_follow_f32() {
        let constants = Update::new([0.9, 0.999, 1e-8, 0.0, 1.0], [0.0, 1.0, 1.0]);
        let steps = 4000;
        let (mut ratios, mut squares, mut count) = (0.0, 0.0, 0.0);
        for block in 0..8 {
            let size: Vec<f32> = (0..BLOCK).map(|i| normal(block, 1, i as u64).exp()).collect();
            let (mut p, mut m, mut v) = ([0.0; BLOCK], Moment::EMPTY, Moment::EMPTY);
            let (mut full_m, mut full_v) = ([0.0; BLOCK], [0.0; BLOCK]);
            let mut words = [[0; 4]; BLOCK / 4];
            for t in 0..steps {
                let draw_of = |i: usize| normal(block + 100, t, i as u64);
                let g: [f32; BLOCK] = std::array::from_fn(|i| size[i] * draw_of(i));
                update(constants, &mut p, &g, &mut full_m, &mut full_v);
                decode(&mut m, &mut v);
                update(constants, &mut p, &g, &mut m.values, &mut v.values);
                draw(block * 64, t as u32, &mut words);
                encode(words.as_flattened(), &mut m, &mut v);
            }
            decode(&mut m, &mut v);
            for (got, full) in v.values.iter().zip(&full_v) {
                let ratio = (*got / *full) as f64;
                (ratios, squares, count) =
                    (ratios + ratio, squares + (ratio.sqrt() - 1.0).powi(2), count + 1.0);
            }
        }
        let (bias, spread) = (ratios / count - 1.0, (squares / count).sqrt());
        println!("second moments: biased by {bias:.4}, roots off by {spread:.3}");
        assert!(bias.abs() < 0.02, "{bias}");
        assert!(spread < 0.1, "{spread}");
    }
}
