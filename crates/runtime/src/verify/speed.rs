//! Measures the speed of each kernel on a GPU at the sizes of real models: one large case per kernel, timed as a graph.

pub mod attention;

use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::linear_attention::{Accumulate, Keys, LinearAttend, LinearMask, Rotary};
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::product::{Compute, plain};
use flatout_ir::ops::quantize::Source;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::ops::rope::Pairs;
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Op, OpKind};

use super::trial::{Trial, TrialLayout};
use super::{Case, CaseDevice, Data, kernel_of};
use crate::cuda::session::noise::Noise;
use crate::{Session, cuda};

const BF16: DType = DType::BF16;
const F32: DType = DType::F32;
const CALLS: usize = 20;

/// A kernel's time on one large case.
#[derive(Clone, Debug)]
pub struct Speed {
    pub kernel: &'static str,
    pub case: String,
    pub ms: f64,
    /// Every input read and every output written once.
    pub bytes: u64,
    pub flops: u64,
}

impl Speed {
    pub fn gigabytes_a_second(&self) -> f64 {
        self.bytes as f64 / self.ms / 1e6
    }

    pub fn teraflops(&self) -> f64 {
        self.flops as f64 / self.ms / 1e9
    }

    /// Whether the kernel is bound by arithmetic rather than memory.
    pub fn is_arithmetic(&self) -> bool {
        self.flops > 64 * self.bytes
    }
}

/// Times a case on noise, which makes a product draw the power of real data; indices are valid.
pub fn time(case: &Case, device: &cuda::Device) -> Result<Speed, String> {
    let place = CaseDevice::Cuda(device);
    let row = kernel_of(case, &place.target())?;
    let trial = Trial::unfilled(case, row);
    let (launch, arena_bytes) = trial.launch(TrialLayout::Dense { threads: 1 }, 256, 1);
    let (bytes, flops, views) = (launch.bytes(), launch.flops, launch.ins.clone());
    let options = cuda::Options { autotune: cuda::Autotune::Quick, ..Default::default() };
    let session = Session::cuda(trial.plans(launch, arena_bytes), device, options);
    let mut session = session.map_err(|why| why.to_string())?;
    // An update's second moments are not negative.
    let is_update = matches!(case.op.kind(), OpKind::AdamW | OpKind::AdamW8);
    let noise = if is_update { Noise::POSITIVE } else { Noise::WIDE };
    for (i, view) in views.iter().enumerate().filter(|(_, view)| view.dtype.is_float()) {
        session.fill_noise(view, i as u32, noise).map_err(|why| why.to_string())?;
    }
    for (i, (ty, _)) in case.ins.iter().enumerate().filter(|(_, (ty, _))| ty.dtype == DType::I32) {
        let values = trial.plain(i).ok_or_else(|| format!("input {i} of {ty} depends on others"))?;
        let values: Vec<i32> = values.into_iter().map(|x| x as i32).collect();
        session.write_i32(&i.to_string(), &values).map_err(|why| why.to_string())?;
    }
    let cuda = session.as_cuda().expect("made on a device");
    let ms = cuda.time_ms(0, CALLS).map_err(|why| why.to_string())?;
    Ok(Speed { kernel: row.name, case: case.name.clone(), ms, bytes, flops })
}

