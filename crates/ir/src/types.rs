//! Element types and tensor types. Extents are static capacities; strides live in `plan::View`.

use std::fmt;

use crate::block8::{e4m4_from_f32, e4m4_to_f32};
use crate::fp8::{e4m3_from_f32, e4m3_to_f32, e5m2_from_f32, e5m2_to_f32};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// For the oracle only; no backend computes in it.
    F64,
    F32,
    BF16,
    /// An 8-bit float up to 448; only cast and multiplied.
    E4M3,
    /// An 8-bit float up to 57344; only cast and multiplied.
    E5M2,
    /// An unsigned 8-bit float up to 496 for second moments; only the optimiser's update reads it.
    E4M4,
    I32,
    /// Integers from 0 to 255, such as pixels. The host writes them; they are only moved and cast.
    U8,
}

impl DType {
    pub const ALL: [DType; 8] =
        [DType::F64, DType::F32, DType::BF16, DType::E4M3, DType::E5M2, DType::E4M4, DType::I32, DType::U8];

    pub fn bytes(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::BF16 => 2,
            DType::E4M3 | DType::E5M2 | DType::E4M4 | DType::U8 => 1,
        }
    }

    pub fn is_float(self) -> bool {
        !matches!(self, DType::I32 | DType::U8)
    }

    /// Whether it is one of the 8-bit floats.
    pub fn is_fp8(self) -> bool {
        matches!(self, DType::E4M3 | DType::E5M2 | DType::E4M4)
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
            DType::E4M4 => "e4m4",
            DType::I32 => "i32",
            DType::U8 => "u8",
        }
    }

    /// The type in which sums over many elements are kept: weight gradients, statistics, losses.
    pub fn accumulator(self) -> DType {
        if self == DType::BF16 || self.is_fp8() { DType::F32 } else { self }
    }

    /// Rounds a value computed in f64 to this type, to nearest even.
    pub fn round(self, x: f64) -> f64 {
        match self {
            DType::F64 => x,
            DType::F32 => x as f32 as f64,
            DType::BF16 => bf16_to_f32(bf16_from_f32(x as f32)) as f64,
            DType::E4M3 => e4m3_to_f32(e4m3_from_f32(x as f32)) as f64,
            DType::E5M2 => e5m2_to_f32(e5m2_from_f32(x as f32)) as f64,
            DType::E4M4 => e4m4_to_f32(e4m4_from_f32(x as f32)) as f64,
            DType::I32 | DType::U8 => x,
        }
    }
}

/// The largest magnitude of finite values, 0 of none.
pub fn amax(values: &[f32]) -> f32 {
    // Lanes without a common running maximum, so that the compiler can use vectors.
    let (vectors, rest) = values.as_chunks::<16>();
    let mut most = [0.0_f32; 16];
    for vector in vectors {
        most.iter_mut().zip(vector).for_each(|(most, x)| *most = most.max(x.abs()));
    }
    rest.iter().chain(&most).fold(0.0, |most, x| most.max(x.abs()))
}

/// Rounds to the nearest bf16, ties to even; a NaN stays a NaN.
pub fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Rounds stochastically to one of the two neighbouring bf16; the mean over all values of `draw` is x.
#[inline(always)]
pub fn bf16_drawn(x: f32, draw: u16) -> u16 {
    (x.to_bits().wrapping_add(draw as u32) >> 16) as u16
}

pub fn bf16_to_f32(x: u16) -> f32 {
    f32::from_bits((x as u32) << 16)
}

pub type Dims = Vec<usize>;

/// Shape and element type of one value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    pub dtype: DType,
    pub dims: Dims,
}

impl TensorType {
    pub fn new(dtype: DType, dims: impl Into<Dims>) -> Self {
        TensorType { dtype, dims: dims.into() }
    }

    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes()
    }

    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// The extent of the last axis, on which norms and gated activations work.
    pub fn last(&self) -> usize {
        *self.dims.last().expect("a tensor with at least one axis")
    }

    /// The number of rows when all axes but the last are folded into one.
    pub fn rows(&self) -> usize {
        self.dims[..self.rank() - 1].iter().product()
    }

    pub fn with(&self, dtype: DType) -> Self {
        TensorType { dtype, dims: self.dims.clone() }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.dims.iter().map(|d| d.to_string()).collect();
        write!(f, "{}[{}]", self.dtype.name(), dims.join(","))
    }
}

/// Row-major strides, in elements.
pub fn contiguous_strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i];
    }
    strides
}
