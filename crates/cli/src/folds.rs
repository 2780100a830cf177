//! `train` with `train.folds`: the folds one after another, each a run, and what they come to together.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use flatout_measure::folds;
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::device::Device;
use flatout_train::run::events::Status;
use flatout_train::run::signal::StopFlag;
use flatout_train::run::{Resume, Run};

use crate::args::Train;
use crate::screen::Screen;
use crate::start::Starting;
use crate::train::begin_or_continue;

pub fn train(
    args: &Train,
    config: &Config,
    starting: &Starting,
    device: &Device,
    stop: &StopFlag,
    screen: &Screen,
) -> Result<ExitCode, Failure> {
    let dir: PathBuf = match &args.run {
        Some(dir) => dir.clone(),
        None => Run::allocate(Path::new("runs"), &config.recipe)?.dir().to_path_buf(),
    };
    // Folds that were not reached yet begin, whatever is to go on.
    let resume = if args.resume == Resume::Never { Resume::Never } else { Resume::Auto };
    let configs = folds::configs(config)?;
    let count = configs.len();
    for (number, config) in (1..).zip(&configs) {
        let folder = folds::folder(&dir, number);
        if resume == Resume::Auto && folds::is_done(&folder) {
            screen.note(format!("fold     {number} of {count} is done: {}", folder.display()));
            continue;
        }
        screen.note(format!("fold     {number} of {count}"));
        let entered = starting.enter(|| Run::enter(&folder, resume))?;
        if begin_or_continue(config, None, entered, device, stop, screen)? == Status::Stopped {
            return Ok(ExitCode::from(3));
        }
    }
    let summary = folds::summary(&dir, config)?;
    summary.write(&dir)?;
    if screen.json {
        screen.object(&summary);
        return Ok(ExitCode::SUCCESS);
    }
    screen.result(format!("folds    {}", summary.words()));
    screen.result(format!("report   {}", dir.join("folds.md").display()));
    Ok(ExitCode::SUCCESS)
}
