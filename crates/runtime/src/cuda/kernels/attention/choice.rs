//! Chooses an attention kernel: the families, the rule by shape, and the choice by measured times.
//!
//! A family serves a problem or not, depending on shapes, types and device; under `deterministic` it does not serve a problem
//! for which it has no deterministic form. With `autotune` the fastest family on this device is chosen and remembered;
//! otherwise the first in the order of `by_rule`.

use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, PlanSet, View};

use super::{Problem, decode, dense, flash, hopper, mma, packed, timing};
use crate::cuda::context::{CudaError, Facts, Prepare, Prepared, Source};

/// The attention kernels a run may request. Few queries over many keys have a dedicated kernel, which is part of each choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AttentionKernel {
    #[default]
    Auto,
    Cudnn,
    Wgmma,
    Mma,
    Fma,
    /// Requested only by tests.
    Decode,
}

impl AttentionKernel {
    /// The kernels that a run may request.
    pub const ALL: &[AttentionKernel] = &[
        AttentionKernel::Auto,
        AttentionKernel::Cudnn,
        AttentionKernel::Wgmma,
        AttentionKernel::Mma,
        AttentionKernel::Fma,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            AttentionKernel::Auto => "auto",
            AttentionKernel::Cudnn => "cudnn",
            AttentionKernel::Wgmma => "wgmma",
            AttentionKernel::Mma => "mma",
            AttentionKernel::Fma => "fma",
            AttentionKernel::Decode => "decode",
        }
    }

    /// Why this kernel cannot run any attention on such a device, if so.
    pub fn missing(self, facts: &Facts) -> Option<String> {
        match self {
            AttentionKernel::Cudnn if facts.cudnn.is_none() => Some("cuDNN was not found".into()),
            AttentionKernel::Wgmma if facts.major != 9 => Some(format!(
                "its instructions are Hopper's, and this GPU is an sm_{}{}",
                facts.major, facts.minor
            )),
            _ => None,
        }
    }
}

/// The kernels that cannot be requested on such a device, with the reason.
pub fn missing(facts: &Facts) -> Vec<(&'static str, String)> {
    let all = AttentionKernel::ALL.iter();
    all.filter_map(|kernel| Some((kernel.name(), kernel.missing(facts)?))).collect()
}

/// Why an attention of these plans cannot run on the requested kernel; without a request some kernel always can.
pub fn refusal(plans: &PlanSet, facts: &Facts) -> Option<String> {
    let is_attention =
        |launch: &&Launch| matches!(launch.op, Op::Attention { .. } | Op::AttentionGrad { .. });
    let launches = plans.plans.iter().flat_map(|plan| &plan.launches).filter(is_attention);
    launches
        .map(|launch| (Problem::of(launch), launch))
        .find(|(p, launch)| candidates(p, launch, facts).is_empty())
        .map(|(p, _)| cannot_run(&p, facts))
}

