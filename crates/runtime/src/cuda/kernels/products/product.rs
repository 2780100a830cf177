//! Matrix products: cuBLASLt where it can express the operands and none of our kernels is faster, otherwise our plain kernel.
//!
//! An operand is a stack of matrices: the last two axes, over the leading ones. cuBLASLt supports matrices with dense rows or
//! columns at a constant distance; leading axes that are not evenly strided become several calls. It multiplies bf16 to bf16 or
//! f32, and f32 to f32 in full precision or, if the product allows it, in TF32. It multiplies 8-bit operands to bf16 or f32 if
//! both are contiguous along the inner extent, all addresses and strides, also of the scales, are multiples of 16 bytes, and
//! not both are E5M2. Our kernel for Hopper multiplies bf16, and 8 bits under the same conditions, to bf16 or f32. Our plain
//! kernel always multiplies in full precision.

use std::borrow::Cow;

use flatout_ir::ops::product::Compute;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use super::call::{Call, Extras};
use super::choice::{self, Untimed};
use super::epilogue::EpilogueTensors;
use super::lt::{Fusion, Matrices, Multiply};
use crate::cuda::context::{
    Arg, CudaError, Facts, Kernel, Prepare, Source, Work, launch as kernel_launch, sequence,
};
use crate::cuda::kernels::stage::c_type;
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] = &[Kernel {
    row: KernelRow {
        outs: Layout::Rows,
        workspace,
        ..kernel_row(
            "cuda.product",
            OpKind::Product,
            &[DType::F32, DType::BF16, DType::E4M3, DType::E5M2],
            Layout::Any,
        )
    },
    sources,
    prepare,
}];

/// Maximum workspace of a product: NVIDIA's recommendation for Hopper.
const MOST_WORKSPACE: usize = 32 << 20;

/// cuBLASLt's workspace for a result of `elements` elements. Small products get enough for split-K into 32 parts in f32.
pub(super) fn library_workspace(elements: usize) -> usize {
    (elements * 4 * 32).next_multiple_of(256).clamp(64 << 10, MOST_WORKSPACE)
}

fn workspace(shapes: &Shapes<'_>) -> usize {
    library_workspace(shapes.outs[0].elements())
}

/// The distance between matrices when iterating over the leading axes in order; `None` if it is not constant.
fn even_step(dims: &[usize], strides: &[usize]) -> Option<usize> {
    let axes: Vec<(usize, usize)> =
        dims.iter().zip(strides).filter(|(d, _)| **d != 1).map(|(d, s)| (*d, *s)).collect();
    let is_even = axes.windows(2).all(|pair| pair[0].1 == pair[1].0 * pair[1].1);
    is_even.then(|| axes.last().map_or(0, |(_, stride)| *stride))
}

/// A view's matrices of m rows and n columns in cuBLASLt's terms, or `None`.
pub(super) fn expressible(view: &View, address: u64, step: usize, transposed: bool) -> Option<Matrices> {
    let rank = view.dims.len();
    let (m, n) = (view.dims[rank - 2], view.dims[rank - 1]);
    let (row, column) = (view.strides[rank - 2], view.strides[rank - 1]);
    let at = |rows, columns, pitch, is_transposed| Matrices {
        at: address,
        dtype: view.dtype,
        rows,
        columns,
        pitch,
        step,
        is_transposed,
    };
    let pitch = if m == 1 { n } else { row };
    if (n == 1 || column == 1) && pitch >= n {
        return Some(at(m, n, pitch, transposed));
    }
    let pitch = if n == 1 { m } else { column };
    ((m == 1 || row == 1) && pitch >= m).then(|| at(n, m, pitch, !transposed))
}

/// How a launch is divided into calls.
struct Cut<'a> {
    ta: bool,
    tb: bool,
    compute: Compute,
    a: &'a View,
    b: &'a View,
    base: Option<&'a View>,
    /// For 8-bit operands.
    scales: Option<[&'a View; 2]>,
    out: &'a View,
    /// Leading axes that a single call covers; the others become several calls.
    first_inner: usize,
    /// Matrices per call.
    count: usize,
}

