//! Monitors a run: how its speed compares with the machine's peak and with the prediction, and the state of the GPU.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use flatout_ir::Role;
use flatout_ir::cost::Cost;
use flatout_runtime::cuda::nvml::DeviceState;

use crate::device::Device;
use crate::resolve::compile::Compiled;
use crate::resolve::prediction;
use crate::resolve::windows::WindowPlan;
use crate::run::events::GpuSample;

/// Interval between two samples of the GPU. A sample takes milliseconds in the driver, on a thread of its own.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// Updates whose median speed is compared with the prediction, and the smallest ratio of the two (or its inverse) without a
/// warning.
const UPDATES_COMPARED: usize = 16;
const MIN_RATIO: f64 = 0.6;
/// The largest share of an update's time spent waiting for rows with which the update still counts.
const MAX_WAIT_SHARE: f64 = 0.1;

pub struct Watch {
    /// Arithmetic and predicted time of an update: one entry per gradient plan where windows have several, otherwise one for all.
    expected: Vec<Expected>,
    peak_flops: Option<f64>,
    /// Whether the prediction adds up measured times of kernels instead of using peak rates.
    is_calibrated: bool,
    /// Shares of the predicted speed, collected until they are compared with it.
    shares: Vec<f64>,
    gpu: Option<Sampler>,
    /// Reason for which the GPU is not sampled.
    note: Option<String>,
}

/// Arithmetic and predicted time of an update.
#[derive(Clone, Copy)]
struct Expected {
    flops_per_token: f64,
    predicted_seconds: f64,
}

impl Expected {
    fn all(compiled: &Compiled, batch: usize) -> Vec<Expected> {
        let of = |flops: u64, cost: Cost| Expected {
            flops_per_token: flops as f64,
            predicted_seconds: cost.predicted_seconds,
        };
        let of_window = |(index, window): (usize, &WindowPlan)| {
            of(window.flops_per_token, prediction::step_cost_by(compiled, batch, Role::Grad(index)))
        };
        match &compiled.windows[..] {
            [] => vec![of(compiled.flops_per_token, prediction::step_cost(compiled, batch))],
            windows => windows.iter().enumerate().map(of_window).collect(),
        }
    }
}

/// Speed of one update, as progress lines show it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpdateStats {
    pub mfu: Option<f64>,
    pub of_predicted: Option<f64>,
    pub of_roofline: Option<f64>,
    pub gpu: Option<GpuSample>,
}

impl Watch {
    pub fn new(compiled: &Compiled, batch: usize, device: &Device) -> Watch {
        let monitor = match device {
            Device::Cpu { .. } => None,
            Device::Cuda(device) => Some(
                device
                    .monitor()
                    .map_err(|why| why.to_string())
                    .and_then(|monitor| Sampler::start(move || monitor.read())),
            ),
        };
        let (gpu, note) = match monitor {
            None => (None, None),
            Some(Ok(sampler)) => (Some(sampler), None),
            Some(Err(why)) => (None, Some(format!("the GPU's use and power are not shown: {why}"))),
        };
        Watch {
            expected: Expected::all(compiled, batch),
            peak_flops: prediction::peak_flops(compiled),
            is_calibrated: prediction::is_calibrated(compiled),
            shares: vec![],
            gpu,
            note,
        }
    }

    pub fn note(&self) -> Option<&String> {
        self.note.as_ref()
    }

    /// Once enough updates were seen, a warning if their times differ much from the machine's calibration. Updates that waited
    /// for their rows do not count.
    pub fn doubt(&mut self, seen: &UpdateStats, waited: f64) -> Option<String> {
        let share = seen.of_predicted.filter(|_| waited < MAX_WAIT_SHARE)?;
        if self.shares.len() == UPDATES_COMPARED {
            return None;
        }
        self.shares.push(share);
        if self.shares.len() < UPDATES_COMPARED {
            return None;
        }
        self.shares.sort_by(f64::total_cmp);
        let median = self.shares[UPDATES_COMPARED / 2];
        let is_near = (MIN_RATIO..=1.0 / MIN_RATIO).contains(&median);
        (!is_near).then(|| {
            let (times, why) = match median < 1.0 {
                true => (format!("{:.1} times as long as", 1.0 / median), "something else runs here now, or did not then"),
                false => (format!("{:.0}% of", 100.0 / median), "something else ran here then"),
            };
            format!(
                "updates take {times} the calibration of this machine predicts: {why}; flatout doctor --calibrate times \
                 its kernels again"
            )
        })
    }

    /// Statistics of an update of `tokens` tokens by the gradient plan `by` that took `seconds`. Never blocks.
    pub fn see(&self, tokens: usize, by: Role, seconds: f64) -> UpdateStats {
        let index = if let Role::Grad(index) = by { index } else { 0 };
        let Expected { flops_per_token, predicted_seconds } =
            *self.expected.get(index).unwrap_or(&self.expected[0]);
        let rate = tokens as f64 * flops_per_token / seconds;
        let share = (predicted_seconds > 0.0).then_some(predicted_seconds / seconds);
        UpdateStats {
            mfu: self.peak_flops.map(|peak| rate / peak),
            of_predicted: share.filter(|_| self.is_calibrated),
            // The CPU's rates are not the peak rates of this particular CPU.
            of_roofline: share.filter(|_| !self.is_calibrated && self.peak_flops.is_some()),
            gpu: self.gpu.as_ref().and_then(Sampler::latest),
        }
    }
}

