//! Helpers of the commands that use a model: opening it by name, and reporting downloads.

use std::path::Path;

use flatout_train::Failure;
use flatout_train::device::Device;
pub use flatout_train::run::{RUNS, named};
use flatout_train::weights::loaded::Loaded;
use flatout_train::weights::pretrained::hub::Fetching;

use crate::screen::{Screen, bytes};

/// Opens a run or a model folder, and checks all of it.
pub fn open(model: &Path, overrides: &[String]) -> Result<Loaded, Failure> {
    Ok(Loaded::open(&named(model), overrides)?)
}

/// The suffix of a line whose figures are of a run's averaged weights; empty for other weights.
pub fn of_averages(loaded: &Loaded) -> &'static str {
    if loaded.weights.are_averages() { " (averaged weights)" } else { "" }
}

/// Opens the device that the model's switches request.
pub fn device(loaded: &Loaded) -> Result<Device, Failure> {
    Device::open(loaded.config.switches.compute.backend)
}

/// Prints the progress of a download. On a terminal, where a status line shows it, only the end of each file is printed.
pub fn fetching(file: &Fetching<'_>, screen: &Screen) {
    let Fetching { file, done_bytes, total_bytes } = file;
    if screen.live && *total_bytes != Some(*done_bytes) {
        return;
    }
    screen.note(match total_bytes {
        Some(total) if total == done_bytes => format!("fetched  {file} ({})", bytes(*total)),
        Some(total) => format!("fetching {file}: {} of {}", bytes(*done_bytes), bytes(*total)),
        None => format!("fetching {file}: {}", bytes(*done_bytes)),
    });
}