impl<'a> Cut<'a> {
    /// `None` if there is nothing to compute.
    fn of(launch: &'a Launch) -> Option<Self> {
        let Op::Product { ta, tb, base, compute, .. } = launch.op else {
            unreachable!("the row is for product")
        };
        let out = EpilogueTensors::target(launch).filter(|out| out.elements() > 0)?;
        let (a, b) = (&launch.ins[0], &launch.ins[1]);
        let base = base.then(|| &launch.ins[2]);
        let scales = a.dtype.is_fp8().then(|| [1, 2].map(|back| &launch.ins[launch.ins.len() - back]));
        let scales = scales.map(|[b, a]| [a, b]);
        let leading = out.dims.len() - 2;
        let views: Vec<&View> = [a, b, out].into_iter().chain(base).collect();
        let is_even = |first: usize| {
            views.iter().all(|v| even_step(&v.dims[first..leading], &v.strides[first..leading]).is_some())
        };
        let first_inner = (0..leading).find(|&first| is_even(first)).unwrap_or(leading);
        let count = out.dims[first_inner..leading].iter().product();
        Some(Cut { ta, tb, compute, a, b, base, scales, out, first_inner, count })
    }

    fn step(&self, view: &View) -> usize {
        let inner = self.first_inner..view.dims.len() - 2;
        even_step(&view.dims[inner.clone()], &view.strides[inner]).expect("chosen to be even")
    }

    /// Offset of each call's first element from the view's, in elements.
    fn starts(&self, view: &View) -> Vec<usize> {
        let mut starts = vec![0];
        for axis in 0..self.first_inner {
            let (dim, stride) = (view.dims[axis], view.strides[axis]);
            starts = starts.iter().flat_map(|s| (0..dim).map(move |i| s + i * stride)).collect();
        }
        starts
    }

    /// M, N, K.
    fn extents(&self) -> [usize; 3] {
        let rank = self.out.dims.len();
        let k = self.a.dims[rank - if self.ta { 2 } else { 1 }];
        [self.out.dims[rank - 2], self.out.dims[rank - 1], k]
    }

    /// Whether cuBLASLt supports these types and layouts.
    fn is_for_library(&self) -> bool {
        let [_, _, k] = self.extents();
        let (input, output) = (self.a.dtype, self.out.dtype);
        let types = match input {
            DType::F32 => output == DType::F32,
            DType::BF16 => true,
            _ => self.is_for_fp8(),
        };
        let operands = [self.a, self.b].into_iter().all(|v| expressible(v, 0, 0, false).is_some());
        k > 0 && types && operands && is_rows(self.out)
    }

    /// Whether 8-bit operands meet the library's conditions.
    fn is_for_fp8(&self) -> bool {
        let [_, n, k] = self.extents();
        let sixteen = |view: &View, pitch: usize| {
            let bytes = view.dtype.bytes();
            [view.offset, pitch * bytes, self.step(view) * bytes].iter().all(|x| x.is_multiple_of(16))
        };
        let along_k = |view: &View, transposed: bool, wanted: bool| {
            expressible(view, 0, 0, transposed)
                .is_some_and(|m| m.is_transposed == wanted && sixteen(view, m.pitch))
        };
        let is_row = |view: &View| expressible(view, 0, 0, false).is_some_and(|m| sixteen(view, m.pitch));
        let ends = k.is_multiple_of(16) && (n * self.out.dtype.bytes()).is_multiple_of(16);
        let both_wide = self.a.dtype == DType::E5M2 && self.b.dtype == DType::E5M2;
        let scales = self.scales.is_none_or(|scales| scales.iter().all(|v| v.offset.is_multiple_of(16)));
        ends && scales
            && !both_wide
            && along_k(self.a, self.ta, false)
            && along_k(self.b, self.tb, true)
            && is_row(self.out)
            && self.base.is_none_or(is_row)
    }

    /// Whether our tensor-core kernels may support these types and layouts; only products of some size.
    fn is_for_own(&self, launch: &Launch) -> bool {
        let [m, n, k] = self.extents();
        let is_large = m * self.count >= 128 && n >= 64 && k >= 64;
        let has_kernel = match self.a.dtype {
            DType::BF16 => self.base.is_none() || self.out.dtype == DType::F32,
            input => input.is_fp8(),
        };
        has_kernel && is_large && EpilogueTensors::of(launch).is_none() && self.is_for_library()
    }

