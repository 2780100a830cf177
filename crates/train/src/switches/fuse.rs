//! Switches of fusions, `fuse.*`: operations that run as one launch.

use std::collections::{HashMap, HashSet};

use flatout_ir::ops::elementwise::Elementwise;
use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::ops::quantize::Source;
use flatout_ir::passes::input_path;
use flatout_ir::passes::layout::REGION;
use flatout_ir::{Class as SlotClass, DType, Launch, Op, OpKind, Role, View};

use super::active::{CompiledView, on};
use super::value::{Toggle, field};
use super::{AXOLOTL, Class, GUIDES, HF, ROW, Settle, Switch, elsewhere};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fuse {
    pub qkv: Toggle,
    pub gate_up: Toggle,
    pub norm: Toggle,
    pub elementwise: Toggle,
    pub activation: Toggle,
    pub loss: Toggle,
    pub optimizer: Toggle,
}

impl Default for Fuse {
    fn default() -> Fuse {
        let on = Toggle::On;
        Fuse { qkv: on, gate_up: on, norm: on, elementwise: on, activation: on, loss: on, optimizer: on }
    }
}

pub(super) const ROWS: [Switch; 7] = [QKV, GATE_UP, NORM, ELEMENTWISE, ACTIVATION, LOSS, OPTIMIZER];

/// The state of a fusion that has nothing to apply to in the model.
const NOTHING: &str = "nothing to fuse";

/// Resolves a fusion: the compiler's option is the requested value.
macro_rules! as_requested {
    ($field:ident => $option:ident) => {
        Settle::ByModel(|s| {
            s.settled.options.$option = s.requested.fuse.$field == Toggle::On;
            Ok(())
        })
    };
}

pub const QKV: Switch = Switch {
    name: "fuse.qkv",
    doc: "Merges query, key and value projections into one product.",
    field: field!(fuse.qkv),
    class: Class::Bounded,
    off: Some("off"),
    settle: as_requested!(qkv => fuse_qkv),
    active: fused_qkv,
    guides_word: "fused QKV",
    elsewhere: &[elsewhere(GUIDES, "fused_qkv", "fuse.qkv"), elsewhere(GUIDES, "use_fused_qkv", "fuse.qkv")],
    ..ROW
};

