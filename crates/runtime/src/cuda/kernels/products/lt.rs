//! cuBLASLt: its handle, matrix products with their descriptors, and the choice of an algorithm.
//!
//! Constants are those of cublasLt.h, cublas_api.h (13.8, equal in 12.8) and library_types.h. cuBLASLt is column-major; callers
//! pass row-major matrices, so the transposed product of the transposed operands is computed.
//!
//! Split-K is only allowed with partial sums in the compute type, added in a separate step, so equal inputs give equal bits.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::os::raw::c_int;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::ops::product::Compute;
use flatout_ir::types::DType;

use crate::cuda::context::{CudaError, Prepare, Stream, Work};
use crate::cuda::driver::Event;
use crate::cuda::driver::library::Library;
use crate::cuda::session::tuned::{Algorithm, Timing};

/// Full f32: cuBLASLt follows the given compute type, so this one never uses TF32. (`_PEDANTIC`, 69, would also forbid
/// algorithms that reorder sums, which changes bits but not precision; emulation by bf16 is a separate compute type and, if set
/// by an environment variable, among those that are cleared.)
const CUBLAS_COMPUTE_32F: c_int = 68;
const CUBLAS_COMPUTE_32F_FAST_TF32: c_int = 77;
const CUBLAS_OP_N: i32 = 0;
const CUBLAS_OP_T: i32 = 1;
const CUDA_R_32F: c_int = 0;
const CUDA_R_16BF: c_int = 14;
const CUDA_R_8F_E4M3: c_int = 28;
const CUDA_R_8F_E5M2: c_int = 29;
const CUBLASLT_MATMUL_DESC_TRANSA: c_int = 3;
const CUBLASLT_MATMUL_DESC_TRANSB: c_int = 4;
/// Epilogue attributes: `uint32_t`, two pointers, `int64_t`. The vector and the matrix have the type of D.
const CUBLASLT_MATMUL_DESC_EPILOGUE: c_int = 7;
const CUBLASLT_MATMUL_DESC_BIAS_POINTER: c_int = 8;
const CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: c_int = 11;
const CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: c_int = 12;
/// Device pointers to one f32 each, and an `int8_t`: whether 8-bit products may accumulate in less than f32.
const CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: c_int = 17;
const CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: c_int = 18;
const CUBLASLT_MATMUL_DESC_FAST_ACCUM: c_int = 25;
const CUBLASLT_EPILOGUE_DEFAULT: u32 = 1;
const CUBLASLT_EPILOGUE_RELU: u32 = 2;
const CUBLASLT_EPILOGUE_BIAS: u32 = 4;
const CUBLASLT_EPILOGUE_GELU: u32 = 32;
/// `GELU` with its input as a second result.
const CUBLASLT_EPILOGUE_GELU_AUX: u32 = 32 | 128;
const CUBLASLT_EPILOGUE_DGELU: u32 = 64 | 128;
const CUBLAS_STATUS_INVALID_VALUE: c_int = 7;
const CUBLAS_STATUS_NOT_SUPPORTED: c_int = 15;
const CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: c_int = 5;
const CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: c_int = 6;
const CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: c_int = 1;
const CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: c_int = 3;
/// For A; B, C and D follow.
const CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: c_int = 5;
const CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: u32 = 2;

/// Algorithms requested if none is timed: the first that fits is used.
const CANDIDATES: usize = 8;
/// Timed runs of a candidate, after one warm-up run.
const RUNS: usize = 3;