    /// The calls of our tensor-core kernels that would compute a launch; `None` if none can.
    fn own_calls(&self, launch: &Launch, address: impl Fn(&View) -> u64) -> Option<Vec<Call>> {
        if !self.is_for_own(launch) || !self.is_base_direct() {
            return None;
        }
        let workspace = launch.workspace.as_ref().map_or((0, 0), |w| (address(w), w.span_bytes()));
        let scales = self.scales.map(|scales| scales.map(&address));
        let operand = |view: &View, start: usize, transposed: bool| {
            let at = address(view) + (start * view.dtype.bytes()) as u64;
            expressible(view, at, self.step(view), transposed)
        };
        let [a, b, out] = [self.a, self.b, self.out].map(|view| self.starts(view));
        let base = self.base.map(|base| (base, self.starts(base)));
        let call = |i: usize| {
            let base = match &base {
                Some((view, starts)) => Some(operand(view, starts[i], false)?),
                None => None,
            };
            let [a, b] = [operand(self.a, a[i], self.ta)?, operand(self.b, b[i], self.tb)?];
            let plain = Call::plain(self.count, a, b, operand(self.out, out[i], false)?);
            Some(Call { extras: Extras { scales, base, workspace, ..Extras::default() }, ..plain })
        };
        (0..out.len()).map(call).collect()
    }

    /// Whether cuBLASLt can read the base in place.
    fn is_base_direct(&self) -> bool {
        self.base.is_none_or(|base| base.dtype == self.out.dtype && is_rows(base))
    }

    fn source(&self) -> Source {
        let base = self.base.map_or(DType::F32, |base| base.dtype);
        let defines = [
            ("T_A", c_type(self.a.dtype)),
            ("T_B", c_type(self.b.dtype)),
            ("T_OUT", c_type(self.out.dtype)),
            ("T_BASE", c_type(base)),
            ("HAS_BASE", if self.base.is_some() { "1" } else { "0" }),
            ("SCALED", if self.scales.is_some() { "1" } else { "0" }),
        ];
        Source {
            name: "product.cu",
            code: Cow::Borrowed(concat!(include_str!("../prelude.cuh"), include_str!("product.cu"))),
            defines: defines.into_iter().map(|(name, value)| (name.into(), value.into())).collect(),
        }
    }
}

/// Whether rows are dense and do not overlap.
fn is_rows(view: &View) -> bool {
    expressible(view, 0, 0, false).is_some_and(|m| !m.is_transposed)
}

