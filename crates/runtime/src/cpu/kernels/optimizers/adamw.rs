//! AdamW in one pass over parameter, gradient and moments.
//!
//! Moves 16 bytes in and 12 out per element, 14 with the bf16 copy; 4 bytes fewer each way with moments in bf16, which are
//! rounded stochastically by the bits of `random::rounding`.

use flatout_ir::random::rounding;
use flatout_ir::target::Layout;
use flatout_ir::types::{DType, bf16_drawn, bf16_to_f32};
use flatout_ir::{Launch, Op, OpKind, View};

use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::kernels::elementwise::map::Tiles;
use crate::cpu::math::vectorised;
use crate::rows::{FLOATS, kernel_row};

pub const KERNELS: &[Kernel] =
    &[Kernel { row: kernel_row("adamw", OpKind::AdamW, FLOATS, Layout::Any), run }];

/// The constants of one update.
#[derive(Clone, Copy)]
pub(super) struct Update {
    scale: f32,
    lr: f32,
    beta1: f32,
    beta2: f32,
    /// 1 / (1 - beta1^t) and 1 / (1 - beta2^t).
    first: f32,
    second: f32,
    eps: f32,
    weight_decay: f32,
}

impl Update {
    /// From the operation's constants (beta1, beta2, eps, weight decay, lr scale) and its scalar inputs: lr, scale, updates.
    pub(super) fn new(
        [beta1, beta2, eps, weight_decay, lr_scale]: [f32; 5],
        [lr, scale, updates]: [f32; 3],
    ) -> Self {
        // In f64: at beta 0.999 an f32 power loses four digits of 1 - beta^t in the first steps.
        let correction = |beta: f32| (1.0 / (1.0 - (beta as f64).powf(updates as f64))) as f32;
        let (first, second) = (correction(beta1), correction(beta2));
        Update { scale, lr: lr * lr_scale, beta1, beta2, first, second, eps, weight_decay }
    }
}

vectorised! {
    pub(super) fn update(u: Update, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
        let (rest1, rest2) = (1.0 - u.beta1, 1.0 - u.beta2);
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * u.scale;
            *m = u.beta1.mul_add(*m, rest1 * g);
            *v = u.beta2.mul_add(*v, rest2 * g * g);
            let step = *m * u.first / ((*v * u.second).sqrt() + u.eps);
            *p -= u.lr * u.weight_decay.mul_add(*p, step);
        }
    }
}

/// Draws for a tile whose first element need not be the first of a group of four.
const DRAWS: usize = Tiles::LEN + 8;

vectorised! {
    /// The draws of elements from 4 `block`.
    pub(super) fn draw(block: u64, updates: u32, words: &mut [[u32; 4]]) {
        for (i, words) in words.iter_mut().enumerate() {
            *words = rounding(block + i as u64, updates);
        }
    }
    /// Rounds moments to bf16 values.
    fn round(words: &[u32], m: &mut [f32], v: &mut [f32]) {
        for ((m, v), word) in m.iter_mut().zip(v).zip(words) {
            *m = bf16_to_f32(bf16_drawn(*m, *word as u16));
            *v = bf16_to_f32(bf16_drawn(*v, (*word >> 16) as u16));
        }
    }
}

/// The number of the first element. If the input after `others` gives the rank, its elements follow those of all lower ranks.
pub(super) fn first_number(first: u64, others: usize, launch: &Launch, cx: &Context<'_>) -> u64 {
    // SAFETY: the only element of an i32 input, which overlaps no output.
    let rank = launch.ins.get(others).map_or(0, |_| unsafe { *cx.input(others).at(0).cast::<i32>() });
    first + rank as u64 * launch.ins[0].elements() as u64
}

