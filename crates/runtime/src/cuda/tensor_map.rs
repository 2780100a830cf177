//! TMA tensor maps: describe how sm_90 and later load boxes of a tensor into shared memory, swizzled.
//!
//! Elements of a box outside the tensor are zero-filled.

use flatout_ir::types::DType;

use super::argument::Block;
use super::context::CudaError;

/// How rows of a box are swizzled over the banks of shared memory: 16-byte chunks are permuted by exclusive or within rows of
/// this many bytes. The innermost extent of a box is at most that many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    None,
    Bytes32,
    Bytes64,
    Bytes128,
}

impl Swizzle {
    /// `CUtensorMapSwizzle`.
    pub(super) fn code(self) -> i32 {
        match self {
            Swizzle::None => 0,
            Swizzle::Bytes32 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes128 => 3,
        }
    }

    fn most_bytes(self, element: u64) -> u64 {
        match self {
            Swizzle::None => 256 * element,
            Swizzle::Bytes32 => 32,
            Swizzle::Bytes64 => 64,
            Swizzle::Bytes128 => 128,
        }
    }
}

/// A tensor in device memory, innermost axis first, and the box that one copy moves.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub at: u64,
    pub dtype: DType,
    pub dims: Vec<u64>,
    /// Stride in elements of every axis but the innermost, which is contiguous.
    pub steps: Vec<u64>,
    pub box_dims: Vec<u32>,
    pub swizzle: Swizzle,
}

impl Tensor {
    /// Detects and names the mistakes for which the driver gives no reason.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        let (rank, element) = (self.dims.len(), self.element());
        let wrong = if !(3..=5).contains(&rank) {
            Some(format!("{rank} axes: 3 to 5 are taken"))
        } else if self.steps.len() != rank - 1 || self.box_dims.len() != rank {
            Some("as many steps as axes but one, and as many extents of the box".into())
        } else if !self.at.is_multiple_of(16) {
            Some("an address that is no multiple of 16".into())
        } else if self.steps.iter().any(|s| !(s * element).is_multiple_of(16) || s * element >= 1 << 40) {
            Some("a step that is no multiple of 16 bytes, or too large".into())
        } else if self.dims.iter().any(|d| !(1..=1 << 32).contains(d)) {
            Some("an extent of none or of more than 2^32".into())
        } else if self.box_dims.iter().any(|d| !(1..=256).contains(d)) {
            Some("a box of none or of more than 256 along an axis".into())
        } else {
            let inner = self.box_dims[0] as u64 * element;
            (!inner.is_multiple_of(16) || inner > self.swizzle.most_bytes(element))
                .then(|| format!("rows of {inner} bytes in the box with {:?}", self.swizzle))
        };
        match wrong {
            None => Ok(()),
            Some(why) => Err(CudaError::new(format!("{self:?} cannot be a tensor map: {why}"))),
        }
    }

    pub(super) fn step_bytes(&self) -> Vec<u64> {
        self.steps.iter().map(|step| step * self.element()).collect()
    }

    fn element(&self) -> u64 {
        self.dtype.bytes() as u64
    }

    /// `CUtensorMapDataType`; 8-bit floats are moved as bytes.
    pub(super) fn type_code(&self) -> i32 {
        match self.dtype {
            DType::BF16 => 9,
            DType::F32 => 7,
            DType::F64 => 8,
            DType::I32 => 4,
            DType::E4M3 | DType::E5M2 | DType::E4M4 | DType::U8 => 0,
        }
    }
}

/// `CUtensorMap`: opaque, 128 bytes, 64-byte aligned; passed as a kernel's `const __grid_constant__` argument.
pub(super) type Opaque = [u64; 16];

pub(super) fn block(map: &Opaque) -> Block {
    Block::of_words(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_tensors_are_reported() {
        // [tokens 100, heads 4, size 64] of a fused buffer, boxes of 64 tokens of one head.
        let good = Tensor {
            at: 4096,
            dtype: DType::BF16,
            dims: vec![64, 4, 100],
            steps: vec![64, 512],
            box_dims: vec![64, 1, 64],
            swizzle: Swizzle::Bytes128,
        };
        good.check().unwrap();
        assert_eq!(good.step_bytes(), [128, 1024]);
        for (bad, why) in [
            (Tensor { at: 4104, ..good.clone() }, "address"),
            (Tensor { steps: vec![60, 512], ..good.clone() }, "step"),
            (Tensor { dtype: DType::F32, ..good.clone() }, "rows of 256 bytes"),
            (Tensor { swizzle: Swizzle::Bytes64, ..good.clone() }, "rows of 128 bytes"),
            (Tensor { box_dims: vec![64, 1, 257], ..good.clone() }, "more than 256"),
            (Tensor { dims: vec![64, 4, 0], ..good.clone() }, "extent of none"),
            (Tensor { dims: vec![64, 4], ..good.clone() }, "3 to 5"),
        ] {
            let error = bad.check().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
