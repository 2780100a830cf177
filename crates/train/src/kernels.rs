//! The backend's kernels on this machine: what they use, and whether they are right here.

use flatout_runtime::{cpu, verify};

/// One kernel case that was run.
pub struct Checked {
    pub name: String,
    /// On the relative L2 error of each output.
    pub bound: f64,
    /// The largest error found, or what was wrong.
    pub error: Result<f64, String>,
}

/// Runs every kernel case against the oracle.
pub fn verify() -> Vec<Checked> {
    let check =
        |case: verify::Case| Checked { error: verify::check(&case), name: case.name, bound: case.bound };
    verify::cases::all().into_iter().map(check).collect()
}

/// The widest instructions the kernels use here, in words.
pub fn instructions() -> &'static str {
    cpu::instructions()
}
