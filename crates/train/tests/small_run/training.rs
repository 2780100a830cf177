//! A run through the whole loop on the CPU.

use std::path::Path;

use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::events::{Event, Step};
use flatout_train::run::{Entered, Resume, Run};
use flatout_train::signal::StopFlag;
use flatout_train::trainer::{Notice, train};

/// Trains in a directory, from where it stands to the end; gives the step lines of this part.
pub fn train_in(dir: &Path, config: &Config, mut see: impl FnMut(&Event)) -> Vec<Step> {
    let (Entered::Fresh(run) | Entered::Existing(run)) = Run::enter(dir, Resume::Auto).expect("a run");
    let mut steps = vec![];
    let outcome = train(config, &run, &Device::cpu(), &StopFlag::never(), &mut |notice| {
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
