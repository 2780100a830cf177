//! Measures the attention families that can run a problem; times are stored on disk.
//!
//! Times are taken on this device, in the session's own arena.

use flatout_ir::Launch;
use flatout_ir::types::DType;

use super::call::Call;
use super::choice::{Family, is_unsupported};
use super::{Problem, tiles};
use crate::cuda::context::{CudaError, Prepare, Source};
use crate::cuda::driver::store;
use crate::cuda::kernels::timing::median_ms;
use crate::cuda::session::noise::{self, Noise};
use crate::cuda::session::tuned::KernelTime;

/// The sources that `times` needs besides those of the families.
pub(super) fn sources(p: &Problem) -> Vec<Source> {
    tiles::sources(p)
}

/// Times of all candidates that run, fastest first: from the cache, or measured now on noise and equal segments. Overwrites the
/// launch's inputs and outputs.
pub(super) fn times(
    p: &Problem,
    launch: &Launch,
    candidates: &[&'static Family],
    at: &Prepare<'_>,
) -> Result<Vec<KernelTime>, CudaError> {
    let name = problem_name(p, launch, candidates, at);
    if let Some(known) = at.tuned().recall_kernels(&name) {
        return Ok(known);
    }
    fill(p, launch, at)?;
    let mut times: Vec<KernelTime> = vec![];
    for family in candidates {
        let work = match (family.prepare)(p, launch, at) {
            // Skipped here; the choice reports it with a note.
            Err(error) if is_unsupported(&error) => continue,
            prepared => prepared?,
        };
        let best = times.iter().map(|t| t.ms).fold(f64::INFINITY, f64::min);
        let ms = median_ms(&*work, best, at)?;
        times.push(KernelTime { name: family.name.into(), ms });
    }
    // Stable sort: equal times keep the order of the rule.
    times.sort_by(|a, b| a.ms.total_cmp(&b.ms));
    at.tuned().remember_kernels(&name, &times);
    Ok(times)
}

/// The cache key besides GPU and driver: the problem, the layout of its tensors, cuDNN's version and our sources.
fn problem_name(p: &Problem, launch: &Launch, candidates: &[&Family], at: &Prepare<'_>) -> String {
    let facts = at.facts();
    let sources: Vec<Source> = candidates.iter().flat_map(|family| (family.sources)(p, facts)).collect();
    let texts = sources.iter().flat_map(|source| {
        let defines = source.defines.iter().flat_map(|(name, value)| [name.as_str(), value]);
        [source.name, &source.code].into_iter().chain(defines)
    });
    let names: Vec<&str> = candidates.iter().map(|family| family.name).collect();
    let views = launch.ins.iter().chain(launch.outs.iter().flatten());
    let strides: Vec<_> = views.map(|view| &view.strides).collect();
    let cudnn = facts.cudnn.unwrap_or(0);
    format!("{p:?} with strides {strides:?} on {names:?}, cuDNN {cudnn}, kernels {}", store::name(texts))
}

/// Fills tensors with noise, and segments and intervals with plausible values, because the arena is still empty.
fn fill(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Result<(), CudaError> {
    let function = at.function(&noise::source(), "noise")?;
    let floats = launch.ins.iter().filter(|view| view.dtype != DType::I32);
    for (seed, view) in floats.enumerate() {
        // Whole words, from the first that starts in the view; other tensors between its rows get noise too.
        let from = at.address(view).next_multiple_of(4);
        let end = at.address(view) + view.span_bytes() as u64;
        let words = end.saturating_sub(from) as usize / 4;
        // SAFETY: the launch was validated, so the view lies in the arena, which outlives the work on the stream.
        unsafe { noise::fill(&function, from, words, 1 + seed as u32, Noise::WIDE, at.stream()) }?;
    }
    if !tiles::sources(p).is_empty() {
        tiles::even_segments(p, &Call::of(p, launch, at), at)?.enqueue(at.stream())?;
    }
    Ok(())
}
