//! Every kernel against the oracle, on this machine: one launch at a time, in every form a plan may use it.
//!
//! A case is an operation and what its inputs hold. It runs dense, strided, in place, with outputs left out and on
//! several threads; values must be the oracle's within a bound, bits the same in every form that computes the same,
//! and no byte outside the outputs and the scratch may change.

pub mod cases;
mod linear_attention;
mod products;
pub mod real;
pub mod speed;
mod trial;

use std::collections::HashSet;

use flatout_ir::ops::epilogue::Epilogue;
use flatout_ir::ops::product::Compute;
use flatout_ir::target::{KernelRow, Target};
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Op, OpKind};

use rayon::prelude::*;

use crate::cpu;
use crate::cuda::nvrtc::{Nvrtc, Resources};
use crate::cuda::{self, Facts};
use trial::{Form, Outputs, Trial};

/// What an input holds.
#[derive(Clone, Debug)]
pub enum Data {
    /// Normal numbers of this deviation.
    Normal(f64),
    /// Evenly from low to high; whole numbers where the type is i32.
    Between(f64, f64),
    Values(Vec<f64>),
    /// An output of another operation on some of the case's plain inputs.
    Of {
        op: Op,
        ins: Vec<usize>,
        out: usize,
    },
}

#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub op: Op,
    pub ins: Vec<(TensorType, Data)>,
    /// On the relative L2 error of each output.
    pub bound: f64,
}

/// Where a case runs.
#[derive(Clone, Copy)]
pub enum Place<'a> {
    Cpu,
    Cuda(&'a cuda::Device),
}

impl Place<'_> {
    fn target(self) -> Target {
        match self {
            Place::Cpu => cpu::target(1),
            Place::Cuda(device) => cuda::target(device, false),
        }
    }
}

/// Runs a case in every form on the CPU; gives the worst relative error, or what is wrong.
pub fn check(case: &Case) -> Result<f64, String> {
    check_on(case, Place::Cpu)
}

