//! The closed set of operations: a table with one row per operation, and exhaustive matches that dispatch to one file per
//! operation or family.
//!
//! Each file has the shape rule, the gradient and the expansion to simpler operations. Because the matches are exhaustive, no
//! operation exists without all three.
//!
//! The expansion defines the mathematics. It is the fallback where a fused form is switched off, and the reference for kernels
//! and fused gradients; a gradient operation expands to the derivative of its forward's expansion.

pub mod activated_product;
pub mod adamw;
pub mod adamw8;
pub mod attention;
pub mod cached_qk_norm_rope;
pub mod cap;
pub mod collective;
pub mod dequantize;
pub mod double_norm;
pub mod dropout;
pub mod elementwise;
pub mod epilogue;
pub mod frequency;
pub mod gated;
pub mod gated_product;
pub mod head_loss;
pub mod index;
pub mod linear_attention;
pub mod low_rank_norm;
pub mod movement;
pub mod norm;
pub mod normal;
pub mod product;
pub mod qk_norm_rope;
pub mod quantize;
pub mod reduce;
pub mod requantize;
pub mod resample;
pub mod rope;
pub mod sample;
mod shapes;
pub mod source;
pub mod thin_product;

use crate::attr::{Attr, AttrMap, is_omitted};
use crate::builder::{Builder, Tensor};
use crate::graph::{Graph, Node, SlotId, Value};
use crate::mesh::Axis;
use crate::types::{DType, Dims, TensorType};
use crate::work::Work;
use attention::{Attend, Mask, Segments};
use cap::Cap;
use collective::{Combine, Order};
use double_norm::DoubleNorm;
use elementwise::Elementwise;
use epilogue::Epilogue;
use frequency::Frequencies;
use gated::Act;
use linear_attention::{Accumulate, Keys, LinearAttend, LinearMask, Rotary};
use norm::{NormSpec, NormWeight};
use product::Compute;
use quantize::Source;
use reduce::Fold;
use rope::{Pairs, RopeSpec};
pub(crate) use shapes::{arity, expect, expect_axes, expect_float};
use thin_product::Thin;

impl Attr for SlotId {
    fn to_text(&self) -> String {
        format!("${}", self.0)
    }
    fn read(text: &str) -> Result<Self, String> {
        let number = text.strip_prefix('$').ok_or_else(|| format!("`{text}` is not a slot"))?;
        Ok(SlotId(u32::read(number)?))
    }
}