/// Kernels of one kind; they differ by direction through `Problem::grad`.
pub(super) struct Family {
    pub name: &'static str,
    /// Whether it supports these shapes and types on this device, in a deterministic form if `Facts` require one.
    pub serves: fn(&Problem, &Facts) -> bool,
    /// Upper bound in bytes from shapes alone; 0 if it serves the problem on no GPU.
    pub workspace: fn(&Problem) -> usize,
    pub sources: fn(&Problem, &Facts) -> Vec<Source>,
    /// Dynamic shared memory in bytes: the maximum over the kernels of one of its sources.
    pub shared: fn(&Problem, &Facts, &Source) -> usize,
    pub prepare: fn(&Problem, &Launch, &Prepare<'_>) -> Prepared,
    /// Whether it needs 16-byte aligned addresses and strides that are multiples of 8 elements.
    pub is_aligned: bool,
    /// Whether it supports the launch's set of requested outputs and its aliased tensors.
    pub takes: fn(&Problem, &Launch) -> bool,
    /// Whether its backward pass accepts a gradient of lse.
    pub takes_d_lse: bool,
    /// Whether it supports a soft cap of scores.
    pub takes_cap: bool,
}

/// Default order of preference, where `by_rule` knows no better; the last family supports everything.
const FAMILIES: &[Family] = &[
    Family {
        name: "cudnn",
        serves: dense::serves,
        workspace: dense::workspace,
        sources: |_, _| vec![dense::source()],
        shared: |_, _, _| 0,
        prepare: dense::prepare,
        is_aligned: true,
        takes: dense::takes,
        takes_d_lse: false,
        takes_cap: false,
    },
    Family {
        name: "cudnn",
        serves: packed::serves,
        workspace: packed::workspace,
        sources: |p, _| packed::sources(p),
        shared: |_, _, _| 0,
        prepare: packed::prepare,
        is_aligned: true,
        takes: packed::takes,
        takes_d_lse: false,
        takes_cap: false,
    },
    Family {
        name: "wgmma",
        serves: hopper::forward::serves,
        workspace: hopper::forward::workspace,
        sources: hopper::forward::sources,
        shared: hopper::forward::shared_bytes,
        prepare: hopper::forward::prepare,
        is_aligned: true,
        takes: |_, _| true,
        takes_d_lse: false,
        takes_cap: false,
    },
    Family {
        name: "wgmma",
        serves: hopper::backward::serves,
        workspace: hopper::backward::workspace,
        sources: hopper::backward::sources,
        shared: hopper::backward::shared_bytes,
        prepare: hopper::backward::prepare,
        is_aligned: true,
        takes: |_, _| true,
        takes_d_lse: true,
        takes_cap: false,
    },
    Family {
        name: "mma",
        serves: mma::serves,
        workspace: mma::workspace,
        sources: mma::sources,
        shared: mma::shared_bytes,
        prepare: mma::prepare,
        is_aligned: true,
        takes: |_, _| true,
        takes_d_lse: true,
        takes_cap: true,
    },
    Family {
        name: "decode",
        serves: decode::serves,
        workspace: decode::workspace,
        sources: decode::sources,
        shared: |_, _, _| 0,
        prepare: decode::prepare,
        is_aligned: true,
        takes: |_, _| true,
        takes_d_lse: true,
        takes_cap: false,
    },
    Family {
        name: "fma",
        serves: |_, _| true,
        workspace: flash::workspace,
        sources: |p, _| flash::sources(p),
        shared: |p, _, source| flash::most_shared_bytes(p, source),
        prepare: flash::prepare,
        is_aligned: false,
        takes: |_, _| true,
        takes_d_lse: true,
        takes_cap: true,
    },
];

/// The maximum over all families: which one runs depends on the device, on addresses and on times.
pub(super) fn workspace(p: &Problem) -> usize {
    FAMILIES.iter().map(|family| (family.workspace)(p)).max().unwrap_or(0)
}

/// The families in an order that depends on shape alone; without times the first that serves is used. On an H200, bf16, in
/// ms (wgmma, mma, cuDNN): forward 32 x 2048 of 12 heads on 4 of 64 causal 0.48, 0.72, 0.53; its backward 1.60, 2.40, 1.70;
/// backward 256 x 257 of 12 heads of 64 full 0.46, 0.92, 0.94; backward 16 x 2048 of 16 heads on 8 of 128 causal 2.00,
/// 3.46, 1.77; backward 64 x 512 of 4 heads on 1 of 256 0.37, 0.76, 0.54; packed 65,536 tokens in 325 segments of 12 heads
/// on 4 of 64 causal 0.16, 0.24, 0.30 and backward 0.53, 0.68, 1.21.
fn by_rule(p: &Problem) -> [&'static str; 5] {
    match (p.grad, p.is_ragged(), p.size) {
        _ if p.is_decode() => ["decode", "mma", "wgmma", "cudnn", "fma"],
        (true, true, _) => ["wgmma", "mma", "cudnn", "decode", "fma"],
        (true, false, 65..=128) => ["cudnn", "wgmma", "mma", "decode", "fma"],
        (_, true, _) => ["wgmma", "mma", "cudnn", "decode", "fma"],
        _ => ["wgmma", "cudnn", "mma", "decode", "fma"],
    }
}

/// The families that can run a launch, in the order of `by_rule`. `fma` is included only if no other kernel of ours is: it is
/// never the fastest, and cuDNN may refuse a shape that it was expected to support.
fn candidates(p: &Problem, launch: &Launch, facts: &Facts) -> Vec<&'static Family> {
    let fits = |family: &&Family| {
        (family.serves)(p, facts)
            && (!p.d_lse || family.takes_d_lse)
            && (p.cap.is_none() || family.takes_cap)
            && (!family.is_aligned || is_aligned(p, launch))
            && (family.takes)(p, launch)
    };
    let place = |family: &&Family| by_rule(p).iter().position(|name| *name == family.name);
    let mut found: Vec<&Family> = FAMILIES.iter().filter(fits).collect();
    found.sort_by_key(place);
    match facts.attention {
        AttentionKernel::Auto => {
            let has_better = found.iter().any(|family| !["cudnn", "fma"].contains(&family.name));
            found.retain(|family| family.name != "fma" || !has_better);
        }
        forced => {
            let is_it = |family: &&Family| family.name == forced.name();
            let only = if found.iter().any(is_it) { forced.name() } else { "decode" };
            found.retain(|family| family.name == only);
        }
    }
    found
}

