//! Complete runs on the CPU.

use std::path::Path;

use flatout_report::report::AtEnd;
use flatout_report::tensorboard::Board;
use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::run::events::{Event, Step};
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::training::trainer::{Notice, Sink, train};

/// Trains in a directory, from its present state to the end; returns the step lines of this part.
pub fn train_in(dir: &Path, config: &Config, mut see: impl FnMut(&Event)) -> Vec<Step> {
    let (Entered::Fresh(run) | Entered::Existing(run)) = Run::enter(dir, Resume::Auto).expect("a run");
    let mut steps = vec![];
    let (mut board, mut report) = (Board::default(), AtEnd::default());
    let mut sinks: [&mut dyn Sink; 2] = [&mut board, &mut report];
    let outcome = train(config, None, &run, &Device::cpu(), &StopFlag::never(), &mut sinks, &mut |notice| {
        if let Notice::Event(event) = notice {
            if let Event::Step(step) = event {
                steps.push(step.clone());
            }
            see(event);
        }
    });
    assert_eq!(Some(outcome.expect("a run to its end").steps), config.train.steps);
    assert!(steps.iter().all(|step| step.loss.is_finite()));
    steps
}