/// Whether attention reads its values from a slice of a wider tensor, or from a sum with such a slice.
fn fused_qkv(view: &CompiledView<'_>) -> &'static str {
    let mut added_to: HashMap<usize, bool> = HashMap::new();
    let mut fused = vec![];
    for launch in &view.grad.launches {
        if launch.op.kind() == OpKind::Attention {
            let values = &launch.ins[2];
            fused.push(is_slice(values) || added_to.get(&values.offset) == Some(&true));
        }
        let is_elementwise = matches!(launch.op.kind(), OpKind::Map | OpKind::Region);
        let is_sum = is_elementwise && launch.ins.iter().any(is_slice);
        added_to.extend(launch.outs.iter().flatten().map(|out| (out.offset, is_sum)));
    }
    if fused.is_empty() { NOTHING } else { on(fused.into_iter().all(|is_fused| is_fused)) }
}

/// Whether a tensor is a slice of a wider one, as after a merged product.
fn is_slice(view: &View) -> bool {
    let row: usize = view.dims[1..].iter().product();
    view.dims[0] > 1 && view.strides[0] > row
}

pub const GATE_UP: Switch = Switch {
    name: "fuse.gate_up",
    doc: "Merges gate and up projections into one product.",
    field: field!(fuse.gate_up),
    class: Class::Bounded,
    off: Some("off"),
    settle: as_requested!(gate_up => fuse_gate_up),
    active: fused_gates,
    guides_word: "fused gate/up",
    elsewhere: &[
        elsewhere(GUIDES, "fused_mlp", "fuse.gate_up"),
        elsewhere(AXOLOTL, "liger_glu_activation", "fuse.gate_up"),
    ],
    ..ROW
};

/// Whether the gate and the values it multiplies come from one product. If two products read different tensors, there is nothing to
/// merge.
fn fused_gates(view: &CompiledView<'_>) -> &'static str {
    let mut written: HashMap<usize, &Launch> = HashMap::new();
    let (mut merged, mut apart) = (false, false);
    for l in &view.grad.launches {
        merged |= l.op.kind() == OpKind::GatedProduct;
        if matches!(l.op, Op::Gated { .. } | Op::Quantize { of: Source::Gated(_), .. }) {
            let reads = [0, 1].map(|i| match written.get(&l.ins[i].offset) {
                Some(writer) if writer.op.kind() == OpKind::Product => Some(writer.ins[0].offset),
                _ => None,
            });
            merged |= is_slice(&l.ins[0]);
            apart |= !is_slice(&l.ins[0]) && reads[0].is_some() && reads[0] == reads[1];
        }
        written.extend(l.outs.iter().flatten().map(|v| (v.offset, l)));
    }
    match (apart, merged) {
        (true, _) => "off",
        (false, true) => "on",
        (false, false) => NOTHING,
    }
}

/// Whether an operation is a gated activation, including those that quantise in the same pass or are part of a product.
fn is_gated(op: &Op) -> bool {
    matches!(op, Op::Gated { .. } | Op::GatedProduct { .. } | Op::Quantize { of: Source::Gated(_), .. })
}

pub const NORM: Switch = Switch {
    name: "fuse.norm",
    doc: "Fuses a residual addition with the norm after it, and q/k norm with the rotation.",
    field: field!(fuse.norm),
    class: Class::Bounded,
    off: Some("off"),
    settle: as_requested!(norm => fuse_norm),
    active: fused_norms,
    guides_word: "fused norms",
    elsewhere: &[
        elsewhere(AXOLOTL, "liger_rms_norm", "fuse.norm"),
        elsewhere(GUIDES, "fused_rmsnorm", "fuse.norm"),
        elsewhere(GUIDES, "fused_norm", "fuse.norm"),
    ],
    ..ROW
};

/// `on` if a norm is fused with the addition before it or the rotation after it. A norm that could be fused and is not reads the output
/// of an addition, which may be part of a product, or is read by a rotation.
fn fused_norms(view: &CompiledView<'_>) -> &'static str {
    let norms = || view.grad.launches.iter().filter_map(|l| is_norm(&l.op));
    if norms().any(|adds_residual| adds_residual) || view.has(OpKind::QkNormRope) {
        return "on";
    }
    let adds = |op: &Op| matches!(op, Op::Map { f: Elementwise::Add } | Op::Product { base: true, .. });
    let apart = view.follows(|writer, reader| match reader.op.kind() {
        _ if is_norm(&reader.op).is_some() => adds(&writer.op),
        OpKind::Rope => writer.op.kind() == OpKind::RmsNorm,
        _ => false,
    });
    if apart || norms().next().is_none() { "off" } else { NOTHING }
}

/// Whether an operation is a norm, including those that quantise in the same pass, and if so whether it adds a residual.
fn is_norm(op: &Op) -> Option<bool> {
    match op {
        Op::RmsNorm { residual, .. } | Op::Quantize { of: Source::Norm(_, residual), .. } => Some(*residual),
        Op::DoubleNorm { .. } => Some(true),
        _ => None,
    }
}

pub const ELEMENTWISE: Switch = Switch {
    name: "fuse.elementwise",
    doc: "Fuses chains of elementwise operations into one pass over memory.",
    field: field!(fuse.elementwise),
    class: Class::Bounded,
    off: Some("off"),
    settle: as_requested!(elementwise => fuse_elementwise),
    active: fused_elementwise,
    guides_word: "torch.compile default",
    elsewhere: &[elsewhere(GUIDES, "fuse_pointwise", "fuse.elementwise")],
    ..ROW
};

/// Whether elementwise operations of one shape that follow one another run together; `nothing` if there are none.
fn fused_elementwise(view: &CompiledView<'_>) -> &'static str {
    let shape = |l: &Launch| l.outs[0].as_ref().map(|v| v.dims.clone());
    let is_map = |l: &Launch| l.op.kind() == OpKind::Map;
    let apart =
        || view.follows(|writer, reader| is_map(writer) && is_map(reader) && shape(writer) == shape(reader));
    let is_joined = |l: &Launch| is_gated(&l.op) || is_layer(l);
    if view.has(OpKind::Region) || view.has(OpKind::Bundle) {
        "on"
    } else if apart() {
        "off"
    } else if view.grad.launches.iter().any(is_joined) || view.has(OpKind::ThinProduct) {
        "on"
    } else {
        NOTHING
    }
}

/// Whether a product adds its bias or applies its activation.
fn is_layer(launch: &Launch) -> bool {
    match launch.op {
        Op::Product { epilogue, .. } => epilogue.has_bias() || epilogue.has_gelu(),
        Op::ActivatedProduct { .. } => true,
        _ => false,
    }
}

pub const ACTIVATION: Switch = Switch {
    name: "fuse.activation",
    doc: "Fuses activations, gated or not, and their gradients into the products before them, on GPUs.",
    field: field!(fuse.activation),
    class: Class::Bounded,
    off: Some("off"),
    settle: as_requested!(activation => fuse_activation),
    active: fused_activations,
    guides_word: "fused SwiGLU, fused GELU",
    elsewhere: &[
        elsewhere(AXOLOTL, "liger_swiglu", "fuse.activation"),
        elsewhere(GUIDES, "fused_swiglu", "fuse.activation"),
    ],
    ..ROW
};

/// Whether products apply activations. A product that could and does not is read by an activation, on a device that has a kernel for
/// both.
fn fused_activations(view: &CompiledView<'_>) -> &'static str {
    let kinds = [
        OpKind::GatedProduct,
        OpKind::GatedProductGrad,
        OpKind::ActivatedProduct,
        OpKind::ActivatedProductGrad,
    ];
    if kinds.into_iter().any(|kind| view.has(kind)) {
        return "on";
    }
    let has_kernel = |op: OpKind| view.target.kernels.iter().any(|row| row.op == op);
    let is_product = |op: &Op, is_gated: bool| match *op {
        Op::Product { ta: false, tb, base: false, epilogue, out: DType::BF16, .. } => match epilogue {
            Epilogue::None => tb || !is_gated,
            Epilogue::Bias => !is_gated,
            _ => false,
        },
        _ => false,
    };
    let reads_slice = |l: &Launch| is_slice(&l.ins[0]);
    let apart = || {
        view.follows(|writer, reader| {
            let is_bf16 = !writer.ins.is_empty() && is_bf16(writer);
            match reader.op {
                Op::Gated { p: 0.0, .. } => is_bf16 && is_product(&writer.op, true) && reads_slice(reader),
                Op::Map { f: Elementwise::Gelu | Elementwise::GeluExact } => {
                    is_bf16 && is_product(&writer.op, false) && !reads_slice(reader)
                }
                _ => false,
            }
        })
    };
    let has_gelu =
        |l: &Launch| matches!(l.op, Op::Product { epilogue, .. } if epilogue.has_gelu() && is_bf16(l));
    let is_unfused = || apart() || view.grad.launches.iter().any(has_gelu);
    if has_kernel(OpKind::GatedProduct) && is_unfused() { "off" } else { NOTHING }
}

fn is_bf16(launch: &Launch) -> bool {
    launch.ins[0].dtype == DType::BF16
}

pub const LOSS: Switch = Switch {
    name: "fuse.loss",
    doc: "Fuses head and loss, without storing the logits of all tokens.",
    field: field!(fuse.loss),
    class: Class::Bounded,
    off: Some("off"),
    settle: as_requested!(loss => fuse_loss),
    active: fused_loss,
    guides_word: "fused cross entropy",
    elsewhere: &[
        elsewhere(AXOLOTL, "liger_fused_linear_cross_entropy", "fuse.loss"),
        elsewhere(AXOLOTL, "cut_cross_entropy", "fuse.loss"),
        elsewhere(HF, "use_liger_kernel", "fuse.loss"),
        elsewhere(GUIDES, "fused_cross_entropy", "fuse.loss"),
    ],
    ..ROW
};

/// Whether logits are never stored. For images they always are, because there are few classes and targets are spread over all of them.
/// If answers are compared, the gradient of a row is known only after the comparison, so the logits are computed twice and still not
/// stored.
fn fused_loss(view: &CompiledView<'_>) -> &'static str {
    let reads = |input: &str| view.plans.slot(&input_path(Role::GRAD, input)).is_some();
    let reads_images = reads("pixels") || reads("parts");
    let compares = reads("answer_of") && view.has(OpKind::HeadLossGrad);
    match view.has(OpKind::HeadLossTrain) || compares {
        true => "on",
        false if reads_images => NOTHING,
        false => "off",
    }
}

pub const OPTIMIZER: Switch = Switch {
    name: "fuse.optimizer",
    doc: "Updates a contiguous region of parameters in one pass.",
    field: field!(fuse.optimizer),
    class: Class::Bitwise,
    off: Some("off"),
    settle: as_requested!(optimizer => fuse_optimizer),
    active: |view| on(updates_regions(view)),
    guides_word: "fused AdamW",
    elsewhere: &[
        elsewhere(HF, "adamw_torch_fused", "fuse.optimizer=on"),
        elsewhere(GUIDES, "fused_adamw", "fuse.optimizer"),
        elsewhere(GUIDES, "use_fused_adamw", "fuse.optimizer"),
        elsewhere(GUIDES, "use_fused_optimizer", "fuse.optimizer"),
        elsewhere(GUIDES, "foreach", "fuse.optimizer"),
    ],
    ..ROW
};

/// Whether updates run over whole regions, or over ranks' shares of them, with fewer launches than tensors.
fn updates_regions(view: &CompiledView<'_>) -> bool {
    let wholes: HashSet<usize> = view
        .plans
        .slots
        .iter()
        .filter(|s| s.class == SlotClass::Weight && s.is_whole && s.path.starts_with(REGION))
        .map(|s| s.view.elements())
        .collect();
    view.updates().all(|l| wholes.contains(&l.ins[0].elements()))
}
