//! Verifies every kernel against the oracle on this machine: one launch at a time, in every form that a plan may use.
//!
//! A case is an operation and the contents of its inputs. It runs dense, strided, in place, with outputs left out and on
//! several threads; values must equal the oracle's within a bound, bits must be the same in all forms that compute the same,
//! and no byte outside the outputs and the workspace may change.

mod attention;
pub mod cases;
pub mod collective;
mod copies;
mod elementwise;
mod layers;
mod linear_attention;
pub mod packed;
mod products;
mod quantization;
pub mod real;
mod regions;
pub mod speed;
mod trial;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use flatout_ir::ops::gated::Act;
use flatout_ir::ops::product::Compute;
use flatout_ir::ops::quantize::Source;
use flatout_ir::target::{KernelRow, Target};
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Launch, Op, OpKind};

use rayon::prelude::*;

use crate::cpu;
use crate::cuda::driver::nvrtc::{Nvrtc, Resources};
use crate::cuda::kernels::attention::choice;
use crate::cuda::kernels::products::choice as product_choice;
use crate::cuda::kernels::stage;
use crate::cuda::{self, AttentionKernel, Facts, ProductKernel};
use trial::{Outputs, Trial, TrialLayout};

/// The contents of an input.
#[derive(Clone, Debug)]
pub enum Data {
    /// Normal numbers with this standard deviation.
    Normal(f64),
    /// Uniform from low to high; integers if the type is i32.
    Between(f64, f64),
    Values(Vec<f64>),
    /// An output of another operation on some of the case's plain inputs.
    Of {
        op: Op,
        ins: Vec<usize>,
        out: usize,
    },
    /// The same tensor as an earlier input.
    Same(usize),
}

#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub op: Op,
    pub ins: Vec<(TensorType, Data)>,
    /// Bound on the relative L2 error of each output.
    pub bound: f64,
    /// Elements below this count as if they were as large, because gradients that cancel to 0 have no significant digits.
    pub floor: f64,
    /// Rows of the first axis of an input that are outside every segment: NaN for a kernel, zeros for the oracle.
    pub idle: Vec<(usize, Range<usize>)>,
    /// Checks only dense tensors and gaps between rows: other cases of the operation cover the other forms.
    pub brief: bool,
}

impl Case {
    pub fn new(name: String, op: Op, ins: Vec<(TensorType, Data)>, bound: f64) -> Self {
        Case { name, op, ins, bound, floor: 0.0, idle: vec![], brief: false }
    }

    fn is_attention(&self) -> bool {
        matches!(self.op.kind(), OpKind::Attention | OpKind::AttentionGrad)
    }
}

/// The backend that a case runs on.
#[derive(Clone, Copy)]
pub enum CaseDevice<'a> {
    Cpu,
    Cuda(&'a cuda::Device),
}

impl CaseDevice<'_> {
    pub fn target(self) -> Target {
        match self {
            CaseDevice::Cpu => cpu::target(1),
            CaseDevice::Cuda(device) => cuda::target(device, false),
        }
    }
}

/// Runs a case in every form on the CPU; returns the worst relative error, or what is wrong.
pub fn check(case: &Case) -> Result<f64, String> {
    Prepared::new(case, &CaseDevice::Cpu.target()).check_on(CaseDevice::Cpu).remove(0).1
}

/// A case with its kernel and the oracle's results. Preparing takes only host time, so several are prepared in parallel.
pub struct Prepared<'a>(Result<(Trial<'a>, Vec<Vec<f64>>), String>);

impl<'a> Prepared<'a> {
    pub fn new(case: &'a Case, target: &Target) -> Self {
        Prepared(kernel_of(case, target).map(|row| {
            let trial = Trial::new(case, row);
            let wanted = trial.oracle();
            (trial, wanted)
        }))
    }

    /// Runs the case in every form, once for every kernel that serves it; returns each kernel's name with the worst relative
    /// error or what is wrong. A deterministic kernel must give equal bits in all forms that compute the same; others stay
    /// within the bound.
    pub fn check_on(&self, place: CaseDevice<'_>) -> Vec<(String, Result<f64, String>)> {
        let (trial, wanted) = match &self.0 {
            Ok(prepared) => prepared,
            Err(why) => return vec![("none".into(), Err(why.clone()))],
        };
        let launch = trial.launch(TrialLayout::Dense { threads: 1 }, 256, 1).0;
        let named = |selection: KernelSelection| {
            (selection.name(trial.row().name), check_selection(trial, wanted, place, selection))
        };
        place.selections(&[launch], cuda::Options::default()).into_iter().map(named).collect()
    }
}