/// Runs a case in every form; gives the worst relative error, or what is wrong. A kernel that is deterministic gives the
/// same bits in every form that computes the same; one that is not stays within the bound.
pub fn check_on(case: &Case, place: Place<'_>) -> Result<f64, String> {
    let row = kernel_of(case, &place.target())?;
    let trial = Trial::new(case, row);
    let wanted = trial.oracle();
    let bound = bound_on(case, place);
    let judge_form = |form: &str, got: &Outputs| {
        judge(trial.outs(), got, &wanted, bound).map_err(|why| format!("{form}: {why}"))
    };

    let eager = cuda::Options { graphs: false, ..Default::default() };
    let captured = cuda::Options::default();
    let dense = Form::Dense { threads: 1 };
    let first = trial.run(dense, place, eager)?;
    let strided = trial.run(Form::Strided, place, eager)?;
    let mut worst = judge_form("dense", &first)?.max(judge_form("strided", &strided)?);

    let again: &[usize] = if matches!(place, Place::Cpu) { &[2, 4] } else { &[1] };
    let again = again.iter().map(|&threads| Form::Dense { threads });
    for form in again.chain(trial.forms()) {
        let got = trial.run(form, place, captured)?;
        if !row.deterministic || chooses_anew(case, form, place) {
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
    if !row.deterministic {
        let same = cuda::Options { deterministic: true, ..captured };
        let (one, two) = (trial.run(dense, place, same)?, trial.run(dense, place, same)?);
        worst = worst.max(judge_form("deterministic", &one)?);
        if one != two {
            return Err("asked to be deterministic, it gives other bits the second time".into());
        }
    }
    Ok(worst)
}

/// Whether another kernel or algorithm serves the form on a GPU, which rounds otherwise. Leaving an output out changes a
/// product's epilogue, which is part of the choice of an algorithm; 8-bit products and those with sums round a bf16 base
/// that lies elsewhere otherwise than one in place, which alone gives the oracle's bits; and cuDNN gives no statistics
/// without the result, so that our own kernel does.
fn chooses_anew(case: &Case, form: Form, place: Place<'_>) -> bool {
    let anew = match (&case.op, form) {
        (Op::Product { epilogue, .. }, Form::Without { .. }) => {
            epilogue.has_gelu() || *epilogue == Epilogue::SumA
        }
        (Op::Product { epilogue, base: true, out: DType::BF16, .. }, Form::InPlace { .. }) => {
            *epilogue == Epilogue::SumA || case.ins[0].0.dtype.is_fp8()
        }
        (Op::Attention { .. }, Form::Without { output: 0 }) => true,
        _ => false,
    };
    anew && matches!(place, Place::Cuda(_))
}

/// Whether a place is meant to run a case: types and modes that a device does not have are no cases of it.
pub fn is_for(case: &Case, place: Place<'_>) -> bool {
    let target = place.target();
    let has_mode = case.op.compute() != Some(Compute::Tf32) || target.rates.tf32_flops.is_some();
    has_mode && types_of(case).iter().all(|dtype| target.dtypes.contains(dtype))
}

/// Attention on a GPU adds up its softmax block by block.
pub fn bound_on(case: &Case, place: Place<'_>) -> f64 {
    let is_attention = matches!(case.op.kind(), OpKind::Attention | OpKind::AttentionGrad);
    match place {
        Place::Cuda(_) if is_attention => case.bound.max(2e-5),
        _ => case.bound,
    }
}

/// The kernel that runs a case on a target.
pub fn kernel_name(case: &Case, place: Place<'_>) -> Result<&'static str, String> {
    kernel_of(case, &place.target()).map(|row| row.name)
}

/// Everything the CUDA kernels of some cases compile on a device with these facts, in every form: for compiling ahead,
/// and for checking kernels where there is no GPU.
pub fn sources(cases: &[Case], facts: &Facts) -> HashSet<cuda::Source> {
    let mut found = HashSet::new();
    let exists = |case: &&Case| facts.has_fp8() || !types_of(case).iter().any(|dtype| dtype.is_fp8());
    for case in cases.iter().filter(exists) {
        for kernel in cuda::KERNELS.iter().copied().flatten().filter(|k| runs(&k.row, case)) {
            let trial = Trial::unfilled(case, kernel.row);
            let forms = [Form::Dense { threads: 1 }, Form::Strided].into_iter().chain(trial.forms());
            for form in forms {
                let (launch, _) = trial.launch(form, 256, 1);
                found.extend((kernel.sources)(&launch, facts));
            }
        }
    }
    found
}

/// Compiles, in parallel, what the cases need on a device, so that running them finds it in the cache.
pub fn compile_ahead(cases: &[Case], device: &cuda::Device) -> Result<(), cuda::CudaError> {
    device.compile_ahead(&sources(cases, &device.facts(cuda::Options::default())))
}

/// What each kernel of some cases takes on an architecture such as `sm_90a`: source with its defines, architecture,
/// and the compiler's answer. Needs no GPU.
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

/// The kernel a plan would use: the first for the type of the first float tensor.
fn kernel_of(case: &Case, target: &Target) -> Result<KernelRow, String> {
    let row = target.kernels.iter().find(|row| runs(row, case)).copied();
    row.ok_or_else(|| format!("no kernel runs {} in {}", case.op.name(), dtype_of(case).name()))
}

fn runs(row: &KernelRow, case: &Case) -> bool {
    row.op == case.op.kind() && row.dtypes.contains(&dtype_of(case))
}

/// What rows are listed by.
fn dtype_of(case: &Case) -> DType {
    let types = types_of(case);
    types.iter().find(|d| d.is_float()).or(types.first()).copied().unwrap_or(DType::F32)
}

fn types_of(case: &Case) -> Vec<DType> {
    case.ins.iter().map(|(ty, _)| ty.dtype).chain(cases::output_type(&case.op)).collect()
}

/// The worst relative L2 error of the outputs. What is not finite must be so in both.
fn judge(outs: &[TensorType], got: &Outputs, wanted: &[Vec<f64>], bound: f64) -> Result<f64, String> {
    let mut worst: f64 = 0.0;
    for (o, (got, want)) in got.iter().zip(wanted).enumerate() {
        let Some(got) = got else { continue };
        let got = crate::session::as_f32(outs[o].dtype, got);
        let (mut error, mut size) = (0.0, 0.0);
        for (e, (got, want)) in got.iter().zip(want).enumerate() {
            let got = *got as f64;
            if want.is_finite() && got.is_finite() {
                error += (got - want) * (got - want);
                size += want * want;
            } else if got != *want && !(got.is_nan() && want.is_nan()) {
                return Err(format!("output {o}, element {e} is {got}, wanted {want}"));
            }
        }
        let relative = if size == 0.0 { error.sqrt() } else { (error / size).sqrt() };
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
        let failed: Vec<String> = cases::all()
            .iter()
            .filter(|case| is_for(case, Place::Cpu))
            .filter_map(|case| check(case).err().map(|why| format!("{}: {why}", case.name)))
            .collect();
        assert!(failed.is_empty(), "{} cases fail:\n{}", failed.len(), failed.join("\n"));
    }

    /// Reads and movements become views or copies; everything else needs a kernel.
    #[test]
    fn every_operation_a_plan_can_hold_has_a_kernel_and_cases() {
        use OpKind as K;
        let never = [K::Read, K::Transpose, K::Slice, K::Concat, K::Pad, K::Broadcast];
        let needed: BTreeSet<OpKind> = K::ALL.iter().copied().filter(|k| !never.contains(k)).collect();
        let target = cpu::target(2);
        let with_kernel: BTreeSet<OpKind> = target.kernels.iter().map(|k| k.op).collect();
        let all = cases::all();
        let with_case: BTreeSet<OpKind> = all.iter().map(|c| c.op.kind()).collect();
        assert_eq!(with_kernel, needed);
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

    /// The check itself notices a wrong value: the update with another decay.
    #[test]
    fn a_wrong_kernel_is_noticed() {
        let right = cases::all().into_iter().find(|c| c.op.kind() == OpKind::AdamW).expect("a case");
        let mut wrong = right.clone();
        if let Op::AdamW { weight_decay, .. } = &mut wrong.op {
            *weight_decay *= 2.0;
        }
        let row = kernel_of(&right, &cpu::target(1)).unwrap();
        let (right, wrong) = (Trial::new(&right, row), Trial::new(&wrong, row));
        let got = wrong.run(Form::Dense { threads: 1 }, Place::Cpu, cuda::Options::default()).unwrap();
        assert!(judge(right.outs(), &got, &right.oracle(), 1e-5).is_err());
    }
}
