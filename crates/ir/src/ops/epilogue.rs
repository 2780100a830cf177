//! Epilogues of a product, applied before its result is stored: a bias, GELU or ReLU, and what their gradients need.
//!
//! `Bias`, `Gelu`, `BiasGelu` and `Relu` appear in forward graphs and are differentiated; `GeluGrad` fuses into the products of
//! their gradients, so neither direction needs an extra pass over memory. A product with an epilogue is a single matrix, and
//! only one without an epilogue can add to a base.

use super::{expect, expect_float};
use crate::attr::named;
use crate::builder::Tensor;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::product::{self, Compute};
use crate::ops::{Op, Vjp};
use crate::types::{DType, TensorType};

named! {
    /// With a, b [K, N] and c = a b, c [M, N]:
    pub enum Epilogue {
        None = "none",
        /// (.., bias [N]) -> c + bias in every row.
        Bias = "bias",
        /// GELU in its tanh form -> gelu(c), c.
        Gelu = "gelu",
        /// (.., bias [N]) -> gelu(h), h = c + bias.
        BiasGelu = "bias_gelu",
        /// -> relu(c).
        Relu = "relu",
        /// (.., h [M, N]) -> c times the slope of GELU at h.
        GeluGrad = "gelu_grad",
    }
    omitted None
}

impl Epilogue {
    /// Whether it reads a third tensor: the bias, or h.
    pub fn takes_one(self) -> bool {
        matches!(self, Epilogue::Bias | Epilogue::BiasGelu | Epilogue::GeluGrad)
    }

    pub fn has_bias(self) -> bool {
        matches!(self, Epilogue::Bias | Epilogue::BiasGelu)
    }

    pub fn has_gelu(self) -> bool {
        matches!(self, Epilogue::Gelu | Epilogue::BiasGelu)
    }

    pub fn takes_base(self) -> bool {
        self == Epilogue::None
    }
}

/// The outputs of a product of type `c`; `extra` are the inputs of the epilogue.
pub fn infer(
    epilogue: Epilogue,
    c: TensorType,
    extra: Option<&TensorType>,
) -> Result<Vec<TensorType>, String> {
    if epilogue != Epilogue::None && c.rank() != 2 {
        return Err(format!("{c}: a product with an epilogue is one matrix"));
    }
    match (epilogue, extra) {
        (Epilogue::Bias | Epilogue::BiasGelu, Some(bias)) => expect_float("the bias", bias, &c.dims[1..])?,
        (Epilogue::GeluGrad, Some(h)) => expect("h", h, c.dtype, &c.dims)?,
        _ => {}
    }
    Ok(match epilogue {
        Epilogue::None | Epilogue::Bias | Epilogue::Relu | Epilogue::GeluGrad => vec![c],
        Epilogue::Gelu | Epilogue::BiasGelu => vec![c.clone(), c],
    })
}

/// The gradient of the product itself.
pub fn vjp<'g>(epilogue: Epilogue, at: &Vjp<'_, 'g>) -> Option<Tensor<'g>> {
    match epilogue {
        Epilogue::None | Epilogue::Bias => at.d[0],
        // The result is above 0 exactly where the product is.
        Epilogue::Relu => at.d[0].map(|dy| dy * at.outs[0].map(E::Step)),
        Epilogue::Gelu | Epilogue::BiasGelu => {
            let through = at.d[0].map(|dy| dy * at.outs[1].map(E::GeluSlope));
            [through, at.d[1]].into_iter().flatten().reduce(|a, b| a + b)
        }
        Epilogue::GeluGrad => panic!("{epilogue:?} is not differentiated"),
    }
}

/// The gradient of a bias, from that of the product.
pub fn bias_gradient<'g>(d: Tensor<'g>, bias: Tensor<'g>) -> Tensor<'g> {
    d.sum(0).reshape(&bias.dims()).cast(bias.dtype())
}

/// Expands to plain products and elementwise operations.
pub fn expand<'g>(
    [ta, tb]: [bool; 2],
    out: DType,
    compute: Compute,
    epilogue: Epilogue,
    ins: &[Tensor<'g>],
) -> Vec<Tensor<'g>> {
    let (a, wide) = (ins[0], out.accumulator());
    let c = |dtype| a.b.op(product::plain(ta, tb, dtype, compute), &ins[..2]);
    let with_bias = || {
        let (c, bias) = (c(wide), ins[2].cast(wide));
        (c + bias.reshape(&[1, c.dims()[1]])).cast(out)
    };
    match epilogue {
        Epilogue::None => vec![c(out)],
        Epilogue::Relu => vec![c(out).map(E::Relu)],
        Epilogue::Bias => vec![with_bias()],
        Epilogue::Gelu | Epilogue::BiasGelu => {
            let h = if epilogue.has_bias() { with_bias() } else { c(out) };
            vec![h.map(E::Gelu), h]
        }
        Epilogue::GeluGrad => vec![(c(wide) * ins[2].cast(wide).map(E::GeluSlope)).cast(out)],
    }
}

/// The product `op` with an epilogue, where it can have one.
pub fn with(op: &Op, epilogue: Epilogue) -> Option<Op> {
    match *op {
        Op::Product { ta, tb, out, base, compute, epilogue: Epilogue::None }
            if !base || epilogue.takes_base() =>
        {
            Some(Op::Product { ta, tb, out, base, compute, epilogue })
        }
        _ => None,
    }
}