type Opaque = *mut c_void;
type SetAttribute = unsafe extern "C" fn(Opaque, c_int, *const c_void, usize) -> c_int;
type Destroy = unsafe extern "C" fn(Opaque) -> c_int;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Candidate {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! entries {
    ($($field:ident = $symbol:literal : $ty:ty;)*) => {
        struct Entries { $($field: $ty,)* }

        impl Entries {
            fn open(library: &'static Library) -> Result<Entries, CudaError> {
                Ok(Entries {
                    // SAFETY: the signature is that of the header for this symbol.
                    $($field: unsafe { library.symbol($symbol)? },)*
                })
            }
        }
    };
}

entries! {
    version = "cublasLtGetVersion": unsafe extern "C" fn() -> usize;
    create = "cublasLtCreate": unsafe extern "C" fn(*mut Opaque) -> c_int;
    destroy = "cublasLtDestroy": Destroy;
    matmul_create = "cublasLtMatmulDescCreate": unsafe extern "C" fn(*mut Opaque, c_int, c_int) -> c_int;
    matmul_set = "cublasLtMatmulDescSetAttribute": SetAttribute;
    matmul_destroy = "cublasLtMatmulDescDestroy": Destroy;
    layout_create = "cublasLtMatrixLayoutCreate": unsafe extern "C" fn(*mut Opaque, c_int, u64, u64, i64) -> c_int;
    layout_set = "cublasLtMatrixLayoutSetAttribute": SetAttribute;
    layout_destroy = "cublasLtMatrixLayoutDestroy": Destroy;
    preference_create = "cublasLtMatmulPreferenceCreate": unsafe extern "C" fn(*mut Opaque) -> c_int;
    preference_set = "cublasLtMatmulPreferenceSetAttribute": SetAttribute;
    preference_destroy = "cublasLtMatmulPreferenceDestroy": Destroy;
    heuristic = "cublasLtMatmulAlgoGetHeuristic": unsafe extern "C" fn(
        Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, c_int, *mut Candidate, *mut c_int,
    ) -> c_int;
    check = "cublasLtMatmulAlgoCheck": unsafe extern "C" fn(
        Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, *const Algorithm, *mut Candidate,
    ) -> c_int;
    matmul = "cublasLtMatmul": unsafe extern "C" fn(
        Opaque, Opaque, *const c_void, *const c_void, Opaque, *const c_void, Opaque, *const c_void, *const c_void,
        Opaque, *mut c_void, Opaque, *const Algorithm, *mut c_void, usize, Opaque,
    ) -> c_int;
}

/// The cuBLASLt handle and the algorithms chosen so far.
pub struct Lt {
    entries: Entries,
    handle: Opaque,
    /// Keyed by product and number of candidates.
    chosen: Mutex<HashMap<(Problem, usize), Algorithm>>,
}

// SAFETY: the header allows concurrent use of the handle; the map has a lock.
unsafe impl Send for Lt {}
// SAFETY: as above.
unsafe impl Sync for Lt {}

impl Lt {
    /// Requires a current primary context.
    pub fn open(library: &'static Library) -> Result<Lt, CudaError> {
        let entries = Entries::open(library)?;
        let mut handle = null_mut();
        // SAFETY: writes one handle.
        ok(unsafe { (entries.create)(&mut handle) }, "cublasLtCreate")?;
        Ok(Lt { entries, handle, chosen: Mutex::default() })
    }

    /// Version: 130100 for 13.1.0.
    pub fn version(&self) -> usize {
        // SAFETY: takes no argument.
        unsafe { (self.entries.version)() }
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        // SAFETY: created in `open`; every product holds its `Lt`, so none is left.
        unsafe { (self.entries.destroy)(self.handle) };
    }
}

fn ok(status: c_int, call: &str) -> Result<(), CudaError> {
    if status == 0 { Ok(()) } else { Err(CudaError::status(format!("{call} failed"), status)) }
}

/// Row-major matrices in device memory: `rows` by `columns`, with row stride `pitch` and matrix stride `step`, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrices {
    pub at: u64,
    pub dtype: DType,
    pub rows: usize,
    pub columns: usize,
    pub pitch: usize,
    pub step: usize,
    /// Whether the operand is the transpose. Never set on a result.
    pub is_transposed: bool,
}

impl Matrices {
    /// The largest power of two, at most 256, that every row of every matrix is aligned to.
    pub fn alignment(&self, count: usize) -> u32 {
        let bytes = self.dtype.bytes() as u64;
        let steps = if count > 1 { self.step as u64 * bytes } else { 0 };
        1 << (self.at | steps | 256).trailing_zeros()
    }
}

