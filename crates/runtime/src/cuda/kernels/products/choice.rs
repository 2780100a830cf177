//! Chooses a kernel for a matrix product: cuBLASLt, or one of ours.
//!
//! Ours are `hopper` on Hopper and `mma` on every other GPU from sm_80. With `autotune` the fastest kernel on this device is
//! chosen and remembered. Otherwise a plain product runs on cuBLASLt; one whose epilogue cuBLASLt lacks runs on our kernel on
//! Hopper, if that supports the problem, and on cuBLASLt and separate kernels elsewhere, where ours has not been measured.

use std::collections::BTreeMap;

use flatout_ir::{Launch, OpKind};

use super::call::Call;
use super::{activated_product, gated_codes, gated_product, hopper, mma, product};
use crate::cuda::context::{CudaError, Facts, Kernel, Prepare, Prepared, Source, Work, sequence};
use crate::cuda::driver::store;
use crate::cuda::kernels::timing;
use crate::cuda::session::tuned::KernelTime;

/// The product kernels that a run may request. Products that the requested kernel does not support run on cuBLASLt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ProductKernel {
    #[default]
    Auto,
    Cublaslt,
    Wgmma,
    Mma,
}

impl ProductKernel {
    pub const ALL: &[ProductKernel] =
        &[ProductKernel::Auto, ProductKernel::Cublaslt, ProductKernel::Wgmma, ProductKernel::Mma];

    pub const fn name(self) -> &'static str {
        match self {
            ProductKernel::Auto => "auto",
            ProductKernel::Cublaslt => "cublaslt",
            ProductKernel::Wgmma => "wgmma",
            ProductKernel::Mma => "mma",
        }
    }

    /// Whether the device has the instructions of this kernel of ours.
    fn is_on(self, facts: &Facts) -> bool {
        match self {
            ProductKernel::Wgmma => (facts.major, facts.minor) == (9, 0),
            ProductKernel::Mma => facts.major >= 8,
            ProductKernel::Auto | ProductKernel::Cublaslt => false,
        }
    }

    /// The kernel of ours that products may run on: the requested one, or the device's best. `None` if there is none.
    fn own(self, facts: &Facts) -> Option<ProductKernel> {
        let all: &[ProductKernel] = match self {
            ProductKernel::Auto => &[ProductKernel::Wgmma, ProductKernel::Mma],
            ProductKernel::Cublaslt => &[],
            ProductKernel::Wgmma => &[ProductKernel::Wgmma],
            ProductKernel::Mma => &[ProductKernel::Mma],
        };
        all.iter().copied().find(|kernel| kernel.is_on(facts))
    }

    /// Its configurations that are worth timing for a product, with the default first; empty if it does not support it.
    fn forms(self, call: &Call, facts: &Facts) -> Vec<Form> {
        match self {
            _ if !call.is_served() => vec![],
            ProductKernel::Wgmma => hopper::forms(call, facts).into_iter().map(Form::Wgmma).collect(),
            ProductKernel::Mma if mma::serves(call, facts) => mma::forms(call, facts).map(Form::Mma).to_vec(),
            _ => vec![],
        }
    }
}

/// A configuration of one of our kernels.
#[derive(Clone, Copy)]
enum Form {
    Wgmma(hopper::ProductConfig),
    Mma(mma::ProductConfig),
}

impl Form {
    fn name(&self) -> &'static str {
        match self {
            Form::Wgmma(form) => form.name,
            Form::Mma(form) => form.name,
        }
    }

    /// The sources of everything that a product runs on.
    fn sources(&self, call: &Call, facts: &Facts) -> Vec<Source> {
        match self {
            Form::Wgmma(form) => form.sources(call, facts),
            Form::Mma(form) => vec![form.source(call, facts)],
        }
    }

    fn prepare(&self, call: &Call, p: &Prepare<'_>) -> Prepared {
        match self {
            Form::Wgmma(form) => form.prepare(call, p),
            Form::Mma(form) => form.prepare(call, p),
        }
    }
}

/// The kernels that a launch could be forced to run on; each is tested separately.
pub fn serving(launch: &Launch, facts: &Facts) -> Vec<ProductKernel> {
    let calls = match launch.op.kind() {
        OpKind::Product => product::calls(launch),
        OpKind::GatedProduct if launch.ins[0].dtype.is_fp8() => gated_codes::calls(launch),
        OpKind::GatedProduct | OpKind::GatedProductGrad => gated_product::calls(launch),
        OpKind::ActivatedProduct | OpKind::ActivatedProductGrad => activated_product::calls(launch),
        _ => vec![],
    };
    let serves = |kernel: &ProductKernel| {
        let is_served = |call: &Call| !kernel.forms(call, facts).is_empty();
        kernel.is_on(facts) && !calls.is_empty() && calls.iter().all(is_served)
    };
    let own: Vec<ProductKernel> = ProductKernel::ALL.iter().copied().filter(serves).collect();
    match own.is_empty() || facts.product == ProductKernel::Cublaslt {
        true => vec![ProductKernel::Auto],
        false => [vec![ProductKernel::Cublaslt], own].concat(),
    }
}

/// Dynamic shared memory of a source's kernel; 0 for a source of another file.
pub fn shared_bytes(source: &Source) -> usize {
    hopper::shared_bytes(source).or_else(|| mma::shared_bytes(source)).unwrap_or(0)
}

/// The kernel to run if nothing is timed; on GPUs other than Hopper always the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Untimed {
    Library,
    Own,
}

pub(super) const LIBRARY: &str = "cublaslt";

/// The part of a product that our kernel leaves to others.
pub(super) type Rest<'a> = &'a dyn Fn() -> Result<Option<Box<dyn Work>>, CudaError>;