const TILES_A_TASK: usize = 4;
const TILE_BYTES: usize = 7 * 4096;

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy, first } = launch.op else {
        unreachable!("the row is for adamw")
    };
    // SAFETY: the four scalars overlap no output.
    let [lr, scale, updates, is_finite] = std::array::from_fn(|i| unsafe { cx.input(4 + i).scalar() });
    let constants = Update::new([beta1, beta2, eps, weight_decay, lr_scale], [lr, scale, updates]);
    let outs = [cx.output(0), cx.output(1), cx.output(2), copy.then(|| cx.output(3)).flatten()];
    let [p, g, m, v] = std::array::from_fn(|i| cx.input(i));
    let views: Vec<&View> = launch.ins[..4].iter().chain(launch.outs.iter().flatten()).collect();
    let tiles = Tiles::new(&views);
    let count = tiles.count();
    let is_drawn = m.dtype == DType::BF16;
    let number = first_number(first, 8, launch, cx);
    cx.parallel(count.div_ceil(TILES_A_TASK), TILES_A_TASK * TILE_BYTES, |task| {
        let mut buffers: [Vec<f32>; 4] = std::array::from_fn(|_| vec![0.0; Tiles::LEN]);
        let mut words = vec![[0; 4]; if is_drawn { DRAWS / 4 } else { 0 }];
        for t in chunk(task, TILES_A_TASK, count) {
            let tile = tiles.tile(t);
            let [p_now, g_now, m_now, v_now] = buffers.each_mut().map(|buffer| &mut buffer[..tile.len()]);
            // SAFETY: a tile belongs to one task, and all inputs are read before an output is written.
            unsafe {
                tiles.load(0, &p, &tile, p_now);
                tiles.load(1, &g, &tile, g_now);
                tiles.load(2, &m, &tile, m_now);
                tiles.load(3, &v, &tile, v_now);
                if is_finite != 0.0 {
                    update(constants, p_now, g_now, m_now, v_now);
                    if is_drawn {
                        let first = number + tiles.first(&tile) as u64;
                        let skip = (first % 4) as usize;
                        let blocks = (skip + tile.len()).div_ceil(4);
                        draw(first / 4, updates as u32, &mut words[..blocks]);
                        round(&words.as_flattened()[skip..], m_now, v_now);
                    }
                }
                let values = [&*p_now, &*m_now, &*v_now, &*p_now];
                let wanted =
                    outs.iter().zip(values).filter_map(|(out, values)| Some((out.as_ref()?, values)));
                for (operand, (out, values)) in wanted.enumerate() {
                    tiles.store(4 + operand, out, &tile, values);
                }
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::types::bf16_from_f32;

    const COUNT: usize = 1024;

    /// Rounds as update number `updates` does.
    fn rounded(updates: u32, m: &mut [f32], v: &mut [f32]) {
        let mut words = [[0; 4]; COUNT / 4];
        draw(0, updates, &mut words);
        round(words.as_flattened(), m, v);
    }

    fn mean(values: &[f32]) -> f64 {
        values.iter().map(|x| *x as f64).sum::<f64>() / values.len() as f64
    }

    /// Over many draws the mean equals the value, for either moment and on both sides of zero.
    #[test]
    fn rounding_at_random_has_no_bias() {
        for x in [1.003_f32, -0.777, 3.1e-20, -1.0001] {
            let (mut sums, updates) = ([0.0; 2], 256);
            for t in 0..updates {
                let (mut m, mut v) = (vec![x; COUNT], vec![x; COUNT]);
                rounded(t, &mut m, &mut v);
                let near = |y: &f32| ((y - x) / x).abs() < 1.0 / 128.0;
                assert!(m.iter().chain(&v).all(near), "within a step of {x}");
                sums = [sums[0] + mean(&m), sums[1] + mean(&v)];
            }
            for sum in sums {
                let off = (sum / updates as f64 / x as f64 - 1.0).abs();
                // A step is at most 2^-7; 262,144 draws leave a standard deviation of 2^-8 / 512 = 8e-6.
                assert!(off < 4e-5, "{x} is off by {off:.1e}");
            }
        }
    }

    /// Increments below half a step accumulate as in f32, whereas rounding to nearest would lose them.
    #[test]
    fn small_increments_are_not_lost() {
        let constants = Update::new([0.9, 0.999, 1e-8, 0.0, 1.0], [0.0, 1.0, 1.0]);
        let (mut p, g) = (vec![0.0; COUNT], vec![1.5_f32.sqrt(); COUNT]);
        let (mut m, mut v) = ([(); 3].map(|()| vec![1.0; COUNT]), [(); 3].map(|()| vec![1.0; COUNT]));
        for t in 1..=1000 {
            for (how, (m, v)) in m.iter_mut().zip(&mut v).enumerate() {
                update(constants, &mut p, &g, m, v);
                match how {
                    0 => {}
                    1 => rounded(t, m, v),
                    _ => v.iter_mut().for_each(|v| *v = bf16_to_f32(bf16_from_f32(*v))),
                }
            }
        }
        let [full, drawn, nearest] = v.map(|v| mean(&v));
        assert!((full - 1.316).abs() < 1e-3, "{full}");
        assert!((drawn / full - 1.0).abs() < 2e-3, "{drawn} for {full}");
        assert_eq!(nearest, 1.0);
    }
}
