//! The state of every switch, read from the compiled launches and not from the requested values.

use std::collections::{BTreeMap, HashMap, HashSet};

use flatout_data::LayoutOptions;
use flatout_ir::{Launch, OpKind, Plan, PlanSet, Role, Target};
use flatout_runtime::Session;

use super::data::VisualTokens;
use super::{AttentionKernel, Autotune, Difference, ProductKernel, Settled, Switches, TABLE};
use crate::Failure;
use crate::UserError;

/// How a session runs plans, as far as the launches do not show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Plans are replayed as CUDA graphs.
    pub cuda_graphs: bool,
    pub autotune: Autotune,
    /// The arena is a window of NCCL's communicators.
    pub window: bool,
    /// The only kernel that attention may run on.
    pub attention_kernel: AttentionKernel,
    /// The kernel that products run on where it supports them.
    pub product_kernel: ProductKernel,
    /// The share of an image's tokens that the text model sees.
    pub visual_tokens: VisualTokens,
    /// How examples are laid out; none if rows are equally long.
    pub lengths: Option<LayoutOptions>,
    /// Images are known to be stored decoded and to have one size.
    pub decoded: bool,
}

impl Prepared {
    /// The state that the resolved values lead to, before there is a session.
    pub fn settled(settled: &Settled) -> Prepared {
        let Settled { cuda_graphs, autotune, window, attention_kernel, product_kernel, .. } = *settled;
        let Settled { visual_tokens, decoded, .. } = *settled;
        let lengths = settled.arrangement.as_ref().map(|arrangement| arrangement.manner);
        Prepared {
            cuda_graphs,
            autotune,
            window,
            attention_kernel,
            product_kernel,
            visual_tokens,
            lengths,
            decoded,
        }
    }

    /// The state of a session. If it has timed kernels, how many is taken from the resolved value.
    pub fn session(session: &Session, settled: &Settled) -> Prepared {
        let is_tuned = session.as_cuda().is_some_and(|cuda| cuda.is_tuned());
        let autotune = if is_tuned { settled.autotune } else { Autotune::Off };
        let window = session.as_cuda().is_some_and(|cuda| cuda.has_window());
        Prepared { cuda_graphs: session.replays_graphs(), autotune, window, ..Prepared::settled(settled) }
    }
}

/// The compiled plans that the rows of the table read their states from.
pub struct CompiledView<'a> {
    pub plans: &'a PlanSet,
    pub grad: &'a Plan,
    pub target: &'a Target,
    pub prepared: Prepared,
}

impl<'a> CompiledView<'a> {
    pub fn new(plans: &'a PlanSet, target: &'a Target, prepared: Prepared) -> CompiledView<'a> {
        let grad = plans.plan(Role::GRAD).expect("a training run has a grad plan");
        CompiledView { plans, grad, target, prepared }
    }

    /// The launches of this kind in `grad`.
    pub fn launches(&self, kind: OpKind) -> impl Iterator<Item = &'a Launch> {
        self.grad.launches.iter().filter(move |l| l.op.kind() == kind)
    }

    pub fn has(&self, kind: OpKind) -> bool {
        self.launches(kind).next().is_some()
    }

    /// Whether `grad` has a launch whose first input was written last by a launch for which `is_pair(writer, reader)` holds.
    pub fn follows(&self, is_pair: impl Fn(&Launch, &Launch) -> bool) -> bool {
        let mut written: HashMap<usize, &Launch> = HashMap::new();
        for l in &self.grad.launches {
            if l.ins.first().and_then(|v| written.get(&v.offset)).is_some_and(|writer| is_pair(writer, l)) {
                return true;
            }
            written.extend(l.outs.iter().flatten().map(|v| (v.offset, l)));
        }
        false
    }

    /// The launches that update parameters.
    pub fn updates(&self) -> impl Iterator<Item = &'a Launch> {
        let apply = self.plans.plan(Role::Apply).expect("a training run has an apply plan");
        apply.launches.iter().filter(|l| matches!(l.op.kind(), OpKind::AdamW | OpKind::AdamW8))
    }
}

pub(super) fn on(yes: bool) -> &'static str {
    if yes { "on" } else { "off" }
}

/// The state of every switch, by name.
pub fn active(plans: &PlanSet, target: &Target, prepared: Prepared) -> BTreeMap<String, String> {
    let state = |row: &super::Switch| row.active(plans, target, prepared);
    TABLE.iter().filter_map(|row| Some((row.name.into(), state(row)?.into()))).collect()
}

/// Refuses to train if a requested switch is not active in the compiled plans, which is a bug.
pub fn check(
    requested: &Switches,
    plans: &PlanSet,
    target: &Target,
    settled: &Settled,
) -> Result<(), Failure> {
    for row in TABLE {
        let (Some(state), Some(requested)) =
            (row.active(plans, target, Prepared::settled(settled)), row.value(requested))
        else {
            continue;
        };
        let (name, settled) = (row.name, settled.choice(row.name).map_or(requested, |c| &c.value));
        if state == settled {
            continue;
        }
        match (row.differs)(settled, state) {
            Difference::Harmless => {}
            Difference::Refused(why) => return Err(Failure::User(UserError(why.into()))),
            Difference::Mistake => {
                return Err(Failure::Environment(format!(
                    "`{name}={settled}` was requested and the compiled plan has `{name}={state}`: this is a bug of flatout; \
                     {name}={state} runs what was compiled"
                )));
            }
        }
    }
    Ok(())
}

