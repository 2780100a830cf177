//! `train` with `train.folds`: trains the folds one after another, each as a run, and summarises them.

use std::path::Path;
use std::process::ExitCode;

use flatout_measure::folds;
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::device::Device;
use flatout_train::run::events::Status;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Resume, quoted};

use crate::screen::Screen;
use crate::start::Starting;
use crate::train::{OneOf, train_one_of};

/// Trains the folds in a directory; folds that are done are kept unless `resume` is never.
pub fn train(
    dir: &Path,
    resume: Resume,
    config: &Config,
    starting: &Starting,
    device: &Device,
    stop: &StopFlag,
    screen: &Screen,
) -> Result<ExitCode, Failure> {
    // Folds that were not begun are begun even if --resume is must.
    let resume = if resume == Resume::Never { Resume::Never } else { Resume::Auto };
    let configs = folds::configs(config)?;
    let count = configs.len();
    for (number, config) in (1..).zip(&configs) {
        let folder = folds::folder(dir, number);
        let is_done = resume != Resume::Never && folds::is_done(&folder);
        let (label, words) = ("fold", String::new());
        let one = OneOf { label, number, count, words, folder: &folder, resume, is_done, config };
        if train_one_of(&one, device, stop, starting, screen)? == Status::Stopped {
            screen.note(format!("continue all folds with: flatout resume {}", quoted(dir)));
            return Ok(ExitCode::from(3));
        }
    }
    let summary = folds::summary(dir, config)?;
    summary.write(dir)?;
    if screen.json {
        screen.object(&summary);
        return Ok(ExitCode::SUCCESS);
    }
    screen.result(format!("folds    {}", summary.words()));
    screen.result(format!("report   {}", dir.join("folds.md").display()));
    Ok(ExitCode::SUCCESS)
}
