//! Faults injected in the middle of a run: rows that make a step's loss infinite or its targets useless, changed on their way to
//! the device. The tests see the reactions that users would see.

use std::cell::RefCell;
use std::fs;
use std::ops::Range;

use super::*;
use crate::device::Device;
use crate::recipes;
use crate::run::checkpoint;
use crate::run::{Entered, Resume, Run};
use crate::tasks::batch::HostTensor;

type Disturb = Box<dyn Fn(&mut Batch)>;

thread_local! {
    static DISTURB: RefCell<Option<Disturb>> = const { RefCell::new(None) };
}

/// Called by the training loop on every micro-batch.
pub(super) fn disturbed(mut batch: Batch) -> Batch {
    DISTURB.with_borrow(|disturb| disturb.iter().for_each(|disturb| disturb(&mut batch)));
    batch
}

const STEPS: u64 = 24;
const BATCH: u64 = 4;

/// Gives the rows of steps `steps` an infinite weight; steps count from 1, as long as no rows were left behind.
fn poison(steps: Range<u64>) {
    let samples = (steps.start - 1) * BATCH..steps.end.saturating_sub(1).saturating_mul(BATCH);
    let disturb = move |batch: &mut Batch| {
        let context = batch.real_tokens / batch.samples.len();
        let rows: Vec<usize> =
            (0..batch.samples.len()).filter(|row| samples.contains(&batch.samples[*row])).collect();
        let HostTensor::F32(weights) = batch.tensor_mut("weights") else { unreachable!("weights are f32") };
        rows.iter().for_each(|row| weights[row * context + 3] = f32::INFINITY);
    };
    DISTURB.set(Some(Box::new(disturb)));
}

/// Gives the rows of steps `steps` a target that occurs in no text.
fn mislead(steps: Range<u64>) {
    let samples = (steps.start - 1) * BATCH..(steps.end - 1) * BATCH;
    let disturb = move |batch: &mut Batch| {
        if samples.contains(&batch.samples[0]) {
            let HostTensor::I32(targets) = batch.tensor_mut("targets") else {
                unreachable!("targets are i32")
            };
            targets.iter_mut().filter(|target| **target >= 0).for_each(|target| *target = 500);
        }
    };
    DISTURB.set(Some(Box::new(disturb)));
}

struct Trained {
    events: Vec<Event>,
    outcome: Result<Outcome, Failure>,
}

fn run_in(dir: &Path, overrides: &[&str], mut see: impl FnMut(&Event)) -> Trained {
    let small = [
        "model.width=16",
        "model.layers=1",
        "model.heads=2",
        "model.kv_heads=1",
        "model.ffn=24",
        "model.context=16",
        "train.steps=24",
        "train.batch=4",
        "train.micro_batch=2",
        "schedule.warmup_steps=2",
        "eval.rows=0",
        "checkpoint.every=5",
    ];
    let all: Vec<String> = small.iter().chain(overrides).map(|word| word.to_string()).collect();
    let config = recipes::resolve("tiny", &[], &all).unwrap();
    let (Entered::Fresh(run) | Entered::Existing(run)) = Run::enter(dir, Resume::Auto).unwrap();
    let mut events = vec![];
    let outcome = train(&config, None, &run, &Device::cpu(), &StopFlag::never(), &mut [], &mut |notice| {
        if let Notice::Event(event) = notice {
            events.push(event.clone());
            see(event);
        }
    });
    Trained { events, outcome }
}

fn trained(overrides: &[&str]) -> Trained {
    let folder = tempfile::tempdir().unwrap();
    run_in(&folder.path().join("run"), overrides, |_| {})
}

impl Trained {
    /// Warnings, except those about a slow disk, which tests share with everything else on the machine.
    fn warnings(&self) -> Vec<&str> {
        let warnings = self.events.iter().filter_map(|event| match event {
            Event::Warning { message } if !message.contains("the disk is slower than") => {
                Some(message.as_str())
            }
            _ => None,
        });
        warnings.collect()
    }