/// The epilogue that the library applies before it stores a result; addresses are 16-byte aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fusion {
    epilogue: Epilogue,
    /// Address of the bias; 0 if there is none.
    vector: u64,
    /// Address and row stride of GELU's input, written or read; 0 if unused.
    matrix: (u64, usize),
}

impl Fusion {
    pub const NONE: Fusion = Fusion::of(Epilogue::None, 0, (0, 0));

    pub const fn of(epilogue: Epilogue, vector: u64, matrix: (u64, usize)) -> Fusion {
        Fusion { epilogue, vector, matrix }
    }

    /// `cublasLtEpilogue_t`.
    fn code(&self) -> u32 {
        let gelu = if self.matrix.0 != 0 { CUBLASLT_EPILOGUE_GELU_AUX } else { CUBLASLT_EPILOGUE_GELU };
        match self.epilogue {
            Epilogue::None => CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias => CUBLASLT_EPILOGUE_BIAS,
            Epilogue::Gelu => gelu,
            Epilogue::BiasGelu => gelu | CUBLASLT_EPILOGUE_BIAS,
            Epilogue::Relu => CUBLASLT_EPILOGUE_RELU,
            Epilogue::GeluGrad => CUBLASLT_EPILOGUE_DGELU,
        }
    }

    /// As `self`, with addresses replaced by their alignments, up to 256.
    fn anywhere(self) -> Fusion {
        let multiple = |at: u64| if at == 0 { 0 } else { 1 << (at | 256).trailing_zeros() };
        Fusion { vector: multiple(self.vector), matrix: (multiple(self.matrix.0), self.matrix.1), ..self }
    }
}

/// d [M, N] = a [M, K] b [K, N], plus c if given; `count` times, but once with an epilogue.
#[derive(Clone, Copy, Debug)]
pub struct Multiply {
    pub count: usize,
    pub a: Matrices,
    pub b: Matrices,
    /// Has d's shape and type, and may be the same memory.
    pub c: Option<Matrices>,
    pub d: Matrices,
    /// For f32 operands; others have one mode.
    pub compute: Compute,
    /// For 8-bit operands: addresses of the f32 scales of a and b.
    pub scales: Option<[u64; 2]>,
    pub fusion: Fusion,
    /// Address and bytes of the workspace.
    pub workspace: (u64, usize),
}

/// The key of an algorithm: a product without its addresses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Problem {
    count: usize,
    /// a, b, c, d with their addresses replaced by alignments.
    operands: [Matrices; 4],
    has_base: bool,
    compute: Compute,
    fusion: Fusion,
    workspace_bytes: usize,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, _, d] = &self.operands;
        let show = |m: &Matrices| {
            let transposed = if m.is_transposed { " transposed" } else { "" };
            let (dtype, align) = (m.dtype.name(), m.at);
            format!(
                "{dtype}[{},{}]{transposed}, rows {} apart, aligned to {align}",
                m.rows, m.columns, m.pitch
            )
        };
        let mode = if self.compute == Compute::Tf32 { " in tf32" } else { "" };
        write!(f, "{} products{mode} of ({}) and ({}) to ({})", self.count, show(a), show(b), show(d))?;
        match self.fusion.epilogue {
            Epilogue::None => Ok(()),
            epilogue => write!(f, " with the epilogue {}", epilogue.name()),
        }
    }
}

impl Multiply {
    fn operands(&self) -> [Matrices; 4] {
        [self.a, self.b, self.c.unwrap_or(self.d), self.d]
    }

    fn problem(&self) -> Problem {
        let operands = self.operands().map(|m| Matrices { at: m.alignment(self.count) as u64, ..m });
        Problem {
            count: self.count,
            operands,
            has_base: self.c.is_some(),
            compute: self.compute,
            fusion: self.fusion.anywhere(),
            workspace_bytes: self.workspace.1,
        }
    }

    /// The cache key of its time, besides the device.
    pub fn name(&self) -> String {
        format!("{:?}", self.problem())
    }