/// A thread that reads the GPU once a second until it is dropped.
struct Sampler {
    latest: Arc<Mutex<Option<GpuSample>>>,
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    fn start(read: impl Fn() -> DeviceState + Send + 'static) -> Result<Sampler, String> {
        let latest = Arc::new(Mutex::new(None));
        let (stop, stopped) = channel();
        let shared = Arc::clone(&latest);
        let sample = move || {
            loop {
                let seen = sample(read());
                *shared.lock().unwrap_or_else(PoisonError::into_inner) = Some(seen);
                match stopped.recv_timeout(SAMPLE_EVERY) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        let thread = std::thread::Builder::new().name("gpu-watch".into()).spawn(sample);
        let thread = thread.map_err(|error| error.to_string())?;
        Ok(Sampler { latest, stop: Some(stop), thread: Some(thread) })
    }

    /// The newest sample, unless it is being replaced at this moment.
    fn latest(&self) -> Option<GpuSample> {
        self.latest.try_lock().ok().and_then(|sample| sample.clone())
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn sample(reading: DeviceState) -> GpuSample {
    let watts = |milliwatts: u32| milliwatts as f64 / 1e3;
    GpuSample {
        utilization: reading.utilization_percent.map(|percent| percent as f64 / 100.0),
        memory_bytes: reading.memory_bytes,
        power_watts: reading.power_milliwatts.map(watts),
        power_limit_watts: reading.power_limit_milliwatts.map(watts),
        temperature_celsius: reading.temperature_celsius,
        clock_mhz: reading.clock_mhz,
        throttled: reading.throttled().into_iter().map(String::from).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes;
    use crate::resolve::compile;

    #[test]
    fn only_measured_times_are_called_a_prediction() {
        let config = recipes::resolve("tiny", &[], &[]).unwrap();
        let mut compiled = compile::compile(&config, &compile::target()).unwrap();
        let watch = Watch::new(&compiled, config.train.batch, &Device::cpu());
        let predicted = prediction::step_cost(&compiled, config.train.batch).predicted_seconds;
        let seen = watch.see(1024, Role::GRAD, 2.0 * predicted);
        assert_eq!(seen, UpdateStats::default(), "rates of no CPU in particular promise nothing");
        assert_eq!(watch.note(), None);

        compiled.target.name = "h200".into();
        compiled.target.rates.f32_flops = 100.0 * compiled.flops_per_token as f64;
        let watch = Watch::new(&compiled, config.train.batch, &Device::cpu());
        let seen = watch.see(25, Role::GRAD, 0.5);
        assert_eq!(seen.mfu, Some(0.5), "50 tokens a second of the 100 it could");
        assert!(seen.of_predicted.is_none() && seen.of_roofline.is_some());
        let expected = vec![Expected { predicted_seconds: 0.25, ..watch.expected[0] }];
        let watch = Watch { is_calibrated: true, expected, ..watch };
        let seen = watch.see(25, Role::GRAD, 0.5);
        assert_eq!((seen.of_predicted, seen.of_roofline), (Some(0.5), None));
        let mut watch = watch;
        let doubts: Vec<String> = (0..40).filter_map(|_| watch.doubt(&seen, 0.0)).collect();
        assert_eq!(doubts.len(), 1, "the warning is given once: {doubts:?}");
        assert!(doubts[0].contains("2.0 times as long as the calibration"), "{doubts:?}");
        let mut quick = Watch { shares: vec![], ..watch };
        assert_eq!((0..40).find_map(|_| quick.doubt(&seen, 0.5)), None, "it waits for its rows");
        let seen = UpdateStats { of_predicted: Some(0.9), ..seen };
        assert_eq!((0..40).find_map(|_| quick.doubt(&seen, 0.0)), None);
    }

    #[test]
    fn samples_come_from_a_thread_that_ends_with_the_watch() {
        let (asked, answers) = channel();
        let read = move || {
            let _ = asked.send(());
            DeviceState {
                utilization_percent: Some(97),
                power_milliwatts: Some(512_500),
                reasons: 0x4,
                ..DeviceState::default()
            }
        };
        let sampler = Sampler::start(read).unwrap();
        answers.recv().unwrap();
        let sample = std::iter::repeat_with(|| sampler.latest()).find_map(|sample| sample).unwrap();
        assert_eq!((sample.utilization, sample.power_watts), (Some(0.97), Some(512.5)));
        assert_eq!(sample.throttled, ["power"]);
        drop(sampler);
        assert!(answers.recv().is_err(), "the thread has dropped its end");
    }
}
