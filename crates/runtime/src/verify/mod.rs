//! Every kernel against the oracle, on this machine: one launch at a time, in every form a plan may use it.
//!
//! A case is an operation and what its inputs hold. It runs dense, strided, in place, with outputs left out and on
//! several threads; values must be the oracle's within a bound, bits the same in every form that computes the same,
//! and no byte outside the outputs and the scratch may change.

pub mod cases;
mod trial;

use flatout_ir::Op;
use flatout_ir::target::KernelRow;
use flatout_ir::types::{DType, TensorType};

use crate::cpu;
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

/// Runs a case in every form; gives the worst relative error, or what is wrong.
pub fn check(case: &Case) -> Result<f64, String> {
    let row = kernel_of(case)?;
    let trial = Trial::new(case, row);
    let wanted = trial.oracle();

    let first = trial.run(Form::Dense { threads: 1 })?;
    let strided = trial.run(Form::Strided)?;
    let worst =
        [("dense", &first), ("strided", &strided)].into_iter().try_fold(0.0, |worst: f64, (form, got)| {
            judge(trial.outs(), got, &wanted, case.bound)
                .map(|e| worst.max(e))
                .map_err(|why| format!("{form}: {why}"))
        })?;

    let outs = trial.outs();
    let fits = |&&(input, output): &&(usize, usize)| {
        input < case.ins.len() && output < outs.len() && case.ins[input].0 == outs[output]
    };
    let threads = [2, 4].map(|threads| Form::Dense { threads }).into_iter();
    let in_place = row.in_place.iter().filter(fits).map(|&(input, output)| Form::InPlace { input, output });
    let without = (0..outs.len()).map(|output| Form::Without { output });
    for form in threads.chain(in_place).chain(without) {
        let got = trial.run(form)?;
        let differs = |(a, b): (&Option<Vec<u8>>, &Option<Vec<u8>>)| b.is_some() && a != b;
        if let Some(o) = first.iter().zip(&got).position(differs) {
            return Err(format!("{form:?}: output {o} has other bits than dense on one thread"));
        }
    }
    Ok(worst)
}

/// The kernel a plan would use: the first for the type of the first float tensor.
fn kernel_of(case: &Case) -> Result<KernelRow, String> {
    let types = types_of(case);
    let dtype = types.iter().find(|d| d.is_float()).or(types.first()).copied().unwrap_or(DType::F32);
    let row = cpu::target(1).kernel(case.op.kind(), dtype).copied();
    row.ok_or_else(|| format!("no kernel runs {} in {}", case.op.name(), dtype.name()))
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
    use flatout_ir::OpKind;
    use std::collections::BTreeSet;

    #[test]
    fn every_kernel_agrees_with_the_oracle_in_every_form() {
        let failed: Vec<String> = cases::all()
            .iter()
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
                let runs =
                    |c: &Case| kernel_of(c).is_ok_and(|r| r.name == row.name) && types_of(c).contains(dtype);
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
        let row = kernel_of(&right).unwrap();
        let (right, wrong) = (Trial::new(&right, row), Trial::new(&wrong, row));
        let got = wrong.run(Form::Dense { threads: 1 }).unwrap();
        assert!(judge(right.outs(), &got, &right.oracle(), 1e-5).is_err());
    }
}