/// Whether our kernel's default runs untimed: because the kernel is requested, or by rule.
fn is_default(kernel: ProductKernel, untimed: Untimed, facts: &Facts) -> bool {
    facts.product == kernel || !facts.autotune && untimed == Untimed::Own && kernel == ProductKernel::Wgmma
}

/// The sources of all configurations of our kernel, if a product may run on it.
pub(super) fn sources(call: &Call, untimed: Untimed, facts: &Facts) -> Vec<Source> {
    let may_run = |kernel: &ProductKernel| facts.autotune || is_default(*kernel, untimed, facts);
    let forms = facts.product.own(facts).filter(may_run).map_or(vec![], |kernel| kernel.forms(call, facts));
    forms.iter().flat_map(|form| form.sources(call, facts)).collect()
}

/// The fastest work of a product that cuBLASLt does by `prepare_library` and our kernel by `call` followed by `rest`. `name` is
/// the cache key of the library's time.
pub(super) fn fastest(
    name: &str,
    prepare_library: impl Fn() -> Prepared,
    call: &Call,
    rest: Rest<'_>,
    untimed: Untimed,
    p: &Prepare<'_>,
) -> Prepared {
    let facts = p.facts();
    let own = |form: &Form| {
        p.count_product(form.name());
        own_work(call, form, rest, p)
    };
    let library = || {
        let counted = p.product_count();
        let work = prepare_library()?;
        // If the work consists of launches that choose their own kernels, these have been counted.
        if p.product_count() == counted {
            p.count_product(LIBRARY);
        }
        Ok(work)
    };
    let Some(kernel) = facts.product.own(facts) else { return library() };
    let forms = kernel.forms(call, facts);
    match forms.first() {
        Some(form) if is_default(kernel, untimed, facts) => return own(form),
        Some(_) if facts.autotune => {}
        _ => return library(),
    }
    let times = times(name, call, &forms, &prepare_library, rest, p)?;
    match forms.iter().find(|form| times.first().is_some_and(|best| best.name == form.name())) {
        Some(form) => own(form),
        None => library(),
    }
}

/// The kernels that compute a product and its activation apart, one launch after the other.
pub(super) fn separate(launches: Vec<Launch>, p: &Prepare<'_>) -> Prepared {
    let works = launches.into_iter().map(|launch| (kernel_of(&launch).prepare)(&launch, p));
    Ok(sequence(works.collect::<Result<_, CudaError>>()?))
}

/// The sources of such launches.
pub(super) fn separate_sources(launches: &[Launch], facts: &Facts) -> Vec<Source> {
    launches.iter().flat_map(|launch| (kernel_of(launch).sources)(launch, facts)).collect()
}

fn kernel_of(launch: &Launch) -> &'static Kernel {
    let kind = launch.op.kind();
    let mut kernels = crate::cuda::KERNELS.iter().copied().flatten();
    kernels.find(|kernel| kernel.row.op == kind).expect("every operation of these has a kernel")
}

/// The cache key of a launch's times, besides the device and our sources.
pub(super) fn name(launch: &Launch) -> String {
    let views = launch.ins.iter().chain(launch.outs.iter().flatten());
    let shapes: Vec<_> = views.map(|view| (view.dtype, &view.dims, &view.strides)).collect();
    format!("{:?} of {shapes:?}", launch.op)
}

fn own_work(call: &Call, form: &Form, rest: Rest<'_>, p: &Prepare<'_>) -> Prepared {
    let first = form.prepare(call, p)?;
    Ok(match rest()? {
        Some(rest) => sequence(vec![first, rest]),
        None => first,
    })
}

/// Times of cuBLASLt and of these configurations of our kernel, fastest first: from the cache, or measured now.
fn times(
    name: &str,
    call: &Call,
    forms: &[Form],
    library: impl Fn() -> Prepared,
    rest: Rest<'_>,
    p: &Prepare<'_>,
) -> Result<Vec<KernelTime>, CudaError> {
    let texts: Vec<String> = forms
        .iter()
        .flat_map(|form| form.sources(call, p.facts()))
        .map(|source| format!("{source}{}", source.code))
        .collect();
    let problem = format!("{name} or {}", store::name(texts.iter().map(String::as_str)));
    if let Some(known) = p.tuned().recall_kernels(&problem) {
        return Ok(known);
    }
    let mut times: Vec<KernelTime> = vec![];
    // Products that are only timed are not counted.
    let counted = p.product_counts();
    let own = forms.iter().map(|form| (form.name(), own_work(call, form, rest, p)));
    let works = [(LIBRARY, library())].into_iter().chain(own);
    for (name, work) in works {
        let best = times.iter().map(|time| time.ms).fold(f64::INFINITY, f64::min);
        times.push(KernelTime { name: name.into(), ms: timing::median_ms(&*work?, best, p)? });
    }
    p.set_product_counts(counted);
    // Stable sort: among equal times cuBLASLt stays first.
    times.sort_by(|a, b| a.ms.total_cmp(&b.ms));
    p.tuned().remember_kernels(&problem, &times);
    Ok(times)
}

/// Number of products per kernel, in one line; `None` if there are none.
pub fn describe(products: &BTreeMap<&'static str, usize>) -> Option<String> {
    let mut counts: Vec<(&str, usize)> = products.iter().map(|(name, count)| (*name, *count)).collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let words: Vec<String> = counts.iter().map(|(name, count)| format!("{count} on {name}")).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

/// The error for extents that exceed a kernel's counters.
pub(super) fn too_large(what: &str, n: usize) -> CudaError {
    CudaError::new(format!("{n} {what} are more than the product kernel counts"))
}