fn check_selection(
    trial: &Trial<'_>,
    wanted: &[Vec<f64>],
    place: CaseDevice<'_>,
    selection: KernelSelection,
) -> Result<f64, String> {
    let (case, row) = (trial.case(), trial.row());
    let judge_form = |form: &str, got: &Outputs| {
        judge(case, trial.outs(), got, wanted).map_err(|why| format!("{form}: {why}"))
    };
    let eager = selection.options(cuda::Options { graphs: false, ..Default::default() });
    let captured = selection.options(cuda::Options::default());
    let dense = TrialLayout::Dense { threads: 1 };
    let first = trial.run(dense, place, eager)?;
    let mut worst = judge_form("dense", &first)?;
    let gaps = selection.gaps();
    if selection.takes(trial, gaps, place, captured) {
        worst = worst.max(judge_form(&format!("{gaps:?}"), &trial.run(gaps, place, captured)?)?);
    }
    if case.brief {
        return Ok(worst);
    }

    let again: &[usize] = if matches!(place, CaseDevice::Cpu) { &[2, 4] } else { &[1] };
    let again = again.iter().map(|&threads| TrialLayout::Dense { threads });
    for form in again.chain(trial.forms()).filter(|form| selection.takes(trial, *form, place, captured)) {
        let got = trial.run(form, place, captured)?;
        if !row.deterministic || may_change_kernel(case, form, place) {
            worst = worst.max(judge_form(&format!("{form:?}"), &got)?);
            continue;
        }
        let differs = |(a, b): (&Option<Vec<u8>>, &Option<Vec<u8>>)| b.is_some() && a != b;
        if let Some(o) = first.iter().zip(&got).position(differs) {
            let away = judge_form("against the oracle", &got)
                .map_or_else(|why| why, |error| format!("within {error:.1e} of the oracle"));
            return Err(format!("{form:?}: output {o} has other bits than dense, run first; {away}"));
        }
    }
    let same = cuda::Options { deterministic: true, ..captured };
    if !row.deterministic && selection.takes(trial, dense, place, same) {
        let (one, two) = (trial.run(dense, place, same)?, trial.run(dense, place, same)?);
        worst = worst.max(judge_form("deterministic", &one)?);
        if one != two {
            return Err("asked to be deterministic, it gives other bits the second time".into());
        }
    }
    Ok(worst)
}

/// Selects one of several kernels behind a row; by default the row's own choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelSelection {
    attention: AttentionKernel,
    product: ProductKernel,
}

impl KernelSelection {
    pub(crate) fn attention(kernel: AttentionKernel) -> KernelSelection {
        KernelSelection { attention: kernel, ..KernelSelection::default() }
    }

    fn product(kernel: ProductKernel) -> KernelSelection {
        KernelSelection { product: kernel, ..KernelSelection::default() }
    }

    /// The row's name, followed by the kernel's.
    fn name(self, row: &str) -> String {
        match self {
            KernelSelection { attention: AttentionKernel::Auto, product: ProductKernel::Auto } => row.into(),
            KernelSelection { attention: AttentionKernel::Auto, product } => {
                format!("{row} {}", product.name())
            }
            KernelSelection { attention, .. } => format!("{row} {}", attention.name()),
        }
    }

    fn options(self, options: cuda::Options) -> cuda::Options {
        let KernelSelection { attention, product } = self;
        cuda::Options { attention, product, ..options }
    }

    fn facts(self, facts: &Facts) -> Facts {
        let KernelSelection { attention, product } = self;
        Facts { attention, product, ..facts.clone() }
    }

    /// The layout of rows with gaps that the kernel supports: tensor-core kernels need multiples of 16 bytes.
    fn gaps(self) -> TrialLayout {
        match self {
            KernelSelection { product: ProductKernel::Wgmma | ProductKernel::Mma, .. } => TrialLayout::Spaced,
            KernelSelection { attention: AttentionKernel::Auto | AttentionKernel::Fma, .. } => {
                TrialLayout::Strided
            }
            _ => TrialLayout::Spaced,
        }
    }

    /// Whether the kernel serves the launch in a form.
    fn takes(
        self,
        trial: &Trial<'_>,
        form: TrialLayout,
        place: CaseDevice<'_>,
        options: cuda::Options,
    ) -> bool {
        let is_always = self == KernelSelection::default() || self.product == ProductKernel::Cublaslt;
        is_always || place.selections(&[trial.launch(form, 256, 1).0], options).contains(&self)
    }
}