macro_rules! ops {
    ($($(#[$doc:meta])* $variant:ident = $name:literal { $($field:ident : $ty:ty),* $(,)? })*) => {
        #[derive(Clone, Debug, PartialEq)]
        pub enum Op { $($(#[$doc])* $variant { $($field: $ty),* }),* }

        /// An operation without its attributes: the key of a kernel row.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum OpKind { $($variant),* }

        impl OpKind {
            pub const ALL: &[OpKind] = &[$(OpKind::$variant),*];
            pub fn name(self) -> &'static str {
                match self { $(OpKind::$variant => $name),* }
            }
        }

        impl Op {
            pub fn kind(&self) -> OpKind {
                match self { $(Op::$variant { .. } => OpKind::$variant),* }
            }
            pub fn name(&self) -> &'static str {
                self.kind().name()
            }
            /// The attributes as the text form prints them.
            pub fn attrs(&self) -> Vec<(&'static str, String)> {
                match self {
                    $(Op::$variant { $($field),* } => {
                        let all: Vec<(&'static str, String, bool)> =
                            vec![$((stringify!($field), $field.to_text(), is_omitted($field))),*];
                        all.into_iter().filter(|(_, _, omitted)| !omitted).map(|(n, v, _)| (n, v)).collect()
                    })*
                }
            }
            /// Rebuilds an operation from its name and attributes.
            #[allow(unused_variables, reason = "operations without attributes take none")]
            pub fn parse(name: &str, attrs: &mut AttrMap<'_>) -> Result<Op, String> {
                match name {
                    $($name => Ok(Op::$variant { $($field: attrs.take(stringify!($field))?),* }),)*
                    _ => Err(format!("`{name}` is not an operation")),
                }
            }
        }
    };
}

ops! {
    /// The value of a slot before the run.
    Read = "read" { slot: SlotId }
    /// A constant.
    Fill = "fill" { value: f64, dtype: DType, dims: Dims }
    /// The index along an axis.
    Iota = "iota" { dtype: DType, dims: Dims, axis: usize }
    /// A function of one to three tensors of one shape, element by element.
    Map = "map" { f: Elementwise }
    Reshape = "reshape" { dims: Dims }
    Transpose = "transpose" { perm: Vec<usize> }
    Slice = "slice" { axis: usize, start: usize, len: usize }
    Concat = "concat" { axis: usize }
    /// Adds zeros before and after along an axis: the gradient of a slice.
    Pad = "pad" { axis: usize, before: usize, after: usize }
    /// Repeats axes of extent 1.
    Broadcast = "broadcast" { dims: Dims }
    /// (inputs of `of`, which computes x [M, N]; scale [1], amax [1]) -> x / scale in an 8-bit type, its transpose, and the
    /// larger of amax and the largest magnitude. With `current` (x) -> the same with the scale that fits x, and that scale.
    /// Further outputs of `of` follow.
    Quantize = "quantize" { to: DType, current: bool, of: Source }
    /// (codes u8 [M, N / 2], map?, the magnitudes of the blocks as stored) -> [M, N]: dequantises weights in NF4.
    Dequantize = "dequantize" { rows: Dims, to: DType, nested: bool }
    /// (inputs of `Dequantize` with `nested`, scale [1]) -> [M, N], or transposed: the E4M3 codes of the weights in bf16.
    Requantize = "requantize" { rows: Dims, transposed: bool }
    /// Folds one axis to extent 1.
    Reduce = "reduce" { axis: usize, by: Fold }
    /// (a [.., M, K], b [.., K, N], base?, inputs of the epilogue) -> a b + base through the epilogue; `ta` and `tb` say that
    /// an operand is stored transposed. 8-bit operands bring a scale each, f32 [1], as the last inputs.
    Product = "product" { ta: bool, tb: bool, out: DType, base: bool, compute: Compute, epilogue: Epilogue }
    /// (two factors, base?, rng, rows) -> their product with dropout before or after it, plus the base.
    ThinProduct = "thin_product" { form: Thin, p: f32, out: DType, base: bool }
    /// (x, residual?, w?, bias?) -> y = normed * weight + bias, and h = x + residual; `center` subtracts the mean first.
    RmsNorm = "rms_norm" { eps: f32, center: bool, weight: NormWeight, bias: bool, residual: bool }
    /// (h, w?, dy, dh?) -> dx + dh, dw?, d bias?; with `again` also the output of `rms_norm` for h, whose bias is then the last
    /// input; with `sum` also the sum of the first output over rows.
    RmsNormGrad = "rms_norm_grad" { eps: f32, center: bool, weight: NormWeight, bias: bool, add: bool, again: bool, sum: bool }
    /// (y, x, w inner, w outer) -> outer norm of h, and h = x + inner norm of y.
    DoubleNorm = "double_norm" { inner: NormSpec, outer: NormSpec }
    /// (y, x, or h with `of_sum`, w inner, w outer, d out, dh?) -> dx, dy; the weights get no gradients.
    DoubleNormGrad = "double_norm_grad" { inner: NormSpec, outer: NormSpec, add: bool, of_sum: bool }
    /// (x [T, H, K], positions i32 [axes, T], table?) -> x with pairs rotated; `inverse` rotates back.
    Rope = "rope" { freq: Frequencies, axis_of_freq: Vec<u8>, pairs: Pairs, inverse: bool, table: bool }
    /// (x [T, H, K], w [K], positions, table?) -> rope(rms_norm(x)). With `first` w is [2 K]: its first half applies to the
    /// first `first` heads, the second half to the others.
    QkNormRope = "qk_norm_rope" { eps: f32, weight: NormWeight, first: usize, freq: Frequencies, axis_of_freq: Vec<u8>, pairs: Pairs, table: bool }
    /// (x, w, positions, table?, dy) -> dx, dw.
    QkNormRopeGrad = "qk_norm_rope_grad" { eps: f32, weight: NormWeight, first: usize, freq: Frequencies, axis_of_freq: Vec<u8>, pairs: Pairs, table: bool }
    /// (the inputs of `qk_norm_rope` with `first`, v [T, HK, K], cached keys and values [R, HK, K], index i32 [T]) -> the first
    /// `first` heads of its output, which are queries, and the caches with the rows of `index` replaced by the other heads and v.
    CachedQkNormRope = "cached_qk_norm_rope" { eps: f32, weight: NormWeight, first: usize, freq: Frequencies, axis_of_freq: Vec<u8>, pairs: Pairs, table: bool }
    /// (gate, up) -> act(gate) * up, with dropout where `p` > 0, whose rng and rows are then the last inputs.
    Gated = "gated" { act: Act, p: f32 }
    /// (gate, up, dy, rng?, rows?) -> d gate, d up; with `again` also the output of `gated`.
    GatedGrad = "gated_grad" { act: Act, again: bool, p: f32 }
    /// (x [M, K], w [2 F, K]) -> x w^T, whose first F columns are the gate and whose others are up, and act(gate) * up. Of 8-bit x
    /// and w: (x, w, scale of x, of w, of the activation, its largest magnitude so far) -> x w^T in bf16, the codes of
    /// act(gate) * up, and the largest magnitude.
    GatedProduct = "gated_product" { act: Act }
    /// (d [M, K], w [K, F], gate [M, F], up) -> d gate and d up, where d w is the gradient of act(gate) * up; with `again` also
    /// act(gate) * up.
    GatedProductGrad = "gated_product_grad" { act: Act, again: bool }
    /// (x [M, K], w, bias [N]?) -> h [M, N] = x w + bias, act(h).
    ActivatedProduct = "activated_product" { act: Act, tb: bool, bias: bool }
    /// (d [M, K], w, h [M, N]) -> d w times the slope of act at h; with `again` also act(h), with `sum` also the sum [1, N] of
    /// the first output over rows.
    ActivatedProductGrad = "activated_product_grad" { act: Act, tb: bool, again: bool, sum: bool }
    /// (x [T, ..], rng i32 [3], rows i32 [T, 2]) -> x / (1 - p), zero with probability p.
    Dropout = "dropout" { p: f32 }
    /// (table [V, ..], index i32 [N]) -> [N, ..]; index -1 gives zeros.
    Gather = "gather" {}
    /// (rows [N, ..], index i32 [N], base?) -> [V, ..], summed in the order of the rows; rows of index -1 are dropped.
    ScatterAdd = "scatter_add" { rows: usize, out: DType, base: bool }
    /// (base [V, ..], rows [N, ..], index i32 [N]) -> base with those rows replaced; rows of index -1 are dropped.
    RowScatter = "row_scatter" {}
    /// (table u8 [N, H, W, C], parts i32 [B, 6]) -> u8 [B, height, width, C]: crops of images, resized to one size.
    Resample = "resample" { height: usize, width: usize }
    /// (logits f32 [S, V], numbers i32 [S, 6], shares f32 [S, 2]) -> f32 [S, 2]: a token sampled from every row, and its
    /// log-probability.
    Sample = "sample" {}
    /// (q [Tq, H, K], k, v [Tk, HK, K], q start, q len?, k start, k len?, intervals?) -> o, lse f32 [Tq, H].
    Attention = "attention" { scale: f32, cap: Cap, mask: Mask, q: Segments, k: Segments }
    /// (the inputs of attention, o, lse, do, d lse?) -> dq, dk, dv.
    AttentionGrad = "attention_grad" { scale: f32, cap: Cap, mask: Mask, q: Segments, k: Segments, d_lse: bool }
    /// (q [Tq, H, N], k? [Tk, HK, N], v [Tk, HV, D], q start, q len?, k start, k len?, positions i32 [1, Tq]?, table?) ->
    /// o [Tq, H, D].
    LinearAttention = "linear_attention" { scale: f32, mask: LinearMask, q: Segments, k: Keys, rotary: Rotary }
    /// (the inputs of linear attention, do, base of dq?) -> dq, dk?, dv.
    LinearAttentionGrad = "linear_attention_grad" { scale: f32, mask: LinearMask, q: Segments, k: Keys, rotary: Rotary, accumulate: Accumulate }
    /// (x [R, D], w [V, D], target i32 [R], weight f32 [R]) -> -sum of weight * logp [1], logp, lse and best [R].
    HeadLoss = "head_loss" { compute: Compute, cap: Cap }
    /// (x, w, target, lse, d logp [R], base of dw?) -> dx, dw.
    HeadLossGrad = "head_loss_grad" { base: bool, kept: bool, compute: Compute, cap: Cap }
    /// (x, w, target, weight, base of dw?) -> sum, logp, lse, dx, dw in one pass over the logits.
    HeadLossTrain = "head_loss_train" { base: bool, compute: Compute, cap: Cap }
    /// (w [M, N], a [R, N], b [M, R]) -> 1 / ||w + scale b a|| of every row, f32 [M].
    LowRankNorm = "low_rank_norm" { scale: f64 }
    /// (p, g, m, v, lr [1], scale [1], updates [1], is_finite [1], rank i32 [1]?) -> p, m, v; unchanged where is_finite is 0.
    /// With `copy` also p in bf16. `first` is the index of the first element among all trained elements; where each rank
    /// updates its share, it is the index for rank 0.
    AdamW = "adamw" { beta1: f32, beta2: f32, eps: f32, weight_decay: f32, lr_scale: f32, copy: bool, first: u64 }
    /// (p, g, m e4m3, v e4m4, scales of m, scales of v, lr [1], scale [1], updates [1], is_finite [1], rank i32 [1]?) -> p, m,
    /// v, scales of m, scales of v: as `adamw`, with moments in the blocks of `block8`.
    AdamW8 = "adamw8" { beta1: f32, beta2: f32, eps: f32, weight_decay: f32, lr_scale: f32, copy: bool, first: u64 }
    /// () -> i32 [1]: this rank's coordinate along an axis of the mesh.
    Rank = "rank" { axis: Axis }
    /// (x [M]) -> [ways M]: the x of all ranks of the group, in the order of their coordinates.
    AllGather = "all_gather" { axis: Axis, ways: usize }
    /// (x [ways M], base [M]?) -> [M]: the base, and the sum over the group of the block at this rank's coordinate.
    ReduceScatter = "reduce_scatter" { axis: Axis, ways: usize, order: Order, base: bool }
    /// (x [M]) -> [M]: the sum or the maximum over the group.
    AllReduce = "all_reduce" { axis: Axis, ways: usize, by: Combine, order: Order }
    /// Elementwise operations on one shape, run tile by tile; values inside use no memory.
    Region = "region" { body: Box<Graph> }
    /// Several regions that share no input, each with its own shape, in one launch.
    Bundle = "bundle" { body: Box<Graph> }
}

impl OpKind {
    /// Whether passes create it only for a target that has a kernel for it.
    pub fn is_optional(self) -> bool {
        matches!(
            self,
            OpKind::ThinProduct
                | OpKind::DoubleNorm
                | OpKind::DoubleNormGrad
                | OpKind::GatedProduct
                | OpKind::GatedProductGrad
                | OpKind::ActivatedProduct
                | OpKind::ActivatedProductGrad
                | OpKind::CachedQkNormRope
        )
    }

    /// Whether it depends on other ranks, or on which rank runs it.
    pub fn is_collective(self) -> bool {
        matches!(self, OpKind::Rank | OpKind::AllGather | OpKind::ReduceScatter | OpKind::AllReduce)
    }

    /// The kind of work that reports count it under.
    pub fn work(self) -> Work {
        match self {
            OpKind::Product
            | OpKind::ThinProduct
            | OpKind::GatedProduct
            | OpKind::GatedProductGrad
            | OpKind::ActivatedProduct
            | OpKind::ActivatedProductGrad => Work::Product,
            OpKind::Attention
            | OpKind::AttentionGrad
            | OpKind::LinearAttention
            | OpKind::LinearAttentionGrad => Work::Attention,
            OpKind::RmsNorm
            | OpKind::RmsNormGrad
            | OpKind::DoubleNorm
            | OpKind::DoubleNormGrad
            | OpKind::QkNormRope
            | OpKind::QkNormRopeGrad
            | OpKind::CachedQkNormRope
            | OpKind::LowRankNorm => Work::Norm,
            OpKind::Rope => Work::Rope,
            OpKind::Gated | OpKind::GatedGrad => Work::Gated,
            OpKind::Quantize | OpKind::Dequantize | OpKind::Requantize => Work::Quantize,
            OpKind::Map | OpKind::Region | OpKind::Bundle | OpKind::Dropout => Work::Elementwise,
            OpKind::Reduce => Work::Reduce,
            OpKind::Gather | OpKind::ScatterAdd | OpKind::RowScatter | OpKind::Resample | OpKind::Sample => {
                Work::Index
            }
            OpKind::HeadLoss | OpKind::HeadLossGrad | OpKind::HeadLossTrain => Work::Loss,
            OpKind::AdamW | OpKind::AdamW8 => Work::Optimizer,
            OpKind::AllGather | OpKind::ReduceScatter | OpKind::AllReduce => Work::Wire,
            OpKind::Read
            | OpKind::Rank
            | OpKind::Fill
            | OpKind::Iota
            | OpKind::Reshape
            | OpKind::Transpose
            | OpKind::Slice
            | OpKind::Concat
            | OpKind::Pad
            | OpKind::Broadcast => Work::Copy,
        }
    }

    /// Whether its kernels decode and encode 8-bit floats themselves, so that a device without the type can run it.
    pub fn decodes(self) -> bool {
        self == OpKind::AdamW8
    }
}

impl Attr for Box<Graph> {
    fn to_text(&self) -> String {
        format!("{{\n{self}}}")
    }
    fn read(text: &str) -> Result<Self, String> {
        let inner = text.strip_prefix('{').and_then(|t| t.strip_suffix('}'));
        Ok(Box::new(inner.ok_or("a region's body stands in braces")?.parse()?))
    }
}

/// Gradients of a node's inputs; `None` where none flows.
pub type Grads<'g> = Vec<Option<Tensor<'g>>>;

/// The inputs of a gradient rule: the forward node and the gradients of its outputs.
pub struct Vjp<'a, 'g> {
    pub ins: &'a [Tensor<'g>],
    pub outs: &'a [Tensor<'g>],
    /// One per output; `None` where nothing downstream depends on it.
    pub d: &'a [Option<Tensor<'g>>],
    /// Whether each input's gradient is needed.
    pub needs: &'a [bool],
    pub key: u64,
}

impl Op {
    /// The types of the outputs, or an error that says what is wrong with the inputs.
    pub fn infer(&self, g: &Graph, ins: &[Value]) -> Result<Vec<TensorType>, String> {
        if let Op::Read { slot } = self {
            return Ok(vec![g.slot(*slot).ty.clone()]);
        }
        let ins: Vec<&TensorType> = ins.iter().map(|v| g.ty(*v)).collect();
        match self {
            Op::Read { .. } => unreachable!("handled above"),
            Op::Fill { .. } | Op::Iota { .. } => source::infer(self, &ins),
            Op::Map { f } => elementwise::infer(*f, &ins),
            Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::Pad { .. }
            | Op::Broadcast { .. } => movement::infer(self, &ins),
            Op::Reduce { axis, by } => reduce::infer(*axis, *by, &ins),
            Op::Quantize { to, current, of } => quantize::infer(*to, *current, *of, &ins),
            Op::Dequantize { rows, to, nested } => dequantize::infer(rows, *to, *nested, &ins),
            Op::Requantize { rows, transposed } => requantize::infer(rows, *transposed, &ins),
            Op::Product { ta, tb, out, base, epilogue, .. } => {
                product::infer(*ta, *tb, *out, *base, *epilogue, &ins)
            }
            Op::ThinProduct { form, p, out, base } => thin_product::infer(*form, *p, *out, *base, &ins),
            Op::RmsNorm { weight, bias, residual, .. } => norm::infer(*weight, *bias, *residual, &ins),
            Op::RmsNormGrad { .. } => norm::infer_grad(self, &ins),
            Op::DoubleNorm { .. } => double_norm::infer(&ins),
            Op::DoubleNormGrad { add, .. } => double_norm::infer_grad(*add, &ins),
            Op::Rope { axis_of_freq, table, .. } => rope::infer(axis_of_freq, *table, &ins),
            Op::QkNormRope { weight, first, axis_of_freq, table, .. } => {
                qk_norm_rope::infer(*weight, *first, axis_of_freq, *table, &ins)
            }
            Op::QkNormRopeGrad { weight, first, axis_of_freq, table, .. } => {
                qk_norm_rope::infer_grad(*weight, *first, axis_of_freq, *table, &ins)
            }
            Op::CachedQkNormRope { .. } => cached_qk_norm_rope::infer(self, &ins),
            Op::Gated { p, .. } => gated::infer(*p, &ins),
            Op::GatedGrad { again, p, .. } => gated::infer_grad(*again, *p, &ins),
            Op::GatedProduct { .. } => gated_product::infer(&ins),
            Op::GatedProductGrad { again, .. } => gated_product::infer_grad(*again, &ins),
            Op::ActivatedProduct { tb, bias, .. } => activated_product::infer(*tb, *bias, &ins),
            Op::ActivatedProductGrad { tb, again, sum, .. } => {
                activated_product::infer_grad(*tb, *again, *sum, &ins)
            }
            Op::Dropout { p } => dropout::infer(*p, &ins),
            Op::Gather {} => index::infer_gather(&ins),
            Op::ScatterAdd { rows, out, base } => index::infer_scatter_add(*rows, *out, *base, &ins),
            Op::RowScatter {} => index::infer_row_scatter(&ins),
            Op::Resample { height, width } => resample::infer(*height, *width, &ins),
            Op::Sample {} => sample::infer(&ins),
            Op::Attention { mask, q, k, .. } => attention::infer(*mask, *q, *k, &ins),
            Op::AttentionGrad { mask, q, k, d_lse, .. } => attention::infer_grad(*mask, *q, *k, *d_lse, &ins),
            &Op::LinearAttention { scale, mask, q, k, rotary } => {
                linear_attention::infer(&LinearAttend { scale, mask, q, k, rotary }, &ins)
            }
            &Op::LinearAttentionGrad { scale, mask, q, k, rotary, accumulate } => {
                linear_attention::infer_grad(&LinearAttend { scale, mask, q, k, rotary }, accumulate, &ins)
            }
            Op::HeadLoss { .. } => head_loss::infer(&ins),
            Op::HeadLossGrad { base, kept, .. } => head_loss::infer_grad(*base, *kept, &ins),
            Op::HeadLossTrain { base, .. } => head_loss::infer_train(*base, &ins),
            Op::LowRankNorm { .. } => low_rank_norm::infer(&ins),
            Op::AdamW { copy, first, .. } => adamw::infer(*copy, *first, &ins),
            Op::AdamW8 { copy, first, .. } => adamw8::infer(*copy, *first, &ins),
            Op::Rank { .. } | Op::AllGather { .. } | Op::ReduceScatter { .. } | Op::AllReduce { .. } => {
                collective::infer(self, &ins)
            }
            Op::Region { body } => crate::region::infer(body, &ins),
            Op::Bundle { body } => crate::bundle::infer(body, &ins),
        }
    }

    /// Appends the gradient of this operation. Operations that only appear after autodiff have none.
    pub fn vjp<'g>(&self, b: &'g Builder, at: &Vjp<'_, 'g>) -> Grads<'g> {
        match self {
            Op::Read { .. } | Op::Fill { .. } | Op::Iota { .. } => vec![],
            // Images are bytes, which have no gradient.
            Op::Resample { .. } => vec![None; 2],
            Op::Map { f } => elementwise::vjp(*f, at),
            Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::Pad { .. }
            | Op::Broadcast { .. } => movement::vjp(self, at),
            Op::Reduce { by, .. } => reduce::vjp(*by, at),
            Op::Product { ta, tb, base, compute, epilogue, .. } => {
                product::vjp([*ta, *tb], *base, *compute, *epilogue, at)
            }
            Op::RmsNorm { .. } => norm::vjp(b, self, at),
            Op::Rope { .. } => rope::vjp(b, self, at),
            Op::QkNormRope { .. } => qk_norm_rope::vjp(b, self, at),
            Op::Gated { act, p } => gated::vjp(b, *act, *p, at),
            Op::Dropout { p } => dropout::vjp(b, *p, at),
            Op::Gather {} => index::vjp_gather(at),
            Op::ScatterAdd { base, .. } => index::vjp_scatter_add(*base, at),
            Op::Attention { .. } => attention::vjp(b, self, at),
            &Op::LinearAttention { scale, mask, q, k, rotary } => {
                linear_attention::vjp(b, &LinearAttend { scale, mask, q, k, rotary }, at)
            }
            Op::HeadLoss { compute, cap } => head_loss::vjp(b, *compute, *cap, at),
            Op::Quantize { .. }
            | Op::Dequantize { .. }
            | Op::Requantize { .. }
            | Op::ThinProduct { .. }
            | Op::RowScatter {}
            | Op::Sample {}
            | Op::RmsNormGrad { .. }
            | Op::DoubleNorm { .. }
            | Op::DoubleNormGrad { .. }
            | Op::QkNormRopeGrad { .. }
            | Op::CachedQkNormRope { .. }
            | Op::GatedGrad { .. }
            | Op::GatedProduct { .. }
            | Op::GatedProductGrad { .. }
            | Op::ActivatedProduct { .. }
            | Op::ActivatedProductGrad { .. }
            | Op::AttentionGrad { .. }
            | Op::LinearAttentionGrad { .. }
            | Op::HeadLossGrad { .. }
            | Op::HeadLossTrain { .. }
            | Op::LowRankNorm { .. }
            | Op::AdamW { .. }
            | Op::AdamW8 { .. }
            | Op::Rank { .. }
            | Op::AllGather { .. }
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::Region { .. }
            | Op::Bundle { .. } => panic!("{} is not differentiated", self.name()),
        }
    }

    /// The same mathematics in simpler operations, one level down; `None` for a primitive. The node's key seeds random numbers.
    pub fn expand<'g>(&self, b: &'g Builder, key: u64, ins: &[Tensor<'g>]) -> Option<Vec<Tensor<'g>>> {
        Some(match self {
            Op::Read { .. } | Op::Fill { .. } | Op::Iota { .. } | Op::Map { .. } => return None,
            Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::Pad { .. }
            | Op::Broadcast { .. } => {
                return None;
            }
            Op::Reduce { .. } | Op::Dropout { .. } | Op::Gather {} | Op::RowScatter {} => return None,
            Op::Resample { .. } | Op::Sample {} | Op::Dequantize { .. } => return None,
            Op::Quantize { to, current, of } => quantize::expand(*to, *current, *of, ins),
            Op::Requantize { rows, transposed } => vec![requantize::expand(rows, *transposed, ins)],
            Op::Product { ta, tb, out, base, .. } if ins[0].dtype().is_fp8() => {
                vec![product::of_wide(*ta, *tb, *out, *base, ins)]
            }
            Op::Product { base: false, epilogue: Epilogue::None, .. } => return None,
            Op::ScatterAdd { base: false, .. } => return None,
            Op::Product { base: true, ta, tb, out, compute, epilogue: Epilogue::None } => {
                vec![product::without_base(*ta, *tb, *out, *compute, ins)]
            }
            Op::Product { ta, tb, out, compute, epilogue, .. } => {
                epilogue::expand([*ta, *tb], *out, *compute, *epilogue, ins)
            }
            Op::ScatterAdd { base: true, rows, out } => vec![index::without_base(*rows, *out, ins)],
            Op::ThinProduct { .. } => vec![thin_product::expand(b, self, key, ins)],
            Op::RmsNorm { .. } => norm::expand(self, ins),
            Op::RmsNormGrad { .. } => norm::expand_grad(b, self, ins),
            &Op::DoubleNorm { inner, outer } => double_norm::expand(b, DoubleNorm { inner, outer }, ins),
            &Op::DoubleNormGrad { inner, outer, of_sum, .. } => {
                double_norm::expand_grad(b, DoubleNorm { inner, outer }, of_sum, ins)
            }
            Op::Rope { freq, axis_of_freq, pairs, inverse, .. } => {
                vec![rope::expand(
                    b,
                    &RopeSpec { freq: *freq, axis_of_freq: axis_of_freq.clone(), pairs: *pairs },
                    *inverse,
                    ins,
                )]
            }
            Op::QkNormRope { .. } => vec![qk_norm_rope::expand(b, self, ins)],
            Op::QkNormRopeGrad { .. } => qk_norm_rope::expand_grad(b, self, ins),
            Op::CachedQkNormRope { .. } => cached_qk_norm_rope::expand(b, self, ins),
            Op::Gated { act, p } => vec![gated::expand(*act, *p, key, ins)],
            Op::GatedGrad { act, again, p } => gated::expand_grad(b, *act, *again, *p, key, ins),
            Op::GatedProduct { act } => gated_product::expand(b, *act, ins),
            Op::GatedProductGrad { act, again } => gated_product::expand_grad(b, *act, *again, ins),
            Op::ActivatedProduct { act, tb, bias } => activated_product::expand(b, *act, *tb, *bias, ins),
            Op::ActivatedProductGrad { act, tb, again, sum } => {
                activated_product::expand_grad(*act, *tb, *again, *sum, ins)
            }
            Op::Attention { scale, cap, mask, q, k } => {
                attention::expand(b, &Attend { scale: *scale, cap: *cap, mask: *mask, q: *q, k: *k }, ins)
            }
            Op::AttentionGrad { .. } => attention::expand_grad(b, self, ins),
            &Op::LinearAttention { scale, mask, q, k, rotary } => {
                vec![linear_attention::expand(b, &LinearAttend { scale, mask, q, k, rotary }, ins)]
            }
            &Op::LinearAttentionGrad { scale, mask, q, k, rotary, accumulate } => {
                linear_attention::expand_grad(b, &LinearAttend { scale, mask, q, k, rotary }, accumulate, ins)
            }
            Op::HeadLoss { compute, cap } => head_loss::expand(b, *compute, *cap, ins),
            Op::HeadLossGrad { base, kept, compute, cap } => {
                head_loss::expand_grad(b, [*base, *kept], *compute, *cap, ins)
            }
            Op::HeadLossTrain { base, compute, cap } => {
                head_loss::expand_train(b, *base, *compute, *cap, ins)
            }
            Op::LowRankNorm { scale } => vec![low_rank_norm::expand(*scale, ins)],
            Op::AdamW { .. } => adamw::expand(self, ins),
            Op::AdamW8 { .. } => adamw8::expand(self, ins),
            Op::Rank { .. } | Op::AllGather { .. } | Op::ReduceScatter { .. } | Op::AllReduce { .. } => {
                return collective::expand(b, self, ins);
            }
            Op::Region { body } | Op::Bundle { body } => crate::region::expand(b, body, ins),
        })
    }

    /// (input, output) pairs that may share memory exactly, in the order in which passes try them. Every kernel must support
    /// it: it reads all it needs of an element or a row of such an input before it writes there.
    pub fn in_place(&self) -> Vec<(usize, usize)> {
        let pairs: &[(usize, usize)] = match self {
            Op::Read { .. } | Op::Fill { .. } | Op::Iota { .. } => &[],
            Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::Pad { .. }
            | Op::Broadcast { .. } => &[],
            Op::Map { .. } | Op::Region { .. } => return crate::region::in_place(),
            Op::Bundle { body } => return crate::bundle::pairs(body),
            Op::Reduce { .. } | Op::Gather {} | Op::Resample { .. } | Op::Sample {} => &[],
            Op::Quantize { current: true, .. } | Op::Dequantize { .. } | Op::Requantize { .. } => &[],
            Op::Quantize { of, .. } => return quantize::in_place(*of),
            Op::Product { base, .. } | Op::ThinProduct { base, .. } | Op::ScatterAdd { base, .. } => {
                if *base { &[(2, 0)] } else { &[] }
            }
            Op::RowScatter {} | Op::Rope { .. } | Op::Dropout { .. } | Op::QkNormRope { .. } => &[(0, 0)],
            Op::RmsNorm { .. } | Op::DoubleNorm { .. } => &[(0, 0), (0, 1), (1, 0), (1, 1)],
            Op::RmsNormGrad { .. } => &[(0, 0), (2, 0), (3, 0)],
            Op::DoubleNormGrad { .. } => &[(0, 0), (0, 1), (1, 0), (1, 1), (4, 0), (4, 1), (5, 0), (5, 1)],
            Op::QkNormRopeGrad { .. } => &[(0, 0), (3, 0), (4, 0)],
            Op::CachedQkNormRope { .. } => return cached_qk_norm_rope::in_place(self),
            Op::Gated { .. } => &[(0, 0), (1, 0)],
            Op::GatedGrad { .. } => &[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)],
            // Of 8-bit operands.
            Op::GatedProduct { .. } => &[(5, 2)],
            Op::GatedProductGrad { .. } => &[(2, 0), (2, 1), (3, 0), (3, 1)],
            Op::ActivatedProduct { .. } => &[],
            Op::ActivatedProductGrad { again: true, .. } => &[(2, 1)],
            Op::ActivatedProductGrad { .. } => &[],
            Op::Attention { .. } | Op::AttentionGrad { .. } | Op::LinearAttention { .. } => &[],
            Op::LinearAttentionGrad { .. } => return linear_attention::in_place(self),
            Op::HeadLoss { .. } | Op::LowRankNorm { .. } => &[],
            Op::HeadLossGrad { kept: false, .. } => &[(5, 1)],
            Op::HeadLossGrad { kept: true, .. } => &[(6, 1)],
            Op::HeadLossTrain { .. } => &[(4, 4)],
            Op::AdamW { .. } => &[(0, 0), (2, 1), (3, 2), (1, 0), (1, 1), (1, 2)],
            Op::AdamW8 { .. } => &[(0, 0), (2, 1), (3, 2), (4, 3), (5, 4)],
            Op::Rank { .. } | Op::AllGather { .. } | Op::ReduceScatter { base: false, .. } => &[],
            Op::ReduceScatter { base: true, .. } => &[(1, 0)],
            Op::AllReduce { .. } => &[(0, 0)],
        };
        pairs.to_vec()
    }

    /// Whether all its float inputs must have the same type.
    pub fn has_one_type(&self) -> bool {
        matches!(self, Op::Concat { .. } | Op::Gated { .. } | Op::GatedGrad { .. })
    }

    /// The axis of a collective.
    pub fn axis(&self) -> Option<Axis> {
        match self {
            Op::Rank { axis }
            | Op::AllGather { axis, .. }
            | Op::ReduceScatter { axis, .. }
            | Op::AllReduce { axis, .. } => Some(*axis),
            _ => None,
        }
    }

    /// Number of ranks that exchange in it; `None` where it moves nothing between ranks.
    pub fn ways(&self) -> Option<usize> {
        match self {
            Op::AllGather { ways, .. } | Op::ReduceScatter { ways, .. } | Op::AllReduce { ways, .. } => {
                Some(*ways)
            }
            _ => None,
        }
    }

    /// The arithmetic of its matrix products, where it has any.
    pub fn compute(&self) -> Option<Compute> {
        match self {
            Op::Product { compute, .. }
            | Op::HeadLoss { compute, .. }
            | Op::HeadLossGrad { compute, .. }
            | Op::HeadLossTrain { compute, .. } => Some(*compute),
            _ => None,
        }
    }

    /// Arithmetic of one execution: multiplications and additions, as papers count them.
    pub fn flops(&self, node: &Node, g: &Graph) -> u64 {
        let ins: Vec<&TensorType> = node.ins.iter().map(|v| g.ty(*v)).collect();
        let moved: usize = node.outs.iter().map(TensorType::elements).sum();
        let elements = match self {
            Op::Read { .. } | Op::Fill { .. } | Op::Iota { .. } => 0,
            Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::Pad { .. }
            | Op::Broadcast { .. } => 0,
            Op::Gather {} | Op::RowScatter {} => 0,
            Op::Map { .. } | Op::Dequantize { .. } | Op::Requantize { .. } => moved,
            // Two source pixels along each axis.
            Op::Resample { .. } => 8 * moved,
            // One exponential for the softmax and one for the sum.
            Op::Sample {} => 4 * ins[0].elements(),
            Op::Reduce { .. } | Op::Quantize { .. } => ins[0].elements(),
            Op::Product { ta, .. } => 2 * product::inner(*ta, ins[0]) * node.outs[0].elements(),
            Op::ThinProduct { form, p, .. } => thin_product::flops(*form, *p, &ins, &node.outs[0]),
            Op::RmsNorm { .. } => 4 * ins[0].elements(),
            Op::RmsNormGrad { .. } => 8 * ins[0].elements(),
            Op::DoubleNorm { .. } => 8 * ins[0].elements(),
            Op::DoubleNormGrad { .. } => 16 * ins[0].elements(),
            Op::Rope { .. } => 3 * ins[0].elements(),
            Op::QkNormRope { .. } => 7 * ins[0].elements(),
            Op::QkNormRopeGrad { .. } => 14 * ins[0].elements(),
            Op::CachedQkNormRope { .. } => 7 * ins[0].elements(),
            Op::Gated { .. } => 5 * node.outs[0].elements(),
            Op::GatedGrad { .. } => 10 * node.outs[0].elements(),
            Op::GatedProduct { .. } => {
                gated_product::flops(&ins, node.outs[0].dims[1], 5 * node.outs[1].elements())
            }
            Op::GatedProductGrad { .. } => {
                gated_product::flops(&ins, node.outs[0].dims[1], 10 * node.outs[0].elements())
            }
            Op::ActivatedProduct { .. } | Op::ActivatedProductGrad { .. } => {
                gated_product::flops(&ins, node.outs[0].dims[1], 8 * node.outs[0].elements())
            }
            Op::Dropout { .. } => 2 * ins[0].elements(),
            Op::ScatterAdd { .. } => ins[0].elements(),
            // Two products forward, five backward, over the pairs that the mask lets through.
            Op::Attention { mask, q, k, .. } => {
                4 * attention::pairs(*mask, *q, *k, &ins) * ins[0].dims[1] * ins[0].dims[2]
            }
            Op::AttentionGrad { mask, q, k, .. } => {
                10 * attention::pairs(*mask, *q, *k, &ins) * ins[0].dims[1] * ins[0].dims[2]
            }
            &Op::LinearAttention { scale, mask, q, k, rotary } => {
                LinearAttend { scale, mask, q, k, rotary }.flops(&ins)
            }
            &Op::LinearAttentionGrad { scale, mask, q, k, rotary, accumulate: _ } => {
                LinearAttend { scale, mask, q, k, rotary }.grad_flops(&ins)
            }
            Op::HeadLoss { .. } => 2 * ins[0].elements() * ins[1].dims[0],
            Op::HeadLossGrad { kept: true, .. } => 4 * ins[0].elements() * ins[1].dims[0],
            Op::HeadLossGrad { .. } | Op::HeadLossTrain { .. } => 6 * ins[0].elements() * ins[1].dims[0],
            Op::LowRankNorm { .. } => low_rank_norm::flops(&ins),
            Op::AdamW { .. } | Op::AdamW8 { .. } => 12 * ins[0].elements(),
            Op::Rank { .. } | Op::AllGather { .. } => 0,
            Op::ReduceScatter { ways, .. } | Op::AllReduce { ways, .. } => ways * node.outs[0].elements(),
            Op::Region { body } | Op::Bundle { body } => {
                return body.nodes.iter().map(|n| n.op.flops(n, body)).sum();
            }
        };
        elements as u64
    }
}