/// Every kernel that a launch could be forced to run on.
pub fn serving(launch: &Launch, facts: &Facts) -> Vec<AttentionKernel> {
    use AttentionKernel::{Cudnn, Decode, Fma, Mma, Wgmma};
    let serves = |kernel: &AttentionKernel| {
        let facts = Facts { attention: *kernel, ..facts.clone() };
        candidates(&Problem::of(launch), launch, &facts).iter().any(|family| family.name == kernel.name())
    };
    [Cudnn, Wgmma, Mma, Decode, Fma].into_iter().filter(serves).collect()
}

/// Maximum dynamic shared memory of the kernels of a source when they run a launch.
pub fn shared_bytes(launch: &Launch, facts: &Facts, source: &Source) -> usize {
    let p = Problem::of(launch);
    candidates(&p, launch, facts).iter().map(|family| (family.shared)(&p, facts, source)).max().unwrap_or(0)
}

/// Whether all tensors allow 16-byte accesses.
fn is_aligned(p: &Problem, launch: &Launch) -> bool {
    let aligned = |view: &View| {
        let even = view.strides[..2].iter().zip(&view.dims).all(|(s, d)| *d == 1 || s.is_multiple_of(8));
        view.offset.is_multiple_of(16) && even
    };
    let n = p.inputs();
    let saved = if p.grad { vec![&launch.ins[n], &launch.ins[n + 2]] } else { vec![] };
    let outs = launch.outs.iter().flatten().filter(|view| view.dims.len() == 3);
    p.size.is_multiple_of(8) && launch.ins[..3].iter().chain(saved).chain(outs).all(aligned)
}

pub(super) fn sources(p: &Problem, launch: &Launch, facts: &Facts) -> Vec<Source> {
    let mut sources: Vec<Source> =
        candidates(p, launch, facts).iter().flat_map(|family| (family.sources)(p, facts)).collect();
    if facts.autotune {
        sources.extend(timing::sources(p));
    }
    sources
}

/// The kernel that an attention runs on, for the log.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    pub grad: bool,
    pub kernel: &'static str,
    /// Milliseconds of this kernel and of the runner-up, if they were timed.
    pub ms: Option<f64>,
    pub next: Option<(&'static str, f64)>,
}

/// Whether an error is a CUDNN_STATUS_NOT_SUPPORTED (see `cudnnStatus_t`) or a refusal of our own.
pub(super) fn is_unsupported(error: &CudaError) -> bool {
    error.code == 0 || (3000..4000).contains(&error.code)
}