    fn saved(&self) -> Vec<u64> {
        let saved = |event: &Event| if let Event::Saved { step, .. } = event { Some(*step) } else { None };
        self.events.iter().filter_map(saved).collect()
    }

    fn end(&self) -> &End {
        match self.events.last() {
            Some(Event::End(end)) => end,
            other => panic!("{other:?} is the last event"),
        }
    }

    fn failure(&self) -> String {
        assert_eq!(self.end().status, Status::Failed);
        match &self.outcome {
            Err(Failure::Environment(sentence)) => sentence.clone(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn one_update_that_is_not_finite_is_left_out_and_named() {
    poison(7..8);
    let run = trained(&[]);
    assert_eq!(run.outcome.as_ref().unwrap().steps, STEPS);
    assert_eq!((run.end().status, run.end().skipped), (Status::Done, 1));
    let steps = events::steps(&run.events);
    assert_eq!(
        steps.iter().map(|s| s.skipped).collect::<Vec<_>>(),
        [[0; 6].to_vec(), [1; 18].to_vec()].concat()
    );
    assert!(!steps[6].loss.is_finite() && steps[7].loss.is_finite());
    assert_eq!(
        run.warnings(),
        [
            "step 7 is not finite, so its update was left out: in rows 24 to 25 the loss is not finite, and the gradient of \
          `norm` is the first that is not, going back from the loss (13 of 13 are not)"
        ]
    );
    assert_eq!(run.saved(), [5, 10, 15, 20, 24]);
}

#[test]
fn a_scheduled_checkpoint_waits_for_an_update_that_is_made() {
    poison(9..12);
    let run = trained(&[]);
    assert_eq!(run.saved(), [5, 12, 15, 20, 24]);
    assert_eq!(run.end().skipped, 3);
    let warnings = run.warnings();
    assert!(
        warnings.len() == 2 && warnings[1] == "step 10 is not finite: 2 updates in a row were left out",
        "{warnings:?}"
    );
}

#[test]
fn too_many_go_back_to_the_checkpoint_and_past_the_rows() {
    poison(12..15);
    let folder = tempfile::tempdir().unwrap();
    let (whole, broken) = (folder.path().join("whole"), folder.path().join("broken"));
    let overrides = ["train.max_skipped=3", "train.steps=24"];
    let run = run_in(&whole, &overrides, |event| {
        if matches!(event, Event::Saved { step: 10, .. }) {
            copy(&whole, &broken);
        }
    });
    assert_eq!(run.outcome.as_ref().unwrap().steps, STEPS);
    assert_eq!((run.end().status, run.end().skipped), (Status::Done, 3));
    let warnings = run.warnings();
    let back = "step 14: 3 updates in a row were not finite: going back to step 10 and on with row 56";
    assert!(warnings.len() == 3 && warnings[2] == back, "{warnings:?}");
    assert!(run.events.contains(&Event::Resume { step: 10 }));
    let steps = events::steps(&run.events);
    assert_eq!(steps.iter().map(|s| s.step).collect::<Vec<_>>(), (1..=STEPS).collect::<Vec<_>>());
    assert!(steps.iter().all(|s| s.loss.is_finite()), "the steps that count were all made");
    assert_eq!(steps.last().unwrap().samples, STEPS * BATCH);

    // A run that is killed before or after it rolled back rolls back again and ends with the same bits.
    let again = run_in(&broken, &overrides, |_| {});
    assert_eq!(again.outcome.as_ref().unwrap().steps, STEPS);
    for file in ["state.safetensors", "state.json"] {
        let read = |run: &Path| fs::read(run.join("checkpoints/step-24").join(file)).unwrap();
        assert!(read(&whole) == read(&broken), "{file} differs");
    }
}

#[test]
fn a_run_that_does_not_recover_ends() {
    poison(12..1000);
    let run = trained(&["train.max_skipped=3"]);
    let sentence = run.failure();
    assert!(sentence.contains("going back to step 10 did not help 3 times"), "{sentence}");
    assert_eq!(run.events.iter().filter(|event| matches!(event, Event::Resume { step: 10 })).count(), 3);
    assert_eq!(run.end().skipped, 12);

    poison(3..1000);
    let sentence = trained(&["train.max_skipped=2"]).failure();
    assert!(
        sentence.contains("step 4: 2 updates in a row") && sentence.contains("no checkpoint"),
        "{sentence}"
    );

    poison(12..1000);
    let run = trained(&["train.max_skipped=3", "train.on_nonfinite=stop"]);
    assert!(run.failure().contains("train.on_nonfinite is stop"));
    assert_eq!(run.saved(), [5, 10]);
}

#[test]
fn updates_are_skipped_indefinitely_if_configured() {
    poison(12..1000);
    let run = trained(&["train.max_skipped=3", "train.on_nonfinite=skip"]);
    assert_eq!((run.end().status, run.end().skipped), (Status::Done, 13));
    assert_eq!(run.saved(), [5, 10, 24], "the last state is saved in any case");
    assert_eq!(run.warnings().len(), 4, "the first, and every doubling: {:?}", run.warnings());
}

#[test]
fn the_last_updates_of_a_run_count_too() {
    poison(22..25);
    let run = trained(&["train.max_skipped=3"]);
    assert_eq!(run.end().status, Status::Done);
    assert!(run.events.contains(&Event::Resume { step: 20 }));
    assert!(events::steps(&run.events).iter().all(|s| s.loss.is_finite()));
}

/// Checkpoints are saved at 5, 10, 15, 20 and the end, and whenever the held-out loss is the lowest so far.
#[test]
fn the_best_and_every_tenth_checkpoint_stay() {
    // From step 13 on it learns nonsense, and the held-out loss shows it.
    mislead(13..1000);
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("run");
    let retention = ["checkpoint.keep=1", "checkpoint.keep_every=10", "checkpoint.best=true"];
    let evaluation = ["eval.rows=4", "eval.every=3", "lr=0.02", "schedule.name=constant"];
    let run = run_in(&dir, &[&retention[..], &evaluation].concat(), |_| {});
    let (mut lowest, mut wanted) = (None, vec![]);
    for event in &run.events {
        if let Event::Eval { step, loss, .. } = *event
            && lowest.is_none_or(|(_, least)| loss < least)
        {
            lowest = Some((step, loss));
            wanted.push(step);
        }
    }
    let best = checkpoint::best(&dir.join("checkpoints")).expect("a best one");
    assert_eq!(Some((best.step, best.loss)), lowest);
    assert!((6..=18).contains(&best.step) && wanted.len() > 1, "{lowest:?}");
    wanted.extend([5, 10, 15, 20, STEPS]);
    wanted.sort();
    wanted.dedup();
    assert_eq!(run.saved(), wanted);
    let mut kept = vec![10, 20, best.step, STEPS];
    kept.sort();
    kept.dedup();
    let folders = fs::read_dir(dir.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
    let step = |name: String| name.strip_prefix("step-").and_then(|step| step.parse::<u64>().ok());
    let mut found: Vec<u64> = folders.filter_map(|name| step(name.into_string().unwrap())).collect();
    found.sort();
    assert_eq!(found, kept);
}

#[test]
fn a_loss_that_stands_out_is_a_spike() {
    mislead(57..58);
    let run = trained(&["train.steps=60", "lr=0.02", "checkpoint.every=0"]);
    let spikes: Vec<_> = run.events.iter().filter(|event| matches!(event, Event::Spike { .. })).collect();
    let [Event::Spike { step: 57, loss, median, deviations }] = spikes[..] else { panic!("{spikes:?}") };
    assert!(loss > median && *deviations > 6.0);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}
