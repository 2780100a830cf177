//! Window schedules: the attention window as a function of the step. Every window has a gradient plan of its own, and the step
//! number decides which of them an update runs.

use flatout_ir::Role;

use crate::config::Config;
use crate::config::Schedule;
use crate::config::resolved::Capacities;
use crate::tasks::batch::Batch;

/// FLOPs of the gradient plan of one window, and its share of the updates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WindowPlan {
    /// Forward and backward FLOPs of products, attention and head.
    pub flops_per_token: u64,
    /// Share of the horizon's updates that run it.
    pub share: f64,
}

/// The capacities of the gradient plans of the schedule, the widest window first; the given ones if it has no windows.
pub fn of(config: &Config, capacities: Capacities) -> Vec<Capacities> {
    match widest_first(&config.schedule) {
        windows if windows.is_empty() => vec![capacities],
        windows => windows.into_iter().map(|window| Capacities { window, ..capacities }).collect(),
    }
}

/// The gradient plan of update `step`, counted from 1, in a schedule over `horizon` updates; the first one if there is no window
/// schedule. After the horizon the last window stays.
pub fn role(schedule: &Schedule, horizon: u64, step: u64) -> Role {
    let windows = &schedule.windows;
    if windows.is_empty() {
        return Role::GRAD;
    }
    let part = u128::from(step - 1) * windows.len() as u128 / u128::from(horizon.max(1));
    let window = windows[usize::try_from(part).unwrap_or(usize::MAX).min(windows.len() - 1)];
    let index = widest_first(schedule).iter().position(|other| *other == window);
    Role::Grad(index.expect("every window has a plan"))
}

/// The share of updates of every plan, the widest window first; empty if there is no window schedule.
pub fn shares(schedule: &Schedule) -> Vec<f64> {
    let windows = &schedule.windows;
    let share =
        |window| windows.iter().filter(|other| **other == window).count() as f64 / windows.len() as f64;
    widest_first(schedule).into_iter().map(share).collect()
}

/// Assigns a batch to the gradient plan of the update's window; all of these plans have the same inputs.
pub fn planned(batch: Batch, grad: Role) -> Batch {
    if batch.role == Role::GRAD { Batch { role: grad, ..batch } } else { batch }
}

fn widest_first(schedule: &Schedule) -> Vec<usize> {
    let mut windows = schedule.windows.clone();
    windows.sort_unstable_by(|a, b| b.cmp(a));
    windows.dedup();
    windows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_parts_of_the_horizon_have_the_windows_in_order() {
        let schedule = Schedule { windows: vec![64, 256, 128, 256], ..Schedule::default() };
        let indices: Vec<usize> = [1, 25, 26, 50, 51, 75, 76, 100, 101, u64::MAX]
            .map(|step| match role(&schedule, 100, step) {
                Role::Grad(index) => index,
                other => panic!("{other} is no plan of gradients"),
            })
            .to_vec();
        assert_eq!(indices, [2, 2, 0, 0, 1, 1, 0, 0, 0, 0]);
        assert_eq!((widest_first(&schedule), shares(&schedule)), (vec![256, 128, 64], vec![0.5, 0.25, 0.25]));
        // A horizon with fewer updates than windows skips some of them.
        assert_eq!([1, 2].map(|step| role(&schedule, 2, step)), [Role::Grad(2), Role::Grad(1)]);
        assert_eq!(role(&Schedule::default(), 100, 50), Role::GRAD);
    }
}