pub(super) fn prepare(p: &Problem, launch: &Launch, at: &Prepare<'_>) -> Prepared {
    let facts = at.facts();
    let candidates = candidates(p, launch, facts);
    if candidates.is_empty() {
        return Err(CudaError::new(cannot_run(p, facts)));
    }
    let timed: Vec<&Family> = candidates.iter().copied().filter(|family| family.name != "fma").collect();
    let times =
        if facts.autotune && timed.len() > 1 { timing::times(p, launch, &timed, at)? } else { vec![] };
    // Timed families first, fastest first; then the others in the order of the rule.
    let place = |family: &&Family| times.iter().position(|t| t.name == family.name).unwrap_or(times.len());
    let mut order = candidates.clone();
    order.sort_by_key(place);
    let mut refusal = None;
    for family in order {
        match (family.prepare)(p, launch, at) {
            Err(error) if is_unsupported(&error) => {
                at.note(format!("{} does not run on {}: {error}", launch.op.name(), family.name));
                refusal = Some(error);
            }
            Err(error) => return Err(error),
            Ok(work) => {
                if family.name == "fma"
                    && facts.attention == AttentionKernel::Auto
                    && let Some(why) = why_slow(p, facts)
                {
                    at.note(format!("{} runs on our plain kernel: {why}", launch.op.name()));
                }
                let time = |name: &str| times.iter().find(|t| t.name == name).map(|t| t.ms);
                let next = candidates.iter().filter(|f| f.name != family.name);
                let next = next.filter_map(|f| Some((f.name, time(f.name)?)));
                at.record_attention(Chosen {
                    grad: p.grad,
                    kernel: family.name,
                    ms: time(family.name),
                    next: next.min_by(|a, b| a.1.total_cmp(&b.1)),
                });
                return Ok(work);
            }
        }
    }
    Err(refusal.unwrap_or_else(|| CudaError::new(cannot_run(p, facts))))
}

/// The error for a forced kernel that does not support the problem. Without force some kernel always does.
fn cannot_run(p: &Problem, facts: &Facts) -> String {
    let name = facts.attention.name();
    let is_it = |family: &&Family| family.name == name;
    if !p.cap.is_none() && FAMILIES.iter().filter(is_it).all(|family| !family.takes_cap) {
        return format!(
            "`attention_kernel={name}` cannot run: it caps no scores, and this model's are capped; mma and fma do"
        );
    }
    let serves = |family: &Family| family.name == name && (family.serves)(p, facts);
    let lies_wrong = FAMILIES.iter().any(serves).then(|| {
        "it does not take these tensors, which are slices, off 16 bytes, or not all asked for".into()
    });
    let why = facts.attention.missing(facts).or(lies_wrong).unwrap_or_else(|| {
        let (direction, dtype) = (if p.grad { "backward" } else { "forward" }, p.dtype.name());
        format!(
            "it does not take {direction} attention in {dtype} with heads of {}, mask {:?}, queries {:?} and keys {:?}{}",
            p.size,
            p.mask,
            p.q,
            p.k,
            if facts.deterministic { " with equal bits" } else { "" }
        )
    });
    format!("`attention_kernel={name}` cannot run: {why}")
}

/// Why a bf16 attention has no tensor-core kernel, in a sentence that a user can act on.
fn why_slow(p: &Problem, facts: &Facts) -> Option<String> {
    if p.dtype != DType::BF16 {
        return None;
    }
    dense::unserved(p).or_else(|| facts.cudnn.is_none().then(|| "cuDNN is missing".into()))
}

/// Summarises a session's attention kernels in one line: `wgmma forward (0.52 ms, cudnn 0.54), cudnn backward`.
pub fn describe(chosen: &[Chosen]) -> Option<String> {
    let direction = |grad: bool| {
        let mut kernels: Vec<String> = vec![];
        for c in chosen.iter().filter(|c| c.grad == grad) {
            let time = match (c.ms, c.next) {
                (Some(ms), Some((next, next_ms))) => format!(" ({}, {next} {})", show(ms), show(next_ms)),
                _ => String::new(),
            };
            let said = format!("{}{time}", c.kernel);
            if !kernels.contains(&said) {
                kernels.push(said);
            }
        }
        (!kernels.is_empty())
            .then(|| format!("{} {}", if grad { "backward" } else { "forward" }, kernels.join(", ")))
    };
    let directions: Vec<String> = [false, true].into_iter().filter_map(direction).collect();
    (!directions.is_empty()).then(|| directions.join("; "))
}

