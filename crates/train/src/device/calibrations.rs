//! Timings on disk: one table a device, driver and version of ours, so that another finds nothing and says so.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use flatout_ir::timings::Timings;
use flatout_runtime::cuda::device::{Gpu, Identity, probe, short_name};
use flatout_runtime::cuda::store::{Store, name};

use crate::device::Device;
use crate::machine;

const FOLDER: &str = "timings";

/// Keeps a device's timings, or says in a sentence why not.
pub fn keep(device: &Device, timings: &Timings) -> Result<(), String> {
    let whose = whose(device);
    Store::of_this_user(FOLDER).put(&entry(&whose), format!("{whose}\n{}", timings.to_text()).as_bytes())
}

/// What was kept of a device; empty where nothing was.
pub fn recall(device: &Device) -> Timings {
    recall_of(whose(device))
}

/// The same of a GPU by name, where this machine has one.
pub fn recall_named(gpu: &str) -> Timings {
    match &probe().gpu {
        Gpu::Usable(identity) if short_name(&identity.model, identity.memory_bytes) == gpu => {
            recall_of(of_gpu(identity))
        }
        _ => Timings::default(),
    }
}

/// Read once a process.
fn recall_of(whose: String) -> Timings {
    static KNOWN: Mutex<BTreeMap<String, Timings>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let read = |whose: &String| read(&Store::of_this_user(FOLDER), whose).unwrap_or_default();
    known.entry(whose).or_insert_with_key(read).clone()
}

fn read(store: &Store, whose: &str) -> Option<Timings> {
    let text = String::from_utf8(store.get(&entry(whose))?).ok()?;
    let (kept_for, table) = text.split_once('\n')?;
    Timings::read(table).ok().filter(|_| kept_for == whose)
}

fn entry(whose: &str) -> String {
    name([whose])
}

/// All that times depend on.
fn whose(device: &Device) -> String {
    match device {
        Device::Cpu { threads } => {
            format!("{} flatout {}", machine::processor(*threads), env!("CARGO_PKG_VERSION"))
        }
        Device::Cuda(device) => of_gpu(device.identity()),
    }
}

fn of_gpu(identity: &Identity) -> String {
    let Identity { model, major, minor, sms, driver, cuda, .. } = identity;
    let driver = driver.as_deref().unwrap_or("unknown");
    let version = env!("CARGO_PKG_VERSION");
    format!("{model} {major}.{minor} of {sms}, driver {driver} for {cuda}, flatout {version}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::Work;
    use flatout_ir::timings::{Point, Size, Units};

    #[test]
    fn timings_come_back_to_whom_they_belong() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::at(folder.path().into());
        let size = Size {
            work: Work::Norm,
            kernel: "norm".into(),
            units: Units::F32,
            inner: 8,
            flops: 9,
            bytes: 7,
            ways: 1,
        };
        let timings = Timings::new([Point { size, seconds: 1e-6 }]);
        let text = |whose: &str| format!("{whose}\n{}", timings.to_text());
        store.put(&entry("this CPU"), text("this CPU").as_bytes()).unwrap();
        assert_eq!(read(&store, "this CPU"), Some(timings.clone()));
        assert_eq!(read(&store, "another"), None);
        // A name that collides, or a table of another form, counts as nothing.
        store.put(&entry("another"), text("this CPU").as_bytes()).unwrap();
        assert_eq!(read(&store, "another"), None);
        store.put(&entry("another"), b"another\nflatout timings 0\n").unwrap();
        assert_eq!(read(&store, "another"), None);
    }
}
