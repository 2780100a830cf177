//! `plan --launches`: lists every launch of every plan with its path in the model, kernel, tensors and least time.

use flatout_ir::attr::Attr;
use flatout_ir::{Launch, Op, PlanSet, Target, View, bundle, cost};

use crate::screen::Screen;

/// Prints one line per launch.
pub fn print(plans: &PlanSet, target: &Target, screen: &Screen) {
    for plan in &plans.plans {
        let microseconds: f64 =
            plan.launches.iter().map(|l| 1e6 * cost::of_launch(l, target).roofline_seconds).sum();
        screen.result(format!(
            "\n{}: {} launches, {microseconds:.1} us at best",
            plan.role.name(),
            plan.launches.len()
        ));
        for (i, launch) in plan.launches.iter().enumerate() {
            let cost = cost::of_launch(launch, target);
            screen.result(format!(
                "{i:>5} {:>9.1} us {:>9.1} MB  {:26} {:24} {}",
                1e6 * cost.roofline_seconds,
                launch.bytes() as f64 / 1e6,
                launch.path,
                launch.kernel,
                tensors(launch),
            ));
        }
    }
}

/// The operation and its tensors: `add map bf16[4,8] bf16[4,8] -> bf16[4,8]`.
fn tensors(launch: &Launch) -> String {
    let body = match &launch.op {
        Op::Map { f } => format!("{} ", f.to_text()),
        Op::Bundle { body } => {
            let (regions, tensors) = (bundle::parts(body).len(), launch.ins.len() + launch.outs.len());
            return format!("{regions} regions of {tensors} tensors");
        }
        Op::Region { body } => {
            let names: Vec<String> = body
                .nodes
                .iter()
                .filter_map(|node| match node.op {
                    Op::Map { f } => Some(f.to_text()),
                    Op::Reduce { by, .. } => Some(by.to_text()),
                    _ => None,
                })
                .collect();
            format!("{} ", names.join(" "))
        }
        _ => String::new(),
    };
    let list = |views: &mut dyn Iterator<Item = &View>| views.map(tensor).collect::<Vec<String>>().join(" ");
    let outs = list(&mut launch.outs.iter().flatten());
    format!("{body}{} -> {outs}", list(&mut launch.ins.iter()))
}

/// Type and dimensions of a tensor, and its strides where it is not contiguous.
fn tensor(view: &View) -> String {
    let numbers = |list: &[usize]| list.iter().map(usize::to_string).collect::<Vec<String>>().join(",");
    let strides = if view.is_dense() { String::new() } else { format!("/{}", numbers(&view.strides)) };
    format!("{}[{}]{strides}", view.dtype.name(), numbers(&view.dims))
}
