//! Shared by the commands that use a model: finding it by name, opening it, and reporting downloads.

use std::path::Path;

use flatout_train::Failure;
use flatout_train::device::Device;
pub use flatout_train::run::{RUNS, named};
use flatout_train::weights::loaded::Loaded;
use flatout_train::weights::pretrained::hub::Fetching;

use crate::screen::{Screen, bytes};

/// Opens a run or a folder. All that is wrong with it is said here.
pub fn open(model: &Path, overrides: &[String]) -> Result<Loaded, Failure> {
    Ok(Loaded::open(&named(model), overrides)?)
}

/// The suffix of a line with numbers of a run's averaged weights; empty otherwise.
pub fn of_averages(loaded: &Loaded) -> &'static str {
    if loaded.weights.are_averages() { " (averaged weights)" } else { "" }
}

/// The device that the model's switches ask for, opened after the model.
pub fn device(loaded: &Loaded) -> Result<Device, Failure> {
    Device::open(loaded.config.switches.compute.backend)
}

/// A line when a file begins and when it is whole, and now and then on the way, where no terminal shows how far it is.
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