/// The kernels that an attention or a product could be forced to run on; other operations have only one.
fn serving(launch: &Launch, facts: &Facts) -> Vec<KernelSelection> {
    match launch.op.kind() {
        OpKind::Attention | OpKind::AttentionGrad => {
            choice::serving(launch, facts).into_iter().map(KernelSelection::attention).collect()
        }
        OpKind::Product
        | OpKind::GatedProduct
        | OpKind::GatedProductGrad
        | OpKind::ActivatedProduct
        | OpKind::ActivatedProductGrad => {
            product_choice::serving(launch, facts).into_iter().map(KernelSelection::product).collect()
        }
        _ => vec![KernelSelection::default()],
    }
}

impl CaseDevice<'_> {
    /// The kernels that serve all of the launches.
    fn selections(self, launches: &[Launch], options: cuda::Options) -> Vec<KernelSelection> {
        let CaseDevice::Cuda(device) = self else { return vec![KernelSelection::default()] };
        let facts = device.facts(options);
        let mut found: Option<Vec<KernelSelection>> = None;
        for selections in launches.iter().map(|launch| serving(launch, &facts)) {
            let earlier = found.unwrap_or_else(|| selections.clone());
            found = Some(earlier.into_iter().filter(|selection| selections.contains(selection)).collect());
        }
        found.unwrap_or_else(|| vec![KernelSelection::default()])
    }
}

/// Whether a different kernel or algorithm, which rounds differently, serves the form on a GPU. Leaving an output out changes a
/// product's epilogue, which the choice of an algorithm depends on; 8-bit products round a separate bf16 base differently from
/// one in place, and only the latter gives the oracle's bits. A norm with quantisation has the access width that the codes
/// along rows allow, so without the codes its lanes sum different elements.
fn may_change_kernel(case: &Case, form: TrialLayout, place: CaseDevice<'_>) -> bool {
    let anew = match (&case.op, form) {
        (Op::Product { epilogue, .. }, TrialLayout::Without { .. }) => epilogue.has_gelu(),
        (Op::ActivatedProduct { act: Act::Gelu, .. }, TrialLayout::Without { .. }) => true,
        (Op::Product { base: true, out: DType::BF16, .. }, TrialLayout::InPlace { .. }) => {
            case.ins[0].0.dtype.is_fp8()
        }
        (
            Op::Quantize { of: Source::Norm(..) | Source::NormGrad { .. }, .. },
            TrialLayout::Without { .. },
        ) => true,
        _ => false,
    };
    anew && matches!(place, CaseDevice::Cuda(_))
}

/// Whether a backend is meant to run a case; types and modes that a device lacks are skipped.
pub fn is_for(case: &Case, place: CaseDevice<'_>) -> bool {
    let target = place.target();
    let has_mode = case.op.compute() != Some(Compute::Tf32) || target.rates.tf32_flops.is_some();
    let kind = case.op.kind();
    let is_everywhere = !kind.is_optional() && !kind.is_collective();
    let has_kernel = is_everywhere || target.kernels.iter().any(|row| row.op == kind);
    has_mode
        && has_kernel
        && (kind.decodes() || types_of(case).iter().all(|dtype| target.dtypes.contains(dtype)))
}

/// The bound of one output: attention's statistics are f32 in every type, and so are weights whose moments are not.
fn bound_of(case: &Case, output: &TensorType) -> f64 {
    let is_exact = case.is_attention() || matches!(case.op.kind(), OpKind::AdamW | OpKind::AdamW8);
    if is_exact && output.dtype == DType::F32 { case.bound.min(attention::F32_BOUND) } else { case.bound }
}

/// The sources of all CUDA kernels that the cases need, in every form, on a device with these facts: for compiling ahead, and
/// for checking kernels without a GPU.
pub fn sources(cases: &[Case], facts: &Facts) -> HashSet<cuda::Source> {
    let mut found = HashSet::new();
    let exists = |case: &&Case| {
        let decodes = case.op.kind().decodes();
        facts.has_fp8() || decodes || !types_of(case).iter().any(|dtype| dtype.is_fp8())
    };
    for case in cases.iter().filter(exists) {
        for kernel in cuda::KERNELS.iter().copied().flatten().filter(|k| runs(&k.row, case)) {
            let trial = Trial::unfilled(case, kernel.row);
            let layouts = [TrialLayout::Dense { threads: 1 }, TrialLayout::Strided, TrialLayout::Spaced];
            let more = if case.brief { vec![] } else { trial.forms() };
            let forms = layouts.into_iter().chain(more);
            for form in forms {
                found.extend(sources_of(&trial.launch(form, 256, 1).0, facts));
            }
        }
    }
    found
}

