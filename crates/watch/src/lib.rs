//! A live page of runs: follows the runs in a folder while they are written and shows them in a browser.
//!
//! ```text
//! folder    lists runs, and opens files so that no path leads out of the folder
//! line      a line of a run's log
//! curves    curves of any number of steps in bounded memory
//! record    the state of a run from its log: curves, evaluations, warnings, its end
//! follow    reads a log to its end, and further as it grows
//! glance    summarises a log by its first and last lines, for lists of thousands of runs
//! details   the rest of a run's folder: settings, plan, profile, ablation, samples
//! live      the thread that polls the folder and sends each page the updates it does not have yet
//! part      reads a part of a log again when a chart is zoomed
//! page      the page, one document made of the files in `page/`
//! ```
//! Nothing here writes, so that runs are not affected; they may be written, killed, resumed or removed while they are read.
#![forbid(unsafe_code)]

pub mod curves;
pub mod details;
pub mod folder;
pub mod follow;
pub mod glance;
pub mod line;
pub mod live;
pub mod page;
pub mod part;
pub mod record;

use std::io;
use std::net::TcpListener;
use std::path::Path;

use flatout_http::{Answer, Request, Server};

use folder::Folder;
use live::Live;

/// Serves the page of a folder of runs, or of one run, until the server is dropped.
pub fn serve(dir: &Path, listener: TcpListener) -> io::Result<Server> {
    let live = Live::start(Folder::open(dir)?)?;
    flatout_http::start(listener, move |request| answer(&live, request))
}

/// Routes requests. Runs are looked up by their ids in the list, so that no path is built from a request.
fn answer(live: &Live, request: &Request) -> Answer {
    let json = |found: Option<serde_json::Value>| match found {
        Some(value) => Answer::json(value.to_string()),
        None => Answer::text(404, "there is no such run here"),
    };
    match request.path.as_str() {
        "/" => page::answer(),
        "/api/live" => live.subscribe(request.values("run")),
        "/api/run" => json(request.value("id").and_then(|id| live.run(id))),
        "/api/part" => {
            let number = |name: &str| request.value(name).and_then(|text| text.parse::<u64>().ok());
            let range = request.value("id").zip(number("from").zip(number("to")));
            json(range.and_then(|(id, (from, to))| live.part(id, from, to)))
        }
        "/api/sample" => match (request.value("id"), request.value("image")) {
            (Some(id), Some(name)) => match live.image(id, name) {
                Some(png) => Answer::whole(200, "image/png", png),
                None => Answer::text(404, "there is no such picture here"),
            },
            _ => Answer::text(404, "there is no such picture here"),
        },
        "/api/sweep" => json(request.value("id").and_then(|id| live.sweep(id))),
        _ => Answer::text(404, "there is nothing here"),
    }
}
