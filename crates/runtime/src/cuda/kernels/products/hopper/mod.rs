//! Products on Hopper's wgmma and TMA (sm_90a), with plain or gated activations and their gradients as epilogues: `product.cu`.

use std::borrow::Cow;

use super::call::{Call, Epilogue};
use super::lt::Matrices;
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{Arg, CudaError, Prepare, Prepared, Source};
use crate::cuda::tensor_map::{Swizzle, Tensor};

/// A configuration that product.cu is compiled with; its header explains the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductConfig {
    /// Name under which times are stored; contains no spaces.
    pub name: &'static str,
    pingpong: bool,
    /// Blocks of 64 rows per warpgroup.
    mi: usize,
    tn: usize,
    stages: usize,
    cluster: usize,
}

/// Both warpgroups share a tile of 128 by 256: loads the fewest bytes, for products with a comparatively short epilogue.
const SHARED: ProductConfig =
    ProductConfig { name: "wgmma-128x256", pingpong: false, mi: 1, tn: 256, stages: 4, cluster: 2 };
/// A tile of 128 by 128 per warpgroup, in turns, so that epilogues overlap the other's products.
const TURNS: ProductConfig =
    ProductConfig { name: "wgmma-128x128-pair", pingpong: true, mi: 2, tn: 128, stages: 4, cluster: 2 };
/// As TURNS, without sharing b with another block: less waiting if epilogues are long.
const APART: ProductConfig = ProductConfig { name: "wgmma-128x128", cluster: 1, ..TURNS };

const GROUPS: usize = 2;
const THREADS: u32 = 384;
/// A panel of 64 rows of 64 elements.
const PANEL: usize = 64;
const PANEL_BYTES: usize = 8192;
/// Barriers, after the panels in shared memory, followed by the sums of a warpgroup's columns.
const BARRIER_BYTES: usize = 1024;
const SUM_BYTES: usize = 2 * 4 * PANEL * 4;

const NAME: &str = "products/hopper/product.cu";

/// The configurations worth timing, with the default first.
pub fn forms(epilogue: Epilogue) -> &'static [ProductConfig] {
    match epilogue {
        Epilogue::Plain => &[SHARED, TURNS],
        Epilogue::Gated { .. } | Epilogue::Activated { .. } => &[APART, TURNS],
        Epilogue::GatedGrad { .. } | Epilogue::ActivatedGrad { .. } => &[TURNS, APART],
    }
}

/// Dynamic shared memory of a source's kernel; `None` for a source of another file.
pub fn shared_bytes(source: &Source) -> Option<usize> {
    let number = |name: &str| source.number(name).filter(|_| source.name == NAME);
    let form = ProductConfig {
        name: "",
        pingpong: number("PINGPONG")? == 1,
        mi: number("MI")?,
        tn: number("TN")?,
        stages: number("STAGES")?,
        cluster: number("CLUSTER")?,
    };
    let stage = (form.rows() + form.tn) * 2 * PANEL;
    // Panels of results and of inputs that a warpgroup has in shared memory.
    let panels = match number("EPILOGUE")? {
        _ if !form.pingpong => 2,
        4 => 4,
        _ => 6,
    };
    let sums = if number("SUM")? == 1 { GROUPS * SUM_BYTES } else { 0 };
    Some(form.stages * stage + GROUPS * panels * PANEL_BYTES + BARRIER_BYTES + sums)
}

impl ProductConfig {
    fn rows(&self) -> usize {
        PANEL * self.mi * if self.pingpong { 1 } else { GROUPS }
    }

    pub fn source(&self, call: &Call) -> Source {
        let defines = [
            ("PINGPONG", self.pingpong as usize),
            ("MI", self.mi),
            ("TN", self.tn),
            ("STAGES", self.stages),
            ("CLUSTER", self.cluster),
        ];
        let defines = defines.into_iter().map(|(name, value)| (name.into(), value.to_string()));
        let code = concat!(
            include_str!("../../prelude.cuh"),
            include_str!("../../matrices.cuh"),
            include_str!("../../wgmma.cuh"),
            include_str!("../../elementwise/activation.cuh"),
            include_str!("../call.cuh"),
            include_str!("product.cu")
        );
        let of_call = call.epilogue.defines(call.layout());
        Source { name: NAME, code: Cow::Borrowed(code), defines: defines.chain(of_call).collect() }
    }

    pub fn prepare(&self, call: &Call, p: &Prepare<'_>) -> Prepared {
        let is_gated = call.epilogue.is_gated();
        let width = if is_gated { self.tn / 2 } else { self.tn };
        // Blocks of a cluster take adjacent rows of tiles.
        let tile = [self.rows() * self.cluster, width];
        let [a_mn, b_mn] = call.layout();
        let map = |m: &Matrices, box_rows: usize| map(m, call.count, box_rows, p);
        let a = map(&call.a, if a_mn { PANEL } else { self.rows() })?;
        let b_rows = match (b_mn, is_gated) {
            (true, _) => PANEL,
            (false, true) => self.tn / 2,
            (false, false) => self.tn / self.cluster,
        };
        let b = map(&call.b, b_rows)?;
        let b2 = call.b2.as_ref().map_or_else(|| Ok(b.clone()), |b2| map(b2, b_rows))?;
        // An absent matrix is not accessed: any map stands in for it.
        let panel = |m: Option<&Matrices>| m.map_or_else(|| Ok(a.clone()), |m| map(m, PANEL));
        let mut args = vec![call.shape(tile, PANEL)?, a.clone(), b, b2];
        for m in call.outs.iter().chain(&call.sides).map(Option::as_ref) {
            args.push(panel(m)?);
        }
        args.extend([call.bias, call.partial].map(|at| Block::from(Arg::Ptr(at))));
        let clusters = (p.facts().sms as usize / self.cluster).min(call.tiles(tile));
        let source = self.source(call);
        let shared = shared_bytes(&source).expect("a source of this file") as u32;
        let function = p.function(&source, "product")?;
        launch_blocks(function, [clusters * self.cluster, 1, 1], THREADS, shared, args)
    }
}

/// A tensor map with boxes of `box_rows` rows of 64 elements.
fn map(m: &Matrices, count: usize, box_rows: usize, p: &Prepare<'_>) -> Result<Block, CudaError> {
    let step = if count > 1 { m.step } else { m.pitch * m.rows };
    p.tensor_map(&Tensor {
        at: m.at,
        dims: [m.columns, m.rows, count].map(|n| n as u64).to_vec(),
        steps: [m.pitch, step].map(|n| n as u64).to_vec(),
        box_dims: [PANEL, box_rows, 1].map(|n| n as u32).to_vec(),
        swizzle: Swizzle::Bytes128,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::products::call::tests::call;

    #[test]
    fn every_form_fits_in_shared_memory() {
        for epilogue in Epilogue::KINDS {
            for form in forms(epilogue) {
                let bytes = shared_bytes(&form.source(&Call { epilogue, ..call() }));
                assert!(bytes.is_some_and(|bytes| bytes <= 227 << 10), "{epilogue:?} {form:?}");
                assert!(!form.name.contains(' '));
            }
        }
    }
}
