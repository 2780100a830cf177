//! A product's epilogue: fused by cuBLASLt if possible, otherwise a separate kernel of ours.
//!
//! cuBLASLt requires dense vectors in the type of the result, and for GELU's second matrix a row stride that is a multiple of
//! eight elements, both 16-byte aligned. If that does not hold, or it has no algorithm, the plain product is computed and one
//! kernel processes its result.

use std::borrow::Cow;

use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, View};

use super::lt::Fusion;
use crate::cuda::context::{Arg, CudaError, Prepare, Source, Work, launch as kernel_launch};
use crate::cuda::kernels::stage::{blocks, c_type};

/// A launch's epilogue and its tensors.
pub(super) struct EpilogueTensors<'a> {
    pub epilogue: Epilogue,
    /// The tensor that the epilogue reads: the bias, or h.
    reads: Option<&'a View>,
    /// The result after the epilogue, if requested.
    y: Option<&'a View>,
    /// h, if requested.
    second: Option<&'a View>,
}

impl<'a> EpilogueTensors<'a> {
    /// `None` for a plain product.
    pub(super) fn of(launch: &'a Launch) -> Option<Self> {
        let Op::Product { epilogue, .. } = launch.op else { unreachable!("the row is for product") };
        (epilogue != Epilogue::None).then(|| EpilogueTensors {
            epilogue,
            reads: epilogue.takes_one().then(|| &launch.ins[2]),
            y: launch.outs[0].as_ref(),
            second: launch.outs.get(1).and_then(Option::as_ref),
        })
    }

    /// The destination of the plain product: the result, or h if only that is requested.
    pub(super) fn target(launch: &'a Launch) -> Option<&'a View> {
        let Op::Product { epilogue, .. } = launch.op else { unreachable!("the row is for product") };
        let h = if epilogue.has_gelu() { launch.outs[1].as_ref() } else { None };
        launch.outs[0].as_ref().or(h)
    }

    /// The epilogue in cuBLASLt's terms, or `None` if it does not support it.
    pub(super) fn fusion(&self, p: &Prepare<'_>) -> Option<Fusion> {
        let vector = |view: &View, dtype: DType| {
            let (n, at) = (view.dims[0], p.address(view));
            let fits = (n == 1 || view.strides[0] == 1) && view.dtype == dtype && at.is_multiple_of(16);
            fits.then_some(at)
        };
        let matrix = |view: &View| {
            let (m, n) = (view.dims[0], view.dims[1]);
            let pitch = if m == 1 { n } else { view.strides[0] };
            let fits = (n == 1 || view.strides[1] == 1) && pitch >= n && pitch.is_multiple_of(8);
            let at = p.address(view);
            (fits && at.is_multiple_of(16)).then_some((at, pitch))
        };
        let bias = |out: &View| match self.reads.filter(|_| self.epilogue.has_bias()) {
            Some(bias) => vector(bias, out.dtype),
            None => Some(0),
        };
        match (self.epilogue, self.y, self.second) {
            (Epilogue::Relu, Some(_), _) => Some(Fusion::of(Epilogue::Relu, 0, (0, 0))),
            (Epilogue::Bias, Some(y), _) => Some(Fusion::of(Epilogue::Bias, bias(y)?, (0, 0))),
            (Epilogue::Gelu | Epilogue::BiasGelu, Some(y), Some(h)) => {
                Some(Fusion::of(self.epilogue, bias(y)?, matrix(h)?))
            }
            (Epilogue::Gelu | Epilogue::BiasGelu, Some(y), None) => {
                Some(Fusion::of(self.epilogue, bias(y)?, (0, 0)))
            }
            // Only the input of GELU is requested.
            (Epilogue::BiasGelu, None, Some(h)) => Some(Fusion::of(Epilogue::Bias, bias(h)?, (0, 0))),
            (Epilogue::GeluGrad, Some(_), _) => Some(Fusion::of(Epilogue::GeluGrad, 0, matrix(self.reads?)?)),
            // Only the plain product is requested.
            _ => None,
        }
    }

    pub(super) fn source(&self) -> Source {
        let out = self.y.or(self.second).map_or(DType::F32, |view| view.dtype);
        let bias = self.reads.filter(|_| self.epilogue.has_bias()).map_or(DType::F32, |view| view.dtype);
        let gelu = match self.epilogue {
            Epilogue::Gelu | Epilogue::BiasGelu => "1",
            Epilogue::GeluGrad => "2",
            Epilogue::Relu => "3",
            _ => "0",
        };
        let defines = [
            ("T_OUT", c_type(out)),
            ("T_BIAS", c_type(bias)),
            ("BIAS", if self.epilogue.has_bias() { "1" } else { "0" }),
            ("GELU", gelu),
        ];
        Source {
            name: "epilogue.cu",
            code: Cow::Borrowed(concat!(include_str!("../prelude.cuh"), include_str!("epilogue.cu"))),
            defines: defines.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
        }
    }

    /// Our kernel over the plain product in `c`; `None` if nothing is left to do.
    pub(super) fn finish(&self, c: &View, p: &Prepare<'_>) -> Result<Option<Box<dyn Work>>, CudaError> {
        let is_gelu = self.epilogue.has_gelu();
        if is_gelu && self.y.is_none() && !self.epilogue.has_bias() {
            return Ok(None);
        }
        let h =
            if is_gelu { self.second } else { self.reads.filter(|_| self.epilogue == Epilogue::GeluGrad) };
        let bias = self.reads.filter(|_| self.epilogue.has_bias());
        let at = |view: Option<&View>| Arg::Ptr(view.map_or(0, |view| p.address(view)));
        let row = |view: Option<&View>| Arg::I64(view.map_or(0, |view| view.strides[0] as i64));
        let args = vec![
            Arg::Ptr(p.address(c)),
            at(self.y),
            at(h),
            at(bias),
            Arg::I32(c.dims[1] as i32),
            row(bias),
            row(Some(c)),
            row(self.y),
            row(h),
            Arg::I64(h.map_or(0, |h| h.strides[1] as i64)),
        ];
        let function = p.function(&self.source(), "finish")?;
        Ok(Some(kernel_launch(function, [blocks(c.dims[0], 1)?, 1, 1], 256, 0, args)))
    }
}
