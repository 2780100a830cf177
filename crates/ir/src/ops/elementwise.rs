//! The table of elementwise functions: value, gradient, number of arguments.

use super::{arity, normal};
use crate::attr::Attr;
use crate::fp8;
use crate::ops::{Grads, Vjp};
use crate::types::{DType, TensorType};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Elementwise {
    Neg,
    Exp,
    Log,
    Sqrt,
    Rsqrt,
    Recip,
    Square,
    Sin,
    Cos,
    Tanh,
    Relu,
    /// 1 above 0, else 0: the slope of `Relu`.
    Step,
    Silu,
    SiluSlope,
    /// The tanh form.
    Gelu,
    GeluSlope,
    /// The exact form: x times the standard normal distribution function at x.
    GeluExact,
    GeluExactSlope,
    /// 1 where the argument is a finite number, else 0.
    Finite,
    /// The argument, which differentiation treats as a constant.
    StopGradient,
    /// The scale of a tensor in an 8-bit type with this largest magnitude: `fp8::scale`.
    Fp8Scale(DType),
    Cast(DType),
    Scale(f64),
    Offset(f64),
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
    Less,
    LessEqual,
    Equal,
    /// The second argument where the first is not 0, else the third.
    Select,
}

use Elementwise as E;

/// The functions without a parameter, by name.
pub const NAMED: [(&str, E); 29] = [
    ("neg", E::Neg),
    ("exp", E::Exp),
    ("log", E::Log),
    ("sqrt", E::Sqrt),
    ("rsqrt", E::Rsqrt),
    ("recip", E::Recip),
    ("square", E::Square),
    ("sin", E::Sin),
    ("cos", E::Cos),
    ("tanh", E::Tanh),
    ("relu", E::Relu),
    ("step", E::Step),
    ("silu", E::Silu),
    ("silu_slope", E::SiluSlope),
    ("gelu", E::Gelu),
    ("gelu_slope", E::GeluSlope),
    ("gelu_exact", E::GeluExact),
    ("gelu_exact_slope", E::GeluExactSlope),
    ("finite", E::Finite),
    ("stop_gradient", E::StopGradient),
    ("add", E::Add),
    ("sub", E::Sub),
    ("mul", E::Mul),
    ("div", E::Div),
    ("max", E::Max),
    ("min", E::Min),
    ("less", E::Less),
    ("less_equal", E::LessEqual),
    ("equal", E::Equal),
];

impl Attr for Elementwise {
    fn to_text(&self) -> String {
        match self {
            E::Cast(dtype) => format!("cast:{}", dtype.name()),
            E::Fp8Scale(dtype) => format!("fp8_scale:{}", dtype.name()),
            E::Scale(by) => format!("scale:{by}"),
            E::Offset(by) => format!("offset:{by}"),
            E::Select => "select".into(),
            plain => NAMED.iter().find(|(_, f)| f == plain).expect("every plain function is named").0.into(),
        }
    }
    fn read(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("cast", dtype)) => Ok(E::Cast(DType::read(dtype)?)),
            Some(("fp8_scale", dtype)) => Ok(E::Fp8Scale(DType::read(dtype)?)),
            Some(("scale", by)) => Ok(E::Scale(f64::read(by)?)),
            Some(("offset", by)) => Ok(E::Offset(f64::read(by)?)),
            _ if text == "select" => Ok(E::Select),
            _ => NAMED
                .iter()
                .find(|(n, _)| *n == text)
                .map(|(_, f)| *f)
                .ok_or_else(|| format!("`{text}` is no function")),
        }
    }
}

/// sqrt(2 / pi), and the cubic coefficient of the tanh form of GELU.
pub const GELU_INNER: f64 = 0.797_884_560_802_865_4;
pub const GELU_CUBIC: f64 = 0.044_715;

impl Elementwise {
    pub fn arguments(self) -> usize {
        match self {
            E::Add | E::Sub | E::Mul | E::Div | E::Max | E::Min | E::Less | E::LessEqual | E::Equal => 2,
            E::Select => 3,
            _ => 1,
        }
    }