/// The sources of every kernel that serves a launch.
pub fn sources_of(launch: &Launch, facts: &Facts) -> Vec<cuda::Source> {
    sources_with_shared(launch, facts).into_iter().map(|(source, _)| source).collect()
}

/// As `sources_of`, each with the maximum dynamic shared memory, in bytes, that its kernels are launched with. Only attention
/// and our products use more than the default limit; others report 0.
pub fn sources_with_shared(launch: &Launch, facts: &Facts) -> Vec<(cuda::Source, usize)> {
    let Some(kernel) = cuda::kernel(launch.kernel) else { return vec![] };
    let of = |selection: KernelSelection| {
        let facts = selection.facts(facts);
        let is_attention = matches!(launch.op.kind(), OpKind::Attention | OpKind::AttentionGrad);
        (kernel.sources)(launch, &facts).into_iter().map(move |source| {
            let shared = match is_attention {
                true => choice::shared_bytes(launch, &facts, &source),
                false => product_choice::shared_bytes(&source).max(stage::shared_bytes(&source)),
            };
            (source, shared)
        })
    };
    serving(launch, facts).into_iter().flat_map(of).collect()
}

/// Compiles, in parallel, all that cases and launches need on a device, so that running them hits the cache.
pub fn compile_ahead(
    cases: &[Case],
    launches: &[Launch],
    device: &cuda::Device,
    see: &(dyn Fn(usize, usize) + Sync),
) -> Result<(), cuda::CudaError> {
    let mut all = HashSet::new();
    for deterministic in [false, true] {
        let facts = device.facts(cuda::Options { deterministic, ..Default::default() });
        all.extend(sources(cases, &facts));
        all.extend(launches.iter().flat_map(|launch| sources_of(launch, &facts)));
    }
    let made = AtomicUsize::new(0);
    device.compile_ahead(&all, &|| see(made.fetch_add(1, Ordering::Relaxed) + 1, all.len()))
}

/// The resources of each kernel of some cases on an architecture such as `sm_90a`: source with its defines, architecture, and
/// the compiler's result. Needs no GPU.
pub fn assemble(
    cases: &[Case],
    archs: &[String],
    nvrtc: &Nvrtc,
) -> Vec<(String, String, Result<Vec<Resources>, cuda::CudaError>)> {
    let mut work = vec![];
    for arch in archs {
        let facts = Facts::on_paper(arch);
        work.extend(sources(cases, &facts).into_iter().map(|source| (source, arch)));
    }
    let mut done: Vec<_> = work
        .into_par_iter()
        .map(|(source, arch)| (source.to_string(), arch.clone(), nvrtc.resources(&source, arch)))
        .collect();
    done.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
    done
}

/// The kernel that a plan would use: the first for the type of the first float tensor.
fn kernel_of(case: &Case, target: &Target) -> Result<KernelRow, String> {
    let row = target.kernels.iter().find(|row| runs(row, case)).copied();
    row.ok_or_else(|| format!("no kernel runs {} in {}", case.op.name(), dtype_of(case).name()))
}

fn runs(row: &KernelRow, case: &Case) -> bool {
    row.op == case.op.kind() && row.dtypes.contains(&dtype_of(case))
}

/// The type by which rows are looked up.
fn dtype_of(case: &Case) -> DType {
    let types = types_of(case);
    types.iter().find(|d| d.is_float()).or(types.first()).copied().unwrap_or(DType::F32)
}

fn types_of(case: &Case) -> Vec<DType> {
    case.ins.iter().map(|(ty, _)| ty.dtype).chain(cases::output_type(&case.op)).collect()
}

