//! Commands that measure, by one process or by several ranks: all of them open the same stage, the first reports, and a failure of
//! one ends all.

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

/// Whether this process is the one that checks where results go: alone, the parent of ranks, or the first of them.
pub fn is_writer(meeting: &Meeting) -> Result<bool, Failure> {
    Ok(match many::role(&meeting.ranks)? {
        ProcessRole::Parent(_) | ProcessRole::Alone => true,
        ProcessRole::Rank(place) => place.rank == 0,
    })
}

/// Does `work` on the stage of this process, and of every other rank where there are several.
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
    // The others are still there when the first has something to say of its end.
    ranks.meet()?;
    Ok(code)
}