fn sources(launch: &Launch, facts: &Facts) -> Vec<Source> {
    let is_ours = |cut: &Cut<'_>| !cut.is_for_library() || !cut.is_base_direct() || cut.scales.is_some();
    let own = Cut::of(launch).filter(is_ours);
    let own = own.map(|cut| cut.source());
    let mut sources: Vec<Source> =
        own.into_iter().chain(EpilogueTensors::of(launch).map(|parts| parts.source())).collect();
    // Calls of one launch differ only in their addresses, by which one may be served and another not.
    for source in calls(launch).iter().flat_map(|call| choice::sources(call, Untimed::Library, facts)) {
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    sources
}

fn prepare(launch: &Launch, p: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let parts = EpilogueTensors::of(launch);
    let Some(cut) = Cut::of(launch) else { return Ok(sequence(vec![])) };
    let scratch = launch.workspace.as_ref().map_or((0, 0), |w| (p.address(w), w.span_bytes()));
    let starts = |view: &View| {
        let first = p.address(view);
        let bytes = view.dtype.bytes();
        cut.starts(view).into_iter().map(move |s| first + (s * bytes) as u64).collect::<Vec<u64>>()
    };
    let (a, b, out) = (starts(cut.a), starts(cut.b), starts(cut.out));
    let base = cut.base.map(starts);
    let own = cut.own_calls(launch, |view| p.address(view));
    let mut works: Vec<Box<dyn Work>> = vec![];
    for i in 0..out.len() {
        let base = base.as_ref().map(|base| base[i]);
        if !cut.is_for_library() {
            works.push(plain(&cut, [a[i], b[i], base.unwrap_or(0), out[i]], p)?);
            works.extend(finish(&parts, cut.out, p)?);
            continue;
        }
        let matrices = |view: &View, at: u64, transposed: bool| {
            expressible(view, at, cut.step(view), transposed)
                .ok_or_else(|| CudaError::new(format!("strides {:?} are no matrices", view.strides)))
        };
        let d = matrices(cut.out, out[i], false)?;
        let c = match (cut.base, base) {
            (Some(view), Some(at)) if cut.is_base_direct() => Some(matrices(view, at, false)?),
            (Some(_), Some(at)) => {
                works.push(spread(&cut, at, out[i], p)?);
                Some(d)
            }
            _ => None,
        };
        let multiply = Multiply {
            count: cut.count,
            a: matrices(cut.a, a[i], cut.ta)?,
            b: matrices(cut.b, b[i], cut.tb)?,
            c,
            d,
            compute: cut.compute,
            scales: cut.scales.map(|scales| scales.map(|view| p.address(view))),
            fusion: Fusion::NONE,
            workspace: scratch,
        };
        let fused = match parts.as_ref().and_then(|parts| parts.fusion(p)) {
            Some(fusion) => Multiply { fusion, ..multiply }.prepare_fused(p)?,
            None => None,
        };
        // Which 8-bit products the library supports depends on the device; our plain kernel handles the others.
        let library = || match cut.scales {
            Some(_) => match multiply.prepare_fused(p)? {
                Some(work) => Ok(work),
                None => plain(&cut, [a[i], b[i], base.unwrap_or(0), out[i]], p),
            },
            None => multiply.prepare(p),
        };
        match (fused, &own) {
            (Some(work), _) => works.push(work),
            (None, Some(calls)) => works.push(choice::fastest(
                &multiply.name(),
                library,
                &calls[i],
                &|| Ok(None),
                Untimed::Library,
                p,
            )?),
            (None, None) => {
                p.count_product(choice::LIBRARY);
                works.push(library()?);
                works.extend(finish(&parts, cut.out, p)?);
            }
        }
    }
    Ok(sequence(works))
}

/// The calls of our tensor-core kernels that would compute a launch, assuming an aligned arena; empty if none can.
pub(super) fn calls(launch: &Launch) -> Vec<Call> {
    let calls = Cut::of(launch).and_then(|cut| cut.own_calls(launch, |view| view.offset as u64));
    calls.unwrap_or_default()
}

/// Our epilogue kernel on a plain product. An epilogue applies to a single matrix, so there is one call.
fn finish(
    parts: &Option<EpilogueTensors<'_>>,
    out: &View,
    p: &Prepare<'_>,
) -> Result<Option<Box<dyn Work>>, CudaError> {
    match parts {
        Some(parts) => parts.finish(out, p),
        None => Ok(None),
    }
}

/// Row and column strides of an operand, after transposition.
fn strides(view: &View, transposed: bool) -> [i64; 2] {
    let rank = view.dims.len();
    let (row, column) = (view.strides[rank - 2] as i64, view.strides[rank - 1] as i64);
    if transposed { [column, row] } else { [row, column] }
}

/// Blocks along x, up to 2^31 - 1.
fn blocks(count: usize) -> Result<u32, CudaError> {
    match i32::try_from(count) {
        Ok(count) => Ok(count as u32),
        Err(_) => Err(CudaError::new(format!("{count} blocks are more than a launch may have"))),
    }
}

const TILE: usize = 32;

fn plain(cut: &Cut<'_>, [a, b, base, out]: [u64; 4], p: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let function = p.function(&cut.source(), "product_any")?;
    let [m, n, k] = cut.extents();
    let step = |view: Option<&View>| Arg::I64(view.map_or(0, |v| cut.step(v) as i64));
    let (a_strides, b_strides) = (strides(cut.a, cut.ta), strides(cut.b, cut.tb));
    let base_strides = cut.base.map_or([0; 2], |base| strides(base, false));
    let mut args: Vec<Arg> = [a, b, base, out].map(Arg::Ptr).into();
    args.extend([m, n, k].map(|x| Arg::I32(x as i32)));
    args.extend([step(Some(cut.a)), step(Some(cut.b)), step(cut.base), step(Some(cut.out))]);
    args.extend([a_strides, b_strides, base_strides].concat().into_iter().map(Arg::I64));
    args.push(Arg::I64(strides(cut.out, false)[0]));
    args.extend(cut.scales.map_or([0; 2], |scales| scales.map(|view| p.address(view))).map(Arg::Ptr));
    let grid = blocks(m.div_ceil(TILE) * n.div_ceil(TILE) * cut.count)?;
    Ok(kernel_launch(function, [grid, 1, 1], 256, 0, args))
}

fn spread(cut: &Cut<'_>, from: u64, to: u64, p: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let base = cut.base.expect("called where there is a base");
    let function = p.function(&cut.source(), "spread_base")?;
    let [m, n, _] = cut.extents();
    let [row, column] = strides(base, false);
    let args = vec![
        Arg::Ptr(from),
        Arg::Ptr(to),
        Arg::I32(m as i32),
        Arg::I32(n as i32),
        Arg::I64(cut.step(base) as i64),
        Arg::I64(cut.step(cut.out) as i64),
        Arg::I64(row),
        Arg::I64(column),
        Arg::I64(strides(cut.out, false)[0]),
    ];
    Ok(kernel_launch(function, [blocks(m * cut.count)?, 1, 1], 256, 0, args))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::product::plain as plain_product;

    fn view(dims: &[usize], strides: &[usize]) -> View {
        View { offset: 0, dtype: DType::BF16, dims: dims.into(), strides: strides.into() }
    }

    /// Rows, columns, pitch, transposed.
    fn as_matrices(dims: &[usize], strides: &[usize]) -> Option<(usize, usize, usize, bool)> {
        let m = expressible(&view(dims, strides), 0, 0, false)?;
        Some((m.rows, m.columns, m.pitch, m.is_transposed))
    }

    #[test]
    fn rows_and_columns_without_gaps_are_matrices() {
        assert_eq!(as_matrices(&[3, 5], &[5, 1]), Some((3, 5, 5, false)));
        assert_eq!(as_matrices(&[3, 5], &[8, 1]), Some((3, 5, 8, false)));
        assert_eq!(as_matrices(&[3, 5], &[1, 4]), Some((5, 3, 4, true)));
        assert_eq!(as_matrices(&[1, 5], &[0, 1]), Some((1, 5, 5, false)));
        assert_eq!(as_matrices(&[1, 5], &[0, 7]), Some((5, 1, 7, true)));
        assert_eq!(as_matrices(&[3, 1], &[7, 0]), Some((3, 1, 7, false)));
        assert_eq!(as_matrices(&[3, 5], &[0, 1]), None);
        assert_eq!(as_matrices(&[3, 5], &[10, 2]), None);
        assert_eq!(as_matrices(&[3, 1], &[0, 1]), None);
    }

    #[test]
    fn evenly_spaced_leading_axes_are_one_call() {
        assert_eq!(even_step(&[], &[]), Some(0));
        assert_eq!(even_step(&[4, 3], &[30, 10]), Some(10));
        assert_eq!(even_step(&[4, 1, 3], &[30, 999, 10]), Some(10));
        assert_eq!(even_step(&[4, 3], &[0, 0]), Some(0));
        assert_eq!(even_step(&[4, 3], &[31, 10]), None);

        let launch = |a: View| Launch {
            kernel: "cuda.product",
            op: plain_product(false, true, DType::BF16, Compute::Full),
            ins: vec![a, view(&[4, 3, 7, 8], &[168, 56, 8, 1])],
            outs: vec![Some(view(&[4, 3, 6, 7], &[126, 42, 7, 1]))],
            workspace: None,
            path: String::new(),
            key: 0,
            flops: 0,
            queue: flatout_ir::Queue::Compute,
            joins: None,
        };
        let even = launch(view(&[4, 3, 6, 8], &[144, 48, 8, 1]));
        let cut = Cut::of(&even).unwrap();
        assert_eq!((cut.count, cut.starts(cut.a)), (12, vec![0]));
        assert_eq!([cut.step(cut.a), cut.step(cut.b), cut.step(cut.out)], [48, 56, 42]);
        assert!(cut.is_for_library() && sources(&even, &facts()).is_empty());
        let gaps = launch(view(&[4, 3, 6, 8], &[200, 48, 8, 1]));
        let cut = Cut::of(&gaps).unwrap();
        assert_eq!((cut.count, cut.starts(cut.a)), (3, vec![0, 200, 400, 600]));
        let scattered = launch(view(&[4, 3, 6, 8], &[288, 96, 16, 2]));
        assert_eq!(sources(&scattered, &facts())[0].name, "product.cu");
    }

    fn facts() -> Facts {
        Facts::on_paper("sm_90a")
    }
}
