//! Times this machine's kernels: small models of common sizes are opened as a run opens them, and every launch of their updates
//! is timed. The result is a table of points, from which later commands predict how long a step takes.
//! A model of one layer has every launch that a deep one has, with the strides, epilogues and neighbours of a real step, and
//! the algorithms that a run would choose; layers only repeat them.

pub mod exchanges;

use std::time::{Duration, Instant};

use flatout_ir::Role;
use flatout_ir::timings::{Point, Size, Timings};
use flatout_runtime::LaunchTime;

use crate::bench::Stage;
use flatout_train::Failure;
use flatout_train::config::Config;
use flatout_train::device::Device;
use flatout_train::recipes;
use flatout_train::switches::Backend;

/// A model that is timed, as overrides of a recipe. Its data are not needed.
struct Sample {
    recipe: &'static str,
    model: &'static str,
    /// Rows of the micro-batch.
    rows: usize,
    switches: &'static str,
}

const fn sample(recipe: &'static str, model: &'static str, rows: usize, switches: &'static str) -> Sample {
    Sample { recipe, model, rows, switches }
}

const DECODER: &str = "pretrain-226m";
const GPT2: &str = "gpt2-124m";

const W128: &str = "width=128 heads=4 kv_heads=2 head_size=32 ffn=344 context=128 vocab=512";
const W256: &str = "width=256 heads=4 kv_heads=2 head_size=64 ffn=688 context=256 vocab=2048";
const W512: &str = "width=512 heads=8 kv_heads=4 head_size=64 ffn=1376 context=512 vocab=8192";
const W768: &str = "width=768 heads=12 kv_heads=4 head_size=64 ffn=2048 context=2048 vocab=32768";
const W768_SHORT: &str = "width=768 heads=12 kv_heads=4 head_size=64 ffn=2048 context=512 vocab=32768";
const W1024_LONG: &str = "width=1024 heads=16 kv_heads=4 head_size=64 ffn=2816 context=8192 vocab=32768";
const W2048: &str = "width=2048 heads=16 kv_heads=8 head_size=128 ffn=5632 context=2048 vocab=32768";
const W4096: &str = "width=4096 heads=32 kv_heads=8 head_size=128 ffn=14336 context=2048 vocab=32768";
const G256: &str = "width=256 heads=4 ffn=1024 context=256 vocab=2048";
const G768: &str = "width=768 heads=12 ffn=3072 context=1024 vocab=50304";

/// Samples for a GPU, the most informative first: the last ones are skipped when time runs out.
const GPU: &[Sample] = &[
    sample(DECODER, W768, 16, ""),
    sample(DECODER, W768, 64, ""),
    sample(DECODER, W768, 4, ""),
    sample(DECODER, W2048, 4, ""),
    sample(DECODER, W768, 1, ""),
    sample(DECODER, W128, 8, ""),
    sample(GPT2, G768, 16, ""),
    sample(DECODER, W4096, 4, ""),
    sample(DECODER, W768, 8, "precision=tf32"),
    sample(DECODER, W768, 16, "precision=fp8 train.fp8_layers=all"),
    sample(DECODER, W768, 64, "precision=fp8 train.fp8_layers=all"),
    sample(DECODER, W2048, 4, "precision=fp8 train.fp8_layers=all"),
    sample(DECODER, W768, 8, "compile=default fuse.norm=off fuse.elementwise=off fuse.loss=off"),
    sample(DECODER, W768, 4, "precision=fp32"),
    sample(DECODER, W2048, 16, ""),
    sample(DECODER, W768_SHORT, 32, ""),
    sample(DECODER, W1024_LONG, 4, ""),
    sample(GPT2, G768, 64, ""),
    sample(DECODER, W512, 16, ""),
    sample(DECODER, W2048, 4, "precision=tf32"),
    sample(DECODER, W256, 32, ""),
];

/// Samples for a CPU, in the same order.
const CPU: &[Sample] = &[
    sample(DECODER, W128, 8, ""),
    sample(DECODER, W256, 8, ""),
    sample(DECODER, W128, 1, ""),
    sample(DECODER, W512, 2, ""),
    sample(DECODER, W128, 64, ""),
    sample(DECODER, W128, 8, "precision=bf16"),
    sample(DECODER, W128, 8, "fuse.norm=off fuse.elementwise=off fuse.loss=off"),
    sample(GPT2, G256, 4, ""),
    sample(DECODER, W256, 2, "precision=bf16"),
    sample(DECODER, W256, 2, "fuse.norm=off fuse.elementwise=off fuse.loss=off"),
    sample(DECODER, W512, 8, ""),
    sample(DECODER, W768_SHORT, 2, ""),
    sample(GPT2, G768, 1, ""),
];

/// Time after which no further sample is begun. The longest takes a few seconds.
const GPU_BUDGET: Duration = Duration::from_secs(50);
const CPU_BUDGET: Duration = Duration::from_secs(20);
/// Seconds that the passes over a sample should take, and the bounds of their number.
const SAMPLE_SECONDS: f64 = 1.0;
const PASSES: std::ops::RangeInclusive<usize> = 3..=25;

