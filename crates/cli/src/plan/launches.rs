//! Every launch of every plan in order: where in the model, which kernel, over what, and the least time it can take.

use flatout_ir::attr::Attr;
use flatout_ir::{Launch, Op, PlanSet, Target, View, bundle, cost};

use crate::screen::Screen;

/// A line a launch. A copy is called by what it is: elements brought into another order.
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
                over(launch),
            ));
        }
    }
}

/// The operation and its tensors: `add map bf16[4,8] bf16[4,8] -> bf16[4,8]`.
fn over(launch: &Launch) -> String {
    let body = match &launch.op {
        Op::Map { f } => format!("{} ", f.show()),
        Op::Bundle { body } => {
            let (regions, tensors) = (bundle::parts(body).len(), launch.ins.len() + launch.outs.len());
            return format!("{regions} regions of {tensors} tensors");
        }
        Op::Region { body } => {
            let names: Vec<String> = body
                .nodes
                .iter()
                .filter_map(|node| match node.op {
                    Op::Map { f } => Some(f.show()),
                    Op::Reduce { by, .. } => Some(by.show()),
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

/// Its type and extents, with its strides where elements are not one after another.
fn tensor(view: &View) -> String {
    let numbers = |some: &[usize]| some.iter().map(usize::to_string).collect::<Vec<String>>().join(",");
    let strides = if view.is_dense() { String::new() } else { format!("/{}", numbers(&view.strides)) };
    format!("{}[{}]{strides}", view.dtype.name(), numbers(&view.dims))
}