    /// The value in f64: the oracle's definition.
    pub fn eval(self, x: &[f64]) -> f64 {
        let truth = |b: bool| if b { 1.0 } else { 0.0 };
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let gelu_tanh = |x: f64| (GELU_INNER * (x + GELU_CUBIC * x * x * x)).tanh();
        match self {
            E::Neg => -x[0],
            E::Exp => x[0].exp(),
            E::Log => x[0].ln(),
            E::Sqrt => x[0].sqrt(),
            E::Rsqrt => 1.0 / x[0].sqrt(),
            E::Recip => 1.0 / x[0],
            E::Square => x[0] * x[0],
            E::Sin => x[0].sin(),
            E::Cos => x[0].cos(),
            E::Tanh => x[0].tanh(),
            E::Relu => x[0].max(0.0),
            E::Step => truth(x[0] > 0.0),
            E::Silu => x[0] * sigmoid(x[0]),
            E::SiluSlope => {
                let s = sigmoid(x[0]);
                s * (1.0 + x[0] * (1.0 - s))
            }
            E::Gelu => 0.5 * x[0] * (1.0 + gelu_tanh(x[0])),
            E::GeluSlope => {
                let t = gelu_tanh(x[0]);
                let inner = GELU_INNER * (1.0 + 3.0 * GELU_CUBIC * x[0] * x[0]);
                0.5 * (1.0 + t) + 0.5 * x[0] * (1.0 - t * t) * inner
            }
            E::GeluExact => x[0] * normal::cdf(x[0]),
            E::GeluExactSlope => normal::cdf(x[0]) + x[0] * normal::density(x[0]),
            E::Finite => truth(x[0].is_finite()),
            E::StopGradient => x[0],
            E::Fp8Scale(dtype) => fp8::scale(dtype, x[0] as f32) as f64,
            E::Cast(DType::I32) => x[0].trunc(),
            E::Cast(_) => x[0],
            E::Scale(by) => x[0] * by,
            E::Offset(by) => x[0] + by,
            E::Add => x[0] + x[1],
            E::Sub => x[0] - x[1],
            E::Mul => x[0] * x[1],
            E::Div => x[0] / x[1],
            E::Max => x[0].max(x[1]),
            E::Min => x[0].min(x[1]),
            E::Less => truth(x[0] < x[1]),
            E::LessEqual => truth(x[0] <= x[1]),
            E::Equal => truth(x[0] == x[1]),
            E::Select => {
                if x[0] != 0.0 {
                    x[1]
                } else {
                    x[2]
                }
            }
        }
    }
}

pub fn infer(f: E, ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, f.arguments())?;
    if let Some(other) = ins.iter().find(|t| **t != ins[0]) {
        return Err(format!("arguments are {} and {other}: they must agree", ins[0]));
    }
    let dtype = if let E::Cast(dtype) = f { dtype } else { ins[0].dtype };
    if let E::Fp8Scale(of) = f
        && !of.is_fp8()
    {
        return Err(format!("{} is no 8-bit float and has no scale", of.name()));
    }
    if dtype == DType::U8 {
        return Err("bytes come from the host: nothing is cast to u8 or computed in it".into());
    }
    if ins[0].dtype.is_fp8() && !matches!(f, E::Cast(_)) {
        return Err(format!("{} is only cast and multiplied: cast it first", ins[0]));
    }
    Ok(vec![ins[0].with(dtype)])
}

pub fn vjp<'g>(f: E, at: &Vjp<'_, 'g>) -> Grads<'g> {
    let Some(d) = at.d[0] else { return vec![None; at.ins.len()] };
    let x = at.ins[0];
    let y = at.outs[0];
    match f {
        E::Neg => vec![Some(-d)],
        E::Exp => vec![Some(d * y)],
        E::Log => vec![Some(d.div(x))],
        E::Sqrt => vec![Some(d.div(y).scale(0.5))],
        E::Rsqrt => vec![Some((d * y * y.square()).scale(-0.5))],
        E::Recip => vec![Some(-(d * y.square()))],
        E::Square => vec![Some((d * x).scale(2.0))],
        E::Sin => vec![Some(d * x.map(E::Cos))],
        E::Cos => vec![Some(-(d * x.map(E::Sin)))],
        E::Tanh => vec![Some(d - d * y.square())],
        E::Relu => vec![Some(d * x.map(E::Step))],
        E::Silu => vec![Some(d * x.map(E::SiluSlope))],
        E::Gelu => vec![Some(d * x.map(E::GeluSlope))],
        E::GeluExact => vec![Some(d * x.map(E::GeluExactSlope))],
        E::Cast(_) if !x.dtype().is_float() => vec![None],
        E::Cast(_) => vec![Some(d.cast(x.dtype()))],
        E::Scale(by) => vec![Some(d.scale(by))],
        E::Offset(_) => vec![Some(d)],
        E::Add => vec![Some(d), Some(d)],
        E::Sub => vec![Some(d), at.needs[1].then(|| -d)],
        E::Mul => vec![at.needs[0].then(|| d * at.ins[1]), at.needs[1].then(|| d * x)],
        E::Div => {
            vec![at.needs[0].then(|| d.div(at.ins[1])), at.needs[1].then(|| -(d * y).div(at.ins[1]))]
        }
        E::Max | E::Min => {
            let first = if f == E::Max { at.ins[1].less_equal(x) } else { x.less_equal(at.ins[1]) };
            vec![at.needs[0].then(|| d * first), at.needs[1].then(|| d - d * first)]
        }
        E::Select => {
            let (ty, condition) = (d.ty(), x);
            let zero = d.b.fill(0.0, ty.dtype, &ty.dims);
            vec![
                None,
                at.needs[1].then(|| condition.select(d, zero)),
                at.needs[2].then(|| condition.select(zero, d)),
            ]
        }
        // Steps and comparisons have slope 0 where they are differentiable; slope functions are not differentiated again.
        E::Step | E::Finite | E::StopGradient | E::Fp8Scale(_) | E::Less | E::LessEqual | E::Equal => {
            vec![None; at.ins.len()]
        }
        E::SiluSlope | E::GeluSlope | E::GeluExactSlope => panic!("{f:?} is not differentiated"),
    }
}