/// The progress of a calibration.
pub enum CalibrateProgress<'a> {
    Sample {
        name: &'a str,
        done: usize,
        of: usize,
    },
    /// A sample that cannot run here, and the reason.
    LeftOut {
        name: &'a str,
        why: String,
    },
}

pub struct Calibrated {
    pub timings: Timings,
    pub steadiness: Steadiness,
    pub samples: usize,
    /// Samples there was no time for.
    pub skipped: usize,
    pub seconds: f64,
}

/// Stability of the machine while its kernels were timed: both ratios are 1 where nothing else runs on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Steadiness {
    /// The sum of all launches' medians over that of their minima.
    pub spread: f64,
    /// The first model's times at the beginning and again at the end, the larger over the smaller.
    pub drift: f64,
}

impl Steadiness {
    /// Whether something else ran meanwhile, so that the times predict nothing.
    pub fn is_disturbed(self) -> bool {
        self.spread > MOST_SPREAD || self.drift > MOST_DRIFT
    }
}

const MOST_SPREAD: f64 = 1.3;
const MOST_DRIFT: f64 = 1.25;

/// Times the kernels of the device that `backend` selects.
pub fn calibrate(
    backend: Backend,
    say: &mut dyn FnMut(CalibrateProgress<'_>),
) -> Result<(Device, Calibrated), Failure> {
    let begun = Instant::now();
    let mut base = recipes::resolve(DECODER, &[], &["eval.rows=0".into()])?;
    base.switches.compute.backend = backend;
    let stage = Stage::open(&base)?;
    let (samples, budget) = match stage.device() {
        Device::Cpu { .. } => (CPU, CPU_BUDGET),
        Device::Cuda(_) => (GPU, GPU_BUDGET),
    };
    let (mut points, mut done, mut skipped) = (vec![], 0, 0);
    let (mut medians, mut least, mut first) = (0.0, 0.0, None);
    for (i, sample) in samples.iter().enumerate() {
        let config = config(sample, backend)?;
        let name = [sample.model, sample.switches].join(" ");
        let name = format!("{} rows, {}", sample.rows, name.trim());
        if begun.elapsed() > budget {
            skipped += 1;
            continue;
        }
        say(CalibrateProgress::Sample { name: &name, done: i, of: samples.len() });
        match time(&stage, &config) {
            Ok(times) => {
                let median: f64 = times.iter().map(|(_, time)| time.seconds).sum();
                medians += median;
                least += times.iter().map(|(_, time)| time.least_seconds).sum::<f64>();
                first.get_or_insert((config, median));
                points.extend(times.into_iter().map(|(size, time)| Point { size, seconds: time.seconds }));
                done += 1;
            }
            Err(why) => say(CalibrateProgress::LeftOut { name: &name, why: why.to_string() }),
        }
    }
    let Some((config, before)) = first else {
        return Err(Failure::Environment("none of the models could be timed; -v says why".into()));
    };
    let after: f64 = time(&stage, &config)?.iter().map(|(_, time)| time.seconds).sum();
    let steadiness = Steadiness { spread: medians / least, drift: (after / before).max(before / after) };
    let seconds = begun.elapsed().as_secs_f64();
    let calibrated =
        Calibrated { timings: Timings::new(points), steadiness, samples: done, skipped, seconds };
    Ok((stage.device().clone(), calibrated))
}

fn config(sample: &Sample, backend: Backend) -> Result<Config, Failure> {
    let Sample { recipe, model, rows, switches } = sample;
    let fixed = [
        "layers=1".into(),
        "eval.rows=0".into(),
        format!("train.batch={rows}"),
        format!("train.micro_batch={rows}"),
        format!("backend={}", backend.name()),
    ];
    let words = model.split(' ').chain(switches.split(' ')).filter(|word| !word.is_empty()).map(String::from);
    Ok(recipes::resolve(recipe, &[], &words.chain(fixed).collect::<Vec<_>>())?)
}

/// The size and the time of every launch of an update.
fn time(stage: &Stage, config: &Config) -> Result<Vec<(Size, LaunchTime)>, Failure> {
    let mut bench = stage.bench(config)?;
    let step_seconds = bench.steps(2)?[1] / 1e3;
    let passes = (SAMPLE_SECONDS / step_seconds.max(1e-6)) as usize;
    let roles = [Role::GRAD, Role::Apply];
    let times = bench.session().time(&roles, passes.clamp(*PASSES.start(), *PASSES.end()))?;
    let plans = &bench.compiled().plans;
    let mut sized = vec![];
    for (role, times) in roles.into_iter().zip(times) {
        let launches = &plans.plan(role).expect("a plan that was timed").launches;
        sized.extend(times.into_iter().map(|time| (Size::of(&launches[time.launch]), time)));
    }
    Ok(sized)
}

#[cfg(test)]
mod tests;