fn show(ms: f64) -> String {
    if ms < 1.0 { format!("{ms:.3} ms") } else { format!("{ms:.2} ms") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::ops::attention::{Mask, Segments};
    use flatout_ir::ops::cap::Cap;

    fn launch(dtype: DType, size: usize, len: usize, offset: usize, attend: Op) -> Launch {
        let view = |heads: usize| View {
            offset,
            dtype,
            dims: vec![4 * len, heads, size],
            strides: vec![8 * size, size, 1],
        };
        let segments = View { offset: 0, dtype: DType::I32, dims: vec![4], strides: vec![1] };
        let mut ins = vec![view(4), view(2), view(2)];
        if let Op::Attention { q: Segments::Ragged { .. }, .. } = attend {
            ins.extend([(); 4].map(|_| segments.clone()));
        }
        let outs = vec![Some(view(4)), None];
        let path = String::new();
        Launch {
            kernel: "cuda.attention",
            op: attend,
            ins,
            outs,
            workspace: None,
            path,
            key: 0,
            flops: 0,
            queue: flatout_ir::Queue::Compute,
            joins: None,
        }
    }

    fn uniform(len: usize) -> Op {
        let segments = Segments::Uniform { len };
        Op::Attention { scale: 1.0, cap: Cap::NONE, mask: Mask::Causal, q: segments, k: segments }
    }

    fn names(launch: &Launch, facts: &Facts) -> Vec<&'static str> {
        candidates(&Problem::of(launch), launch, facts).iter().map(|f| f.name).collect()
    }

    fn hopper() -> Facts {
        Facts { cudnn: Some(91900), ..Facts::on_paper("sm_90a") }
    }

    #[test]
    fn every_problem_has_a_kernel_and_cudnn_gets_only_supported_ones() {
        let bf16 = DType::BF16;
        assert!(names(&launch(bf16, 64, 128, 0, uniform(128)), &hopper()).contains(&"cudnn"));
        for (what, other) in [
            ("another type", launch(DType::F32, 64, 128, 0, uniform(128))),
            ("odd heads", launch(bf16, 60, 128, 0, uniform(128))),
            ("off its alignment", launch(bf16, 64, 128, 2, uniform(128))),
        ] {
            assert_eq!(names(&other, &hopper()), ["fma"], "{what}");
        }
        let without = Facts { cudnn: None, ..hopper() };
        assert!(!names(&launch(bf16, 64, 128, 0, uniform(128)), &without).contains(&"cudnn"));
        let mut no_output = launch(bf16, 64, 128, 0, uniform(128));
        no_output.outs[0] = None;
        assert!(!names(&no_output, &hopper()).contains(&"cudnn"));
    }

    /// Among several that serve, the rule decides; on a device that lacks one, the next is used.
    #[test]
    fn without_times_the_rule_goes_by_shape() {
        let p = Problem::of(&launch(DType::BF16, 64, 2048, 0, uniform(2048)));
        let ragged = Segments::Ragged { max_segments: 4, max_len: 2048 };
        let packed = Problem { q: ragged, k: ragged, ..p };
        let short = Segments::Uniform { len: 257 };
        let decode = Problem { q: Segments::Uniform { len: 1 }, tq: 4, ..p };
        for (p, first) in [
            (p, ["wgmma", "cudnn"]),
            (Problem { grad: true, ..p }, ["wgmma", "cudnn"]),
            (Problem { grad: true, q: short, k: short, ..p }, ["wgmma", "cudnn"]),
            (Problem { grad: true, size: 128, ..p }, ["cudnn", "wgmma"]),
            (Problem { grad: true, size: 256, ..p }, ["wgmma", "cudnn"]),
            (packed, ["wgmma", "mma"]),
            (Problem { grad: true, ..packed }, ["wgmma", "mma"]),
            (decode, ["decode", "mma"]),
        ] {
            assert_eq!(by_rule(&p)[..2], first, "{p:?}");
            assert_eq!(by_rule(&p)[4], "fma");
        }
        let ampere = Facts { cudnn: Some(91900), ..Facts::on_paper("sm_86") };
        assert_eq!(names(&launch(DType::BF16, 64, 2048, 0, uniform(2048)), &ampere), ["cudnn", "mma"]);
        let op = Op::Attention { scale: 1.0, cap: Cap::NONE, mask: Mask::Causal, q: ragged, k: ragged };
        assert_eq!(names(&launch(DType::BF16, 64, 2048, 0, op), &ampere), ["mma"]);
    }

    /// cuDNN alone determines the workspace of equal sequences, as in the plan of pretrain-226m.
    #[test]
    fn no_family_raises_the_scratch_of_equal_sequences() {
        let p = Problem::of(&launch(DType::BF16, 64, 2048, 0, uniform(2048)));
        let p = Problem { tq: 32 * 2048, tk: 32 * 2048, heads: 12, kv_heads: 4, ..p };
        for grad in [false, true] {
            let p = Problem { grad, ..p };
            assert_eq!(workspace(&p), dense::workspace(&p));
        }
    }

    #[test]
    fn a_forced_kernel_is_the_only_candidate_or_an_error() {
        let launch = launch(DType::BF16, 64, 128, 0, uniform(128));
        let p = Problem::of(&launch);
        for kernel in [AttentionKernel::Cudnn, AttentionKernel::Fma] {
            let facts = Facts { attention: kernel, ..hopper() };
            assert_eq!(names(&launch, &facts), [kernel.name()]);
        }
        let ampere =
            Facts { attention: AttentionKernel::Wgmma, cudnn: Some(91900), ..Facts::on_paper("sm_86") };
        assert!(names(&launch, &ampere).is_empty());
        assert_eq!(
            cannot_run(&p, &ampere),
            "`attention_kernel=wgmma` cannot run: its instructions are Hopper's, and this GPU is an sm_86"
        );
        let without = Facts { attention: AttentionKernel::Cudnn, cudnn: None, ..hopper() };
        assert_eq!(cannot_run(&p, &without), "`attention_kernel=cudnn` cannot run: cuDNN was not found");
        let cudnn = Facts { attention: AttentionKernel::Cudnn, ..hopper() };
        let said = cannot_run(&p, &cudnn);
        assert!(said.contains("does not take these tensors"), "{said}");
        let said = cannot_run(&Problem { dtype: DType::F32, ..p }, &cudnn);
        assert!(said.contains("does not take forward attention in f32 with heads of 64"), "{said}");
    }

    /// Kernels without a cap are no candidates for capped scores, and say so if forced.
    #[test]
    fn capped_scores_run_where_they_are_capped() {
        let capped = |len: usize| {
            let segments = Segments::Uniform { len };
            Op::Attention { scale: 1.0, cap: Cap(Some(50.0)), mask: Mask::Causal, q: segments, k: segments }
        };
        let launch = launch(DType::BF16, 64, 2048, 0, capped(2048));
        assert_eq!(names(&launch, &hopper()), ["mma"]);
        for kernel in [AttentionKernel::Cudnn, AttentionKernel::Wgmma] {
            let facts = Facts { attention: kernel, ..hopper() };
            assert!(names(&launch, &facts).is_empty());
            assert!(cannot_run(&Problem::of(&launch), &facts).contains("it caps no scores"));
        }
    }

    #[test]
    fn the_log_names_kernels_and_times() {
        let plain = |grad, kernel| Chosen { grad, kernel, ms: None, next: None };
        assert_eq!(describe(&[]), None);
        let chosen = [plain(false, "cudnn"), plain(true, "cudnn"), plain(false, "cudnn")];
        assert_eq!(describe(&chosen).as_deref(), Some("forward cudnn; backward cudnn"));
        let timed = Chosen { grad: false, kernel: "wgmma", ms: Some(0.52), next: Some(("cudnn", 1.25)) };
        assert_eq!(
            describe(&[timed, plain(true, "mma")]).as_deref(),
            Some("forward wgmma (0.520 ms, cudnn 1.25 ms); backward mma")
        );
    }
}
