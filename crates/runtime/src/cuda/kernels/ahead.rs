//! The weight of the next launch, which short kernels between products of few rows bring into the L2 cache.
//!
//! Such a product is bound by the memory that its weight comes from, and memory idles while a kernel ends, the next one begins
//! and its first loads are under way. What a kernel requests ahead arrives in that time.

use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, View};

use crate::cuda::context::{Arg, Facts};

/// Parameters and function of a kernel that requests the next weight.
pub const AHEAD: &str = include_str!("ahead.cuh");

/// With more rows a product is not bound by its weight, and kernels before it take longer than a request saves.
pub const FEW_ROWS: usize = 256;
/// Shorter beginnings of rows are not worth a request each.
const LEAST_BYTES: usize = 256;
/// A beginning is whole cache lines.
const LINE: usize = 128;

/// Beginnings of the rows of a weight: `next_*` of ahead.cuh.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NextWeight {
    at: u64,
    rows: u32,
    pitch: u32,
    bytes: u32,
}

impl NextWeight {
    /// The weight of a launch, of which a quarter of the L2 cache is requested; no rows if it is no product of few rows.
    pub fn of(launch: Option<&Launch>, facts: &Facts, address: impl Fn(&View) -> u64) -> NextWeight {
        launch.and_then(|launch| NextWeight::of_product(launch, facts, address)).unwrap_or_default()
    }

    fn of_product(launch: &Launch, facts: &Facts, address: impl Fn(&View) -> u64) -> Option<NextWeight> {
        let Op::Product { tb: true, .. } = launch.op else { return None };
        let w =
            launch.ins.get(1).filter(|w| w.dtype == DType::BF16 && w.dims.len() == 2 && w.strides[1] == 1)?;
        let [rows, columns] = [w.dims[0], w.dims[1]];
        let (pitch, at) = (w.strides[0] * w.dtype.bytes(), address(w));
        let share = facts.l2_bytes as usize / 4 / rows.max(1);
        let bytes = share.min(columns * w.dtype.bytes()) / LINE * LINE;
        let is_few = launch.outs.iter().flatten().all(|out| out.dims[0] <= FEW_ROWS);
        let is_aligned = at.is_multiple_of(LINE as u64) && pitch.is_multiple_of(LINE);
        (is_few && is_aligned && bytes >= LEAST_BYTES).then_some(NextWeight {
            at,
            rows: u32::try_from(rows).ok()?,
            pitch: u32::try_from(pitch).ok()?,
            bytes: u32::try_from(bytes).ok()?,
        })
    }

    /// The arguments of `NEXT_WEIGHT`.
    pub fn args(self) -> [Arg; 4] {
        let int = |x: u32| Arg::I32(x as i32);
        [Arg::Ptr(self.at), int(self.rows), int(self.pitch), int(self.bytes)]
    }
}

#[cfg(test)]
mod tests {
    use flatout_ir::ops::epilogue::Epilogue;
    use flatout_ir::ops::product::Compute;
    use flatout_ir::plan::Queue;

    use super::*;

    fn product(rows: usize, weight: [usize; 2], dtype: DType) -> Launch {
        let view =
            |offset, dims: [usize; 2]| View { offset, dtype, dims: dims.to_vec(), strides: vec![dims[1], 1] };
        Launch {
            kernel: "cuda.product",
            op: Op::Product {
                ta: false,
                tb: true,
                out: dtype,
                base: false,
                compute: Compute::Full,
                epilogue: Epilogue::None,
            },
            ins: vec![view(0, [rows, weight[1]]), view(1 << 20, weight)],
            outs: vec![Some(view(4096, [rows, weight[0]]))],
            workspace: None,
            path: String::new(),
            key: 0,
            flops: 0,
            queue: Queue::Compute,
            joins: None,
        }
    }

    #[test]
    fn a_quarter_of_the_cache_is_requested_in_whole_lines() {
        let facts = Facts { l2_bytes: 50 << 20, ..Facts::on_paper("sm_90a") };
        let of = |launch: &Launch| NextWeight::of(Some(launch), &facts, |view| view.offset as u64);
        let of_layer = of(&product(64, [6144, 4096], DType::BF16));
        assert_eq!(of_layer, NextWeight { at: 1 << 20, rows: 6144, pitch: 8192, bytes: 2048 });
        assert_eq!(of(&product(64, [1024, 1024], DType::BF16)).bytes, 2048, "a small weight as a whole");
        for none in [
            product(64, [151_936, 4096], DType::BF16),
            product(257, [6144, 4096], DType::BF16),
            product(64, [6144, 4100], DType::BF16),
            product(64, [6144, 4096], DType::F32),
        ] {
            assert_eq!(of(&none), NextWeight::default(), "{:?}", none.ins[1].dims);
        }
        assert_eq!(NextWeight::of(None, &facts, |_| 0), NextWeight::default());
    }
}