    /// Creates the descriptors and chooses an algorithm: the library's first or, with `autotune` and without `deterministic`,
    /// the fastest of several, cached for equal products, on disk too. Timing overwrites d.
    pub fn prepare(&self, p: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
        match self.product(p)? {
            Some(product) => Ok(Box::new(product)),
            None => Err(CudaError::new(format!("cuBLASLt has no algorithm for {}", self.problem()))),
        }
    }

    /// As `prepare`; `None`, with a note to the user, if the library has no algorithm.
    pub fn prepare_fused(&self, p: &Prepare<'_>) -> Result<Option<Box<dyn Work>>, CudaError> {
        let Some(product) = self.product(p)? else {
            p.note(format!(
                "cuBLASLt has no algorithm for {}: a kernel of ours does its part",
                self.problem()
            ));
            return Ok(None);
        };
        Ok(Some(Box::new(product)))
    }

    fn product(&self, p: &Prepare<'_>) -> Result<Option<Product>, CudaError> {
        let lt = Arc::clone(p.lt());
        let mut product = Product::new(&lt, self)?;
        let problem = self.problem();
        let key = (problem, p.tuned().candidates());
        let known = lt.chosen.lock().ok().and_then(|chosen| chosen.get(&key).copied());
        product.algorithm = match known {
            Some(algorithm) => algorithm,
            None => {
                let Some(best) = product.choose(&key.0, p)? else { return Ok(None) };
                if let Ok(mut chosen) = lt.chosen.lock() {
                    chosen.insert(key, best);
                }
                best
            }
        };
        Ok(Some(product))
    }
}

/// A descriptor and the function that destroys it.
struct Descriptor {
    raw: Opaque,
    destroy: Destroy,
}

