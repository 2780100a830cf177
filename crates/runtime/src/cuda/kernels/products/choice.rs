//! Chooses a kernel for a matrix product: cuBLASLt, or one of ours.
//!
//! With `autotune` the fastest kernel on this device is chosen and remembered. Otherwise a plain product runs on cuBLASLt, and
//! one whose epilogue cuBLASLt lacks on our kernel, if that supports the problem.

use std::collections::BTreeMap;

use flatout_ir::{Launch, OpKind};

use super::hopper::{Call, ProductConfig};
use super::{activated_product, gated_codes, gated_product, product};
use crate::cuda::context::{CudaError, Facts, Prepare, Prepared, Work, sequence};
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
}

impl ProductKernel {
    pub const ALL: &[ProductKernel] = &[ProductKernel::Auto, ProductKernel::Cublaslt, ProductKernel::Wgmma];

    pub const fn name(self) -> &'static str {
        match self {
            ProductKernel::Auto => "auto",
            ProductKernel::Cublaslt => "cublaslt",
            ProductKernel::Wgmma => "wgmma",
        }
    }

    /// Whether products may run on our kernels on such a device.
    pub fn has_own(self, facts: &Facts) -> bool {
        self != ProductKernel::Cublaslt && (facts.major, facts.minor) == (9, 0)
    }
}

/// The kernels that a launch could be forced to run on; each is tested separately.
pub fn serving(launch: &Launch, facts: &Facts) -> Vec<ProductKernel> {
    let is_served = match launch.op.kind() {
        OpKind::Product => product::is_served(launch),
        OpKind::GatedProduct if launch.ins[0].dtype.is_fp8() => gated_codes::is_served(launch),
        OpKind::GatedProduct | OpKind::GatedProductGrad => gated_product::is_served(launch),
        OpKind::ActivatedProduct | OpKind::ActivatedProductGrad => activated_product::is_served(launch),
        _ => false,
    };
    match is_served && facts.product.has_own(facts) {
        true => vec![ProductKernel::Cublaslt, ProductKernel::Wgmma],
        false => vec![ProductKernel::Auto],
    }
}

/// The kernel to run if nothing is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Untimed {
    Library,
    Own,
}

pub(super) const LIBRARY: &str = "cublaslt";

/// The part of a product that our kernel leaves to others.
pub(super) type Rest<'a> = &'a dyn Fn() -> Result<Option<Box<dyn Work>>, CudaError>;

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
    let own = |form: &ProductConfig| {
        p.count_product(form.name);
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
    if !facts.product.has_own(facts) || !call.is_served() {
        return library();
    }
    let forms = call.forms(facts);
    if facts.product == ProductKernel::Wgmma {
        return own(forms[0]);
    }
    if p.tuned().candidates() <= 1 {
        return if untimed == Untimed::Own { own(forms[0]) } else { library() };
    }
    let times = times(name, call, &prepare_library, rest, p)?;
    match forms.iter().find(|form| times.first().is_some_and(|best| best.name == form.name)) {
        Some(form) => own(form),
        None => library(),
    }
}

fn own_work(call: &Call, form: &ProductConfig, rest: Rest<'_>, p: &Prepare<'_>) -> Prepared {
    let first = call.prepare(form, p)?;
    Ok(match rest()? {
        Some(rest) => sequence(vec![first, rest]),
        None => first,
    })
}

/// Times of cuBLASLt and of every configuration of our kernel, fastest first: from the cache, or measured now.
fn times(
    name: &str,
    call: &Call,
    library: impl Fn() -> Prepared,
    rest: Rest<'_>,
    p: &Prepare<'_>,
) -> Result<Vec<KernelTime>, CudaError> {
    let forms = call.forms(p.facts());
    let texts: Vec<String> =
        call.sources(p.facts()).iter().map(|source| format!("{source}{}", source.code)).collect();
    let problem = format!("{name} or {}", store::name(texts.iter().map(String::as_str)));
    if let Some(known) = p.tuned().recall_kernels(&problem) {
        return Ok(known);
    }
    let mut times: Vec<KernelTime> = vec![];
    // Products that are only timed are not counted.
    let counted = p.product_counts();
    let own = forms.iter().map(|form| (form.name, own_work(call, form, rest, p)));
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

/// The configurations of our kernel that a product may run on.
pub(super) fn forms(call_forms: &'static [ProductConfig], facts: &Facts) -> &'static [ProductConfig] {
    if facts.product.has_own(facts) { call_forms } else { &[] }
}

/// The error for extents that exceed a kernel's counters.
pub(super) fn too_large(what: &str, n: usize) -> CudaError {
    CudaError::new(format!("{n} {what} are more than the product kernel counts"))
}
