//! Commands that measure, in one process or on several ranks: every rank opens the same stage, rank 0 reports, and a failure of one
//! rank ends all.

use std::process::ExitCode;
use std::rc::Rc;

use flatout_measure::bench::Stage;
use flatout_train::Config;
use flatout_train::Failure;
use flatout_train::ranks::Ranks;

use crate::launch::Meeting;
use crate::many::{self, Advice, ProcessRole};
use crate::screen::Screen;
use crate::start;

/// Whether this process checks the paths of results: it is alone, the parent of the ranks, or rank 0.
pub fn is_writer(meeting: &Meeting) -> Result<bool, Failure> {
    Ok(match many::role(&meeting.ranks)? {
        ProcessRole::Parent(_) | ProcessRole::Alone => true,
        ProcessRole::Rank(place) => place.rank == 0,
    })
}

/// Calls `work` with the stage of this process; every other rank does the same.
pub fn measure(
    meeting: &Meeting,
    config: &Config,
    screen: &Screen,
    work: impl FnOnce(&Stage, &Config, &Screen) -> Result<ExitCode, Failure>,
) -> Result<ExitCode, Failure> {
    let role = many::role(&meeting.ranks)?;
    match role {
        ProcessRole::Parent(copies) => {
            let (stop, _) = start::watch(None, screen)?;
            many::look_after(copies, &meeting.ranks, None, config, &stop, screen)
        }
        ProcessRole::Alone => on_stage(&Rc::new(Ranks::alone()), meeting, config, screen, work),
        ProcessRole::Rank(_) => {
            let (_stop, starting) = start::watch(None, screen)?;
            starting.measures();
            let (folder, advice) = (meeting.run.as_deref(), Advice::default());
            let joined = many::join(&role, &meeting.ranks, folder, &starting, screen, &advice)?;
            let Some(ranks) = joined.map(Rc::new) else { return Ok(ExitCode::FAILURE) };
            let result = on_stage(&ranks, meeting, config, screen, work);
            many::end(Rc::into_inner(ranks).expect("the stage is gone"), result)
        }
    }
}

fn on_stage(
    ranks: &Rc<Ranks>,
    meeting: &Meeting,
    config: &Config,
    screen: &Screen,
    work: impl FnOnce(&Stage, &Config, &Screen) -> Result<ExitCode, Failure>,
) -> Result<ExitCode, Failure> {
    let screen = many::screen(ranks, screen);
    let config = many::settings(ranks, config.clone())?;
    let device = many::device(&config, &meeting.ranks, ranks)?;
    let stage = Stage::among(&config, device, Rc::clone(ranks))?;
    let code = work(&stage, &config, &screen)?;
    // Ranks meet before they end, so that a failure of one reaches the others.
    ranks.meet()?;
    Ok(code)
}