/// The worst relative L2 error of the outputs. Non-finite elements must be non-finite in both.
fn judge(case: &Case, outs: &[TensorType], got: &Outputs, wanted: &[Vec<f64>]) -> Result<f64, String> {
    let mut worst: f64 = 0.0;
    for (o, (got, want)) in got.iter().zip(wanted).enumerate() {
        let Some(got) = got else { continue };
        let got = crate::session::as_f32(outs[o].dtype, got);
        let (mut error, mut size) = (0.0, 0.0);
        for (e, (got, want)) in got.iter().zip(want).enumerate() {
            let got = *got as f64;
            if want.is_finite() && got.is_finite() {
                error += (got - want) * (got - want);
                size += (want * want).max(case.floor * case.floor);
            } else if got != *want && !(got.is_nan() && want.is_nan()) {
                return Err(format!("output {o}, element {e} is {got}, wanted {want}"));
            }
        }
        let relative = if size == 0.0 { error.sqrt() } else { (error / size).sqrt() };
        let bound = bound_of(case, &outs[o]);
        if relative > bound {
            return Err(format!("output {o} is off by {relative:.2e}, more than {bound:.0e}"));
        }
        worst = worst.max(relative);
    }
    Ok(worst)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_kernel_agrees_with_the_oracle_in_every_form() {
        let cases = cases::all();
        // Attention has too many cases for this test and has its own tests.
        let failed: Vec<String> = cases
            .iter()
            .filter(|case| !case.is_attention() && is_for(case, CaseDevice::Cpu))
            .filter_map(|case| check(case).err().map(|why| format!("{}: {why}", case.name)))
            .collect();
        assert!(failed.is_empty(), "{} cases fail:\n{}", failed.len(), failed.join("\n"));
    }

    /// Reads and movements become views or copies; all other operations need a kernel.
    #[test]
    fn every_operation_a_plan_can_hold_has_a_kernel_and_cases() {
        use OpKind as K;
        let never = [K::Read, K::Transpose, K::Slice, K::Concat, K::Pad, K::Broadcast];
        let needed: BTreeSet<OpKind> = K::ALL.iter().copied().filter(|k| !never.contains(k)).collect();
        let target = cpu::target(2);
        let with_kernel: BTreeSet<OpKind> = target.kernels.iter().map(|k| k.op).collect();
        let on_every = |kind: &&OpKind| !kind.is_optional();
        let all = cases::all();
        let with_case: BTreeSet<OpKind> = all.iter().map(|c| c.op.kind()).collect();
        assert_eq!(with_kernel, needed.iter().filter(on_every).copied().collect());
        assert_eq!(with_case, needed);
        for row in &target.kernels {
            for dtype in row.dtypes {
                let runs = |c: &Case| {
                    kernel_of(c, &target).is_ok_and(|r| r.name == row.name) && types_of(c).contains(dtype)
                };
                assert!(all.iter().any(runs), "no case runs {} in {}", row.name, dtype.name());
            }
        }
    }

    #[test]
    fn kernel_names_are_unique() {
        let names: Vec<&str> = cpu::target(1).kernels.iter().map(|k| k.name).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "{names:?}");
    }

    /// How threads share the rows of a norm on a GPU must not depend on the requested outputs, which would change others' bits.
    #[test]
    fn norms_without_an_output_share_rows_alike() {
        let facts = Facts::on_paper("sm_90a");
        let mut compared = 0;
        for case in cases::all() {
            let is_norm = matches!(case.op.kind(), OpKind::RmsNorm | OpKind::RmsNormGrad);
            let kernels = cuda::KERNELS.iter().copied().flatten();
            for kernel in kernels.filter(|kernel| is_norm && runs(&kernel.row, &case)) {
                let trial = Trial::unfilled(&case, kernel.row);
                let shares = |form: TrialLayout| -> Vec<Vec<(String, String)>> {
                    let is_share = |name: &str| ["VEC", "VECS", "LANES"].contains(&name);
                    let sources = (kernel.sources)(&trial.launch(form, 256, 1).0, &facts).into_iter();
                    let norms = sources.filter(|source| source.name == "norm.cu");
                    norms
                        .map(|s| s.defines.into_iter().filter(|(name, _)| is_share(name)).collect())
                        .collect()
                };
                let whole = shares(TrialLayout::Dense { threads: 1 });
                let without =
                    trial.forms().into_iter().filter(|form| matches!(form, TrialLayout::Without { .. }));
                for (form, share) in without.flat_map(|form| shares(form).into_iter().map(move |s| (form, s)))
                {
                    assert!(whole.contains(&share), "{}, {form:?}: {share:?}, not {whole:?}", case.name);
                    compared += 1;
                }
            }
        }
        assert!(compared > 1000, "{compared}");
    }

    /// The check itself detects a wrong value: an update with another decay.
    #[test]
    fn a_wrong_kernel_is_noticed() {
        let right = cases::all().into_iter().find(|c| c.op.kind() == OpKind::AdamW).expect("a case");
        let mut wrong = right.clone();
        if let Op::AdamW { weight_decay, .. } = &mut wrong.op {
            *weight_decay *= 2.0;
        }
        let row = kernel_of(&right, &cpu::target(1)).unwrap();
        let (sound, other) = (Trial::new(&right, row), Trial::new(&wrong, row));
        let got =
            other.run(TrialLayout::Dense { threads: 1 }, CaseDevice::Cpu, cuda::Options::default()).unwrap();
        assert!(judge(&right, sound.outs(), &got, &sound.oracle()).is_err());
    }
}