/// One or two large cases per kernel family; the first is a plain copy, which gives the achievable memory bandwidth.
pub fn cases() -> Vec<Case> {
    let mut table = vec![];
    let mut add = |name: &str, op: Op, ins: Vec<(TensorType, Data)>| {
        table.push(Case::new(name.into(), op, ins, 0.0));
    };
    let x = |dtype: DType, dims: &[usize]| (TensorType::new(dtype, dims), Data::Normal(1.0));
    let index =
        |n: usize, rows: usize| (TensorType::new(DType::I32, [n]), Data::Between(0.0, rows as f64 - 1.0));
    let wide = [16384, 4096];
    let narrow = [65536, 768];
    // A copy between views of different shape, which merge to the same elements.
    add("copy 16384x4096 bf16", Op::Reshape { dims: vec![65536, 1024] }, vec![x(BF16, &wide)]);
    add("fill 16384x4096 f32", Op::Fill { value: 0.0, dtype: F32, dims: wide.to_vec() }, vec![]);
    add("add 16384x4096 bf16", Op::Map { f: E::Add }, vec![x(BF16, &wide), x(BF16, &wide)]);
    add("cast 16384x4096 f32 to bf16", Op::Map { f: E::Cast(BF16) }, vec![x(F32, &wide)]);
    let (tokens, width, ffn) = (65536, 768, 2048);
    add(
        "gated product 65536x2x2048x768 bf16",
        Op::GatedProduct { act: Act::Silu },
        vec![x(BF16, &[tokens, width]), x(BF16, &[2 * ffn, width])],
    );
    add(
        "gated product back 65536x2048x768 bf16",
        Op::GatedProductGrad { act: Act::Silu, again: true },
        vec![
            x(BF16, &[tokens, width]),
            x(BF16, &[width, ffn]),
            x(BF16, &[tokens, ffn]),
            x(BF16, &[tokens, ffn]),
        ],
    );
    let act = Act::GeluExact;
    let (tokens, ffn) = (65792, 3072);
    let ins = vec![x(BF16, &[tokens, width]), x(BF16, &[ffn, width]), x(BF16, &[ffn])];
    add("product, bias, GELU 65792x3072x768 bf16", Op::ActivatedProduct { act, tb: true, bias: true }, ins);
    let ins = vec![x(BF16, &[tokens, width]), x(BF16, &[width, ffn]), x(BF16, &[tokens, ffn])];
    let op = Op::ActivatedProductGrad { act, tb: false, again: true, sum: true };
    add("product, slope, sum 65792x3072x768 bf16", op, ins);
    for dims in [wide, narrow] {
        let shape = format!("{}x{} bf16", dims[0], dims[1]);
        let (eps, weight) = (1e-5, NormWeight::Plain);
        let w = || x(F32, &[dims[1]]);
        add(
            &format!("add+norm {shape}"),
            NormSpec::rms(eps, weight).op(true),
            vec![x(BF16, &dims), x(BF16, &dims), w()],
        );
        add(
            &format!("add+norm back {shape}"),
            NormSpec::rms(eps, weight).grad(true),
            vec![x(BF16, &dims), w(), x(BF16, &dims), x(BF16, &dims)],
        );
    }
    let act = Act::Silu;
    for (op, ins) in [(Op::Gated { act, p: 0.0 }, 2), (Op::GatedGrad { act, again: true, p: 0.0 }, 3)] {
        let name = format!("{} 16384x4096 bf16", op.name());
        add(&name, op, vec![x(BF16, &wide); ins]);
    }
    let rng = (TensorType::new(DType::I32, [3]), Data::Values(vec![12.0, 7.0, 99.0]));
    let rows = (TensorType::new(DType::I32, [wide[0], 2]), Data::Between(0.0, 1000.0));
    add("dropout 16384x4096 bf16", Op::Dropout { p: 0.1 }, vec![x(BF16, &wide), rng, rows]);
    for (axis, shape) in [(1, "rows"), (0, "columns")] {
        let name = format!("sum of {shape} 16384x4096 f32");
        add(&name, Op::Reduce { axis, by: Fold::Sum }, vec![x(F32, &wide)]);
    }

    let (tokens, heads, size, first) = (65536, 16, 64, 12);
    let qk = [tokens, heads, size];
    let positions = (TensorType::new(DType::I32, [1, tokens]), Data::Between(0.0, 2047.0));
    let turns = x(F32, &[2048, size / 2, 2]);
    let axis_of_freq = vec![0; size / 2];
    let (freq, pairs) = (1e4.into(), Pairs::Half);
    add(
        "rope 65536x16x64 bf16",
        Op::Rope { freq, axis_of_freq: axis_of_freq.clone(), pairs, inverse: false, table: true },
        vec![x(BF16, &qk), positions.clone(), turns.clone()],
    );
    let (eps, weight) = (1e-6, NormWeight::Plain);
    let forward = vec![x(BF16, &qk), x(F32, &[2 * size]), positions, turns];
    let axes = axis_of_freq.clone();
    let op = Op::QkNormRope { eps, weight, first, freq, axis_of_freq: axes, pairs, table: true };
    add("q/k norm+rope 65536x16x64 bf16", op, forward.clone());
    let op = Op::QkNormRopeGrad { eps, weight, first, freq, axis_of_freq, pairs, table: true };
    let backward = forward.into_iter().chain([x(BF16, &qk)]).collect();
    add("q/k norm+rope back 65536x16x64 bf16", op, backward);

    let (words, width) = (32768, 768);
    add(
        "gather 65536 of 32768x768 bf16",
        Op::Gather {},
        vec![x(BF16, &[words, width]), index(tokens, words)],
    );
    add(
        "scatter 65536 to 32768x768, bf16 to f32",
        Op::ScatterAdd { rows: words, out: F32, base: true },
        vec![x(BF16, &narrow), index(tokens, words), x(F32, &[words, width])],
    );
    let many = [64 << 20];
    let (beta1, beta2, eps, weight_decay, lr_scale, copy, first) = (0.9, 0.95, 1e-8, 0.1, 1.0, true, 0);
    let scalars = || vec![x(F32, &[1]); 4];
    for (moments, name) in [(F32, "f32"), (BF16, "bf16")] {
        let update = Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy, first };
        let state = vec![x(F32, &many), x(F32, &many), x(moments, &many), x(moments, &many)];
        add(&format!("adamw 64M, moments {name}, with bf16 copy"), update, [state, scalars()].concat());
    }
    let update = Op::AdamW8 { beta1, beta2, eps, weight_decay, lr_scale, copy, first };
    let mut state = vec![x(F32, &many), x(F32, &many), x(DType::E4M3, &many), x(DType::E4M4, &many)];
    state.extend([x(F32, &[many[0] / 256]), x(F32, &[many[0] / 256])]);
    add("adamw8 64M with bf16 copy", update, [state, scalars()].concat());

    let product = |ta, tb, out, base| Op::Product {
        ta,
        tb,
        out,
        base,
        compute: Compute::Full,
        epilogue: Epilogue::None,
    };
    add(
        "product 8192x8192x8192 bf16",
        product(false, true, BF16, false),
        vec![x(BF16, &[8192, 8192]), x(BF16, &[8192, 8192])],
    );
    add(
        "product 65536x2304x768 bf16",
        product(false, true, BF16, false),
        vec![x(BF16, &narrow), x(BF16, &[2304, 768])],
    );
    add(
        "product 2304x768x65536 bf16, added in f32",
        product(true, false, F32, true),
        vec![x(BF16, &[65536, 2304]), x(BF16, &narrow), x(F32, &[2304, 768])],
    );
    let layer = |ta, tb, out, base, epilogue| {
        let compute = Compute::Full;
        Op::Product { ta, tb, out, base, compute, epilogue }
    };
    add(
        "product+bias+gelu 65536x3072x768 bf16",
        layer(false, true, BF16, false, Epilogue::BiasGelu),
        vec![x(BF16, &narrow), x(BF16, &[3072, 768]), x(BF16, &[3072])],
    );
    add(
        "product+gelu slope 65536x3072x768 bf16",
        layer(false, false, BF16, false, Epilogue::GeluGrad),
        vec![x(BF16, &narrow), x(BF16, &[768, 3072]), x(BF16, &[65536, 3072])],
    );
    add(
        "product 4096x4096x4096 f32",
        product(false, true, F32, false),
        vec![x(F32, &[4096, 4096]), x(F32, &[4096, 4096])],
    );
    let one = || x(F32, &[1]);
    add(
        "product 8192x8192x8192 e4m3 to bf16",
        product(false, true, BF16, false),
        vec![x(DType::E4M3, &[8192, 8192]), x(DType::E4M3, &[8192, 8192]), one(), one()],
    );
    add("cast 16384x4096 bf16 to e4m3", Op::Map { f: E::Cast(DType::E4M3) }, vec![x(BF16, &wide)]);
    let quantize = |to, current, of| Op::Quantize { to, current, of };
    let given = vec![x(BF16, &[65536, 768]), one(), one()];
    add("quantize 65536x768 bf16", quantize(DType::E4M3, false, Source::Given), given);
    let weight = vec![x(BF16, &[4096, 768])];
    add("quantize 4096x768 bf16 by its own scale", quantize(DType::E4M3, true, Source::Given), weight);
    // Gate and up of Qwen3-8B, stored in NF4.
    let (rows, blocks) = (vec![12288; 2], 12288 * 4096 / 64);
    let stored = || {
        let part = || vec![x(DType::U8, &[blocks]), x(F32, &[blocks / 256]), one()];
        [vec![x(DType::U8, &[24576, 2048]), x(F32, &[256])], part(), part()].concat()
    };
    let dequantize = Op::Dequantize { rows: rows.clone(), to: BF16, nested: true };
    add("dequantize 24576x4096 nf4 to bf16", dequantize, stored());
    for (transposed, along) in [(false, "rows"), (true, "columns")] {
        let op = Op::Requantize { rows: rows.clone(), transposed };
        let ins = [stored(), vec![one()]].concat();
        add(&format!("requantize 24576x4096 nf4 to e4m3 along {along}"), op, ins);
    }
    let gate = || x(BF16, &[65536, 2048]);
    let of = Source::Gated(Act::Silu);
    add(
        "quantize gated 65536x2048 bf16",
        quantize(DType::E4M3, false, of),
        vec![gate(), gate(), one(), one()],
    );
    for again in [false, true] {
        let of = Source::GatedGrad { act: Act::Silu, again };
        let name =
            format!("quantize gated grad{} 65536x2048 bf16", if again { " and gated again" } else { "" });
        let scales = (0..2 + again as usize).map(|_| one());
        let ins = (0..3).map(|_| gate()).chain(scales).collect();
        add(&name, quantize(DType::E5M2, false, of), ins);
    }
    let spec = NormSpec::rms(1e-6, NormWeight::Plain);
    let (row, w) = (|| x(BF16, &[65536, 768]), || x(F32, &[768]));
    add(
        "quantize add+norm 65536x768 bf16",
        quantize(DType::E4M3, false, Source::Norm(spec, true)),
        vec![row(), row(), w(), one(), one()],
    );
    add(
        "quantize norm along columns 65536x768 bf16",
        quantize(DType::E4M3, false, Source::Norm(spec, false)),
        vec![row(), w(), one(), one()],
    );
    for again in [false, true] {
        let of = Source::NormGrad { spec, add: true, again };
        let name =
            format!("quantize add+norm grad{} 65536x768 bf16", if again { " and norm again" } else { "" });
        let ins = [row(), w(), row(), row()].into_iter().chain((0..2 + again as usize).map(|_| one()));
        add(&name, quantize(DType::E5M2, false, of), ins.collect());
    }
    add(
        "product 4096x4096x4096 f32 in tf32",
        plain(false, true, F32, Compute::Tf32),
        vec![x(F32, &[4096, 4096]), x(F32, &[4096, 4096])],
    );
    let segments = Segments::Uniform { len: 2048 };
    let (mask, scale) = (Mask::Causal, 0.125);
    let qkv = vec![x(BF16, &qk), x(BF16, &[tokens, 4, size]), x(BF16, &[tokens, 4, size])];
    let op = Op::Attention { scale, cap: Cap::NONE, mask, q: segments, k: segments };
    add("attention causal 32x2048, 12 heads on 4 of 64, bf16", op, qkv.clone());
    let saved = [x(BF16, &qk), x(F32, &[tokens, heads]), x(BF16, &qk)];
    let op = Op::AttentionGrad { scale, cap: Cap::NONE, mask, q: segments, k: segments, d_lse: false };
    add(
        "attention back causal 32x2048, 12 heads on 4 of 64, bf16",
        op,
        qkv.into_iter().chain(saved).collect(),
    );
    // Vision-BDH's shape: queries double as keys, and all heads share the values.
    let (images, patches, neurons, features) = (512, 65, 1024, 192);
    let rows = images * patches;
    let (r, v) = (x(BF16, &[rows, 6, neurons]), x(BF16, &[rows, 1, features]));
    let linear = LinearAttend {
        scale: 1.0 / 1024.0,
        mask: LinearMask::Full,
        q: Segments::Uniform { len: patches },
        k: Keys::Queries,
        rotary: Rotary::None,
    };
    add("linear attention 512x65, 6 heads of 1024 on 192, bf16", linear.op(), vec![r.clone(), v.clone()]);
    add(
        "linear attention back 512x65, 6 heads of 1024 on 192, bf16",
        linear.grad(),
        vec![r.clone(), v.clone(), x(BF16, &[rows, 6, features])],
    );
    // As above, with the rotation inside.
    let turned = LinearAttend { rotary: Rotary::Table(65536.0.into()), ..linear };
    let positions = (0..rows).map(|row| (row % patches) as f64).collect();
    let by = vec![
        (TensorType::new(DType::I32, [1, rows]), Data::Values(positions)),
        (TensorType::new(F32, [patches, neurons / 2, 2]), Data::Normal(1.0)),
    ];
    let ins = [vec![r, v], by].concat();
    add("turned linear attention 512x65, 6 heads of 1024 on 192, bf16", turned.op(), ins.clone());
    add(
        "turned linear attention back 512x65, 6 heads of 1024 on 192, bf16",
        turned.grad(),
        [ins.clone(), vec![x(BF16, &[rows, 6, features])]].concat(),
    );
    add(
        "turned linear attention back onto a base and its ReLU 512x65, 6 heads of 1024 on 192, bf16",
        turned.accumulating_grad(Accumulate::Relu),
        [ins, vec![x(BF16, &[rows, 6, features]), x(BF16, &[rows, 6, neurons])]].concat(),
    );
    for (rows, width, words) in [(16384, 768, 32768), (16384, 4096, 131072)] {
        add(
            &format!("head+loss {rows}x{width}, {words} words, bf16"),
            Op::HeadLossTrain { base: true, compute: Compute::Full, cap: Cap::NONE },
            vec![
                x(BF16, &[rows, width]),
                x(BF16, &[words, width]),
                index(rows, words),
                x(F32, &[rows]),
                x(F32, &[words, width]),
            ],
        );
    }
    table
}

/// Whether a case is the copy that others are compared with.
pub fn is_copy(case: &Case) -> bool {
    case.op.kind() == OpKind::Reshape
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::runs;
    use flatout_ir::target::KernelRow;

    /// Every case is an operation with valid inputs: laid out with the CPU's row, or the GPU's if only that has one.
    #[test]
    fn cases_are_sound() {
        let of_gpus = crate::cuda::KERNELS.iter().copied().flatten().map(|kernel| kernel.row);
        let rows: Vec<KernelRow> = crate::cpu::target(1).kernels.into_iter().chain(of_gpus).collect();
        for case in cases() {
            let row = rows.iter().find(|row| runs(row, &case)).copied();
            let trial = Trial::unfilled(&case, row.unwrap_or_else(|| panic!("no kernel for {}", case.name)));
            let (launch, arena_bytes) = trial.launch(TrialLayout::Dense { threads: 1 }, 256, 1);
            let row = row.expect("found above");
            crate::launch::check(&launch, &row, arena_bytes, 1)
                .unwrap_or_else(|e| panic!("{}: {e}", case.name));
        }
    }
}