/// The kernels of these plans that are not deterministic, sorted.
pub fn not_deterministic(plans: &PlanSet, target: &Target) -> Vec<&'static str> {
    let used: HashSet<&str> = plans.plans.iter().flat_map(|p| &p.launches).map(|l| l.kernel).collect();
    let rows = target.kernels.iter().filter(|k| !k.deterministic && used.contains(k.name));
    let mut names: Vec<&'static str> = rows.map(|k| k.name).collect();
    names.sort_unstable();
    names
}

/// The warning for a resumed run whose bits may differ from those of an uninterrupted run.
pub fn resumed(kernels: &[&str], autotune: Autotune) -> Option<String> {
    let timed = (autotune != Autotune::Off)
        .then_some("autotune may choose other algorithms of products and attention");
    let kernels = match kernels {
        [] => None,
        [one] => Some(format!("{one} is not deterministic")),
        several => Some(format!("{} are not deterministic", several.join(", "))),
    };
    let why: Vec<String> = kernels.into_iter().chain(timed.map(String::from)).collect();
    (!why.is_empty()).then(|| {
        let why = why.join(" and ");
        format!(
            "resumed; {why}: later losses differ by rounding (deterministic=on from the start prevents it)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::compile::Compiled;

    /// The target of a GPU, on which attention's gradient is deterministic or not.
    fn gpu(is_deterministic: bool) -> Target {
        let mut target = Target { name: "h200".into(), landings: 2, ..flatout_ir::target::paper() };
        let row = target.kernels.iter_mut().find(|row| row.op == OpKind::AttentionGrad).expect("a row");
        row.deterministic = is_deterministic;
        target
    }

    fn compiled(overrides: &[&str], target: &Target) -> Result<Compiled, String> {
        let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
        let config = crate::recipes::resolve("tiny", &[], &overrides).unwrap();
        crate::resolve::compile::compile(&config, target).map_err(|failure| failure.to_string())
    }

    #[test]
    fn kernels_that_are_not_deterministic_are_named_from_the_plans() {
        let loose = compiled(&[], &gpu(false)).unwrap();
        assert_eq!(not_deterministic(&loose.plans, &loose.target), ["attention_grad"]);
        let state = |c: &Compiled, name: &str| {
            active(&c.plans, &c.target, Prepared::settled(&c.settled))[name].clone()
        };
        assert_eq!(
            (state(&loose, "deterministic").as_str(), state(&loose, "autotune").as_str()),
            ("off", "quick")
        );
        // A plan without the kernel has nothing to name.
        let naive = compiled(&["attention=naive"], &gpu(false)).unwrap();
        assert!(not_deterministic(&naive.plans, &naive.target).is_empty());
        let exact = compiled(&["deterministic=on"], &gpu(true)).unwrap();
        assert_eq!(
            (state(&exact, "deterministic").as_str(), state(&exact, "autotune").as_str()),
            ("on", "off")
        );
        let chosen = exact.settled.chosen.iter().find(|c| c.switch == "autotune").expect("it is recorded");
        assert_eq!(chosen.why, "deterministic=on takes algorithms by shape alone");
    }

    #[test]
    fn timing_everything_and_equal_bits_exclude_each_other_on_a_gpu() {
        let refused = compiled(&["deterministic=on", "autotune=full"], &gpu(true)).unwrap_err();
        assert!(refused.starts_with("`autotune=full` cannot run with `deterministic=on`"), "{refused}");
        let full = compiled(&["autotune=full"], &gpu(true)).unwrap();
        assert_eq!(full.settled.autotune, Autotune::Full);
        let cpu =
            compiled(&["deterministic=on", "autotune=full"], &crate::resolve::compile::target()).unwrap();
        assert_eq!(
            active(&cpu.plans, &cpu.target, Prepared::settled(&cpu.settled))["autotune"],
            "nothing to time"
        );
    }

    #[test]
    fn a_kernel_that_cannot_run_is_refused_by_name() {
        let mut target = gpu(true);
        let forced = compiled(&["attention_kernel=wgmma"], &target).unwrap();
        assert_eq!(forced.settled.attention_kernel, AttentionKernel::Wgmma);
        let state = active(&forced.plans, &forced.target, Prepared::settled(&forced.settled));
        assert_eq!(state["attention_kernel"], "wgmma");
        target.missing.push(("wgmma", "its instructions are Hopper's, and this GPU is an sm_86".into()));
        for (overrides, target, why) in [
            (&["attention_kernel=wgmma"][..], &target, "cannot run: its instructions are Hopper's"),
            (&["attention_kernel=mma"], &crate::resolve::compile::target(), "cannot run on the CPU"),
            (&["attention_kernel=mma", "attention=naive"], &target, "cannot run with `attention=naive`"),
        ] {
            let refused = compiled(overrides, target).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
        assert!(compiled(&["attention_kernel=mma"], &target).is_ok());
    }

    #[test]
    fn a_resumed_run_is_warned_of_what_is_not_deterministic() {
        assert_eq!(resumed(&[], Autotune::Off), None);
        let warning = resumed(&["cuda.attention_grad"], Autotune::Off).unwrap();
        assert!(
            warning.starts_with("resumed; cuda.attention_grad is not deterministic: later losses"),
            "{warning}"
        );
        let warning = resumed(&["a", "b"], Autotune::Quick).unwrap();
        let both = "resumed; a, b are not deterministic and autotune may choose other algorithms of products and attention: ";
        assert!(warning.starts_with(both), "{warning}");
        let warning = resumed(&[], Autotune::Full).unwrap();
        assert!(warning.starts_with("resumed; autotune may choose"), "{warning}");
    }
}
