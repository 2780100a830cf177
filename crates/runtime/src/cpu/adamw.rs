//! AdamW in one pass over parameter, gradient and moments: 16 bytes in and 12 out an element, 14 with the bf16 copy.

use flatout_ir::target::{KernelRow, Layout, no_workspace};
use flatout_ir::{Launch, Op, OpKind, View};

use super::context::{Context, chunk};
use super::elementwise::Tiles;
use super::math::vectorised;
use super::{FLOATS, Kernel};

pub const KERNELS: &[Kernel] = &[Kernel {
    row: KernelRow {
        name: "adamw",
        op: OpKind::AdamW,
        dtypes: FLOATS,
        ins: Layout::Any,
        outs: Layout::Any,
        in_place: &[(0, 0), (2, 1), (3, 2), (1, 0), (1, 1), (1, 2)],
        workspace: no_workspace,
        deterministic: true,
    },
    run,
}];

/// The constants of one update.
#[derive(Clone, Copy)]
struct Update {
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

vectorised! {
    fn update(u: Update, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
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

const TILES_A_TASK: usize = 4;
const TILE_BYTES: usize = 7 * 4096;

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy } = launch.op else {
        unreachable!("the row is for adamw")
    };
    // SAFETY: the four scalars lie on no output.
    let [lr, scale, updates, go] = std::array::from_fn(|i| unsafe { cx.input(4 + i).scalar() });
    // In f64: at beta 0.999 an f32 power loses four digits of 1 - beta^t in the first steps.
    let correction = |beta: f32| (1.0 / (1.0 - (beta as f64).powf(updates as f64))) as f32;
    let (first, second) = (correction(beta1), correction(beta2));
    let constants = Update { scale, lr: lr * lr_scale, beta1, beta2, first, second, eps, weight_decay };
    let outs = [cx.output(0), cx.output(1), cx.output(2), copy.then(|| cx.output(3)).flatten()];
    let [p, g, m, v] = std::array::from_fn(|i| cx.input(i));
    let views: Vec<&View> = launch.ins[..4].iter().chain(launch.outs.iter().flatten()).collect();
    let tiles = Tiles::new(&views);
    let count = tiles.count();
    cx.parallel(count.div_ceil(TILES_A_TASK), TILES_A_TASK * TILE_BYTES, |task| {
        let mut buffers: [Vec<f32>; 4] = std::array::from_fn(|_| vec![0.0; Tiles::LEN]);
        for t in chunk(task, TILES_A_TASK, count) {
            let tile = tiles.tile(t);
            let [p_now, g_now, m_now, v_now] = buffers.each_mut().map(|buffer| &mut buffer[..tile.len()]);
            // SAFETY: a tile belongs to one task, and all inputs are read before an output is written.
            unsafe {
                tiles.load(0, &p, &tile, p_now);
                tiles.load(1, &g, &tile, g_now);
                tiles.load(2, &m, &tile, m_now);
                tiles.load(3, &v, &tile, v_now);
                if go != 0.0 {
                    update(constants, p_now, g_now, m_now, v_now);
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