impl Descriptor {
    fn set<T>(&self, set: SetAttribute, attribute: c_int, value: T, call: &str) -> Result<(), CudaError> {
        // SAFETY: the attribute has type T, which the library copies.
        ok(unsafe { set(self.raw, attribute, (&raw const value).cast(), size_of::<T>()) }, call)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by the library that this function belongs to.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// A product that is ready to run.
struct Product {
    lt: Arc<Lt>,
    matmul: Descriptor,
    /// The library's A, B, C and D: our b, a, c, d.
    layouts: [Descriptor; 4],
    addresses: [u64; 4],
    beta: f32,
    algorithm: Algorithm,
    workspace: (u64, usize),
}

impl Product {
    fn new(lt: &Arc<Lt>, of: &Multiply) -> Result<Product, CudaError> {
        let e = &lt.entries;
        let mut raw = null_mut();
        let compute = match (of.compute, of.a.dtype) {
            (Compute::Tf32, DType::F32) => CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => CUBLAS_COMPUTE_32F,
        };
        // SAFETY: writes one handle.
        ok(unsafe { (e.matmul_create)(&mut raw, compute, CUDA_R_32F) }, "cublasLtMatmulDescCreate")?;
        let matmul = Descriptor { raw, destroy: e.matmul_destroy };
        let op = |m: &Matrices| if m.is_transposed { CUBLAS_OP_T } else { CUBLAS_OP_N };
        for (attribute, operand) in
            [(CUBLASLT_MATMUL_DESC_TRANSA, &of.b), (CUBLASLT_MATMUL_DESC_TRANSB, &of.a)]
        {
            matmul.set(e.matmul_set, attribute, op(operand), "cublasLtMatmulDescSetAttribute")?;
        }
        if let Some([a, b]) = of.scales {
            let (set, call) = (e.matmul_set, "cublasLtMatmulDescSetAttribute");
            matmul.set(set, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b, call)?;
            matmul.set(set, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a, call)?;
            matmul.set(set, CUBLASLT_MATMUL_DESC_FAST_ACCUM, 0_i8, call)?;
        }
        if of.fusion.epilogue != Epilogue::None {
            let (set, call) = (e.matmul_set, "cublasLtMatmulDescSetAttribute");
            matmul.set(set, CUBLASLT_MATMUL_DESC_EPILOGUE, of.fusion.code(), call)?;
            if of.fusion.vector != 0 {
                matmul.set(set, CUBLASLT_MATMUL_DESC_BIAS_POINTER, of.fusion.vector, call)?;
            }
            if let (at @ 1.., pitch) = of.fusion.matrix {
                matmul.set(set, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at, call)?;
                matmul.set(set, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, pitch as i64, call)?;
            }
        }
        let [a, b, c, d] = of.operands();
        let layouts = [
            lt.layout(&b, of.count)?,
            lt.layout(&a, of.count)?,
            lt.layout(&c, of.count)?,
            lt.layout(&d, of.count)?,
        ];
        Ok(Product {
            lt: Arc::clone(lt),
            matmul,
            layouts,
            addresses: [b.at, a.at, c.at, d.at],
            beta: if of.c.is_some() { 1.0 } else { 0.0 },
            algorithm: Algorithm::default(),
            workspace: of.workspace,
        })
    }

    /// The algorithm for a product: from the cache, timed now, or the library's first; `None` if it has none.
    fn choose(&mut self, problem: &Problem, p: &Prepare<'_>) -> Result<Option<Algorithm>, CudaError> {
        let tuned = p.tuned();
        if tuned.candidates() <= 1 {
            return Ok(self.candidates(problem, CANDIDATES)?.first().map(|c| c.algorithm));
        }
        let name = format!("{problem:?}");
        if let Some(known) = tuned.recall(&name).filter(|known| self.runs(known, problem)) {
            return Ok(Some(known.algorithm));
        }
        let candidates = self.candidates(problem, tuned.candidates())?;
        let timings = self.times(&candidates, p)?;
        let Some(fastest) = timings.first() else { return Ok(candidates.first().map(|c| c.algorithm)) };
        let algorithm = fastest.algorithm;
        tuned.remember(&name, &timings);
        Ok(Some(algorithm))
    }

    /// Whether the library still supports a cached algorithm for this product, within its workspace.
    fn runs(&self, known: &Timing, problem: &Problem) -> bool {
        let [a, b, c, d] = self.layouts.each_ref().map(|layout| layout.raw);
        let mut answer = Candidate::default();
        // SAFETY: all descriptors are alive; writes one result.
        let status = unsafe {
            let e = &self.lt.entries;
            (e.check)(self.lt.handle, self.matmul.raw, a, b, c, d, &known.algorithm, &mut answer)
        };
        status == 0 && answer.workspace_bytes <= problem.workspace_bytes
    }

    /// The algorithms that the library proposes, best first, up to `most`; empty if it has none.
    fn candidates(&self, problem: &Problem, most: usize) -> Result<Vec<Candidate>, CudaError> {
        let e = &self.lt.entries;
        let mut raw = null_mut();
        // SAFETY: writes one handle.
        ok(unsafe { (e.preference_create)(&mut raw) }, "cublasLtMatmulPreferenceCreate")?;
        let preference = Descriptor { raw, destroy: e.preference_destroy };
        let call = "cublasLtMatmulPreferenceSetAttribute";
        let set = e.preference_set;
        let scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        preference.set(set, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, problem.workspace_bytes, call)?;
        preference.set(set, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme, call)?;
        let [a, b, c, d] = problem.operands;
        for (i, operand) in [b, a, c, d].iter().enumerate() {
            let attribute = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i as c_int;
            preference.set(set, attribute, operand.at as u32, call)?;
        }
        let mut found = vec![Candidate::default(); most];
        let mut count = 0;
        let [a, b, c, d] = self.layouts.each_ref().map(|layout| layout.raw);
        // SAFETY: all descriptors are alive, and `found` has room for the number of results requested.
        let status = unsafe {
            (e.heuristic)(
                self.lt.handle,
                self.matmul.raw,
                a,
                b,
                c,
                d,
                preference.raw,
                most as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if [CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE].contains(&status) {
            return Ok(vec![]);
        }
        ok(status, "cublasLtMatmulAlgoGetHeuristic")?;
        let count = usize::try_from(count).unwrap_or(0).min(most);
        let fits = |c: &&Candidate| c.state == 0 && c.workspace_bytes <= problem.workspace_bytes;
        Ok(found[..count].iter().filter(fits).copied().collect())
    }

    /// The minimum time of each candidate, fastest first. Candidates that fail to run are skipped.
    fn times(&mut self, candidates: &[Candidate], p: &Prepare<'_>) -> Result<Vec<Timing>, CudaError> {
        let stream = p.stream();
        let marks: Vec<Event> =
            (0..=RUNS).map(|_| Event::new(p.driver())).collect::<Result<_, CudaError>>()?;
        let mut timings = Vec::with_capacity(candidates.len());
        for Candidate { algorithm, workspace_bytes, .. } in candidates.iter().copied() {
            self.algorithm = algorithm;
            if self.enqueue(stream).is_err() {
                continue;
            }
            for (i, mark) in marks.iter().enumerate() {
                mark.record(stream)?;
                if i < RUNS {
                    self.enqueue(stream)?;
                }
            }
            let mut ms = f64::INFINITY;
            for pair in marks.windows(2) {
                ms = ms.min(pair[0].elapsed_ms(&pair[1])?);
            }
            timings.push(Timing { ms, workspace_bytes, algorithm });
        }
        // Stable sort: equal times keep the library's order.
        timings.sort_by(|a, b| a.ms.total_cmp(&b.ms));
        Ok(timings)
    }
}

impl Lt {
    /// Row-major rows are the library's columns.
    fn layout(&self, m: &Matrices, count: usize) -> Result<Descriptor, CudaError> {
        let e = &self.entries;
        let mut raw = null_mut();
        let dtype = match m.dtype {
            DType::F32 => CUDA_R_32F,
            DType::BF16 => CUDA_R_16BF,
            DType::E4M3 => CUDA_R_8F_E4M3,
            DType::E5M2 => CUDA_R_8F_E5M2,
            other => return Err(CudaError::new(format!("cuBLASLt does not multiply {}", other.name()))),
        };
        // SAFETY: writes one handle.
        let status =
            unsafe { (e.layout_create)(&mut raw, dtype, m.columns as u64, m.rows as u64, m.pitch as i64) };
        ok(status, "cublasLtMatrixLayoutCreate")?;
        let layout = Descriptor { raw, destroy: e.layout_destroy };
        if count > 1 {
            let (set, call) = (e.layout_set, "cublasLtMatrixLayoutSetAttribute");
            layout.set(set, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count as i32, call)?;
            layout.set(set, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, m.step as i64, call)?;
        }
        Ok(layout)
    }
}

impl Work for Product {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        let alpha = 1.0_f32;
        let [a, b, c, d] = self.layouts.each_ref().map(|layout| layout.raw);
        let [at_a, at_b, at_c, at_d] = self.addresses.map(|at| at as *mut c_void);
        // SAFETY: the addresses match the layouts, as the caller's views were checked; the scalars are read during the call
        // (host pointers); the algorithm was proposed for these descriptors, or for equal ones.
        let status = unsafe {
            (self.lt.entries.matmul)(
                self.lt.handle,
                self.matmul.raw,
                (&raw const alpha).cast(),
                at_a,
                a,
                at_b,
                b,
                (&raw const self.beta).cast(),
                at_c,
                c,
                at_d,
                d,
                &self.algorithm,
                self.workspace.0 as *mut c_void,
                self.workspace.1,
                stream.raw(),
            )
        };
        ok(status, "cublasLtMatmul")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_is_that_of_the_least_aligned_matrix() {
        let m = Matrices {
            at: 4096,
            dtype: DType::BF16,
            rows: 3,
            columns: 5,
            pitch: 8,
            step: 24,
            is_transposed: false,
        };
        assert_eq!(m.alignment(1), 256);
        assert_eq!(m.alignment(2), 16);
        assert_eq!(Matrices { at: 4096 + 6, ..m }.alignment(1), 2);
    }

    #[test]
    fn a_candidate_has_the_size_of_the_header() {
        assert_eq!(size_of::<Candidate>(), 64 + 8 + 4 + 4 + 16);
    }
}
