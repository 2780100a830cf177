//! A live page of runs: what lies in a folder of runs, followed while it is written and shown in a browser.
//!
//! ```text
//! folder    which runs there are, and files opened so that no path leads out of the folder
//! line      a line of a run's log
//! curves    the numbers of any number of steps in bounded memory
//! record    a run as its log tells it: curves, evaluations, warnings, how it ended
//! follow    a log read as far as it goes, and on as it grows
//! glance    the first and last lines of a log: enough for a list of thousands of runs
//! details   the rest of a run's folder: settings, plan, profile, ablation, samples
//! live      the thread that looks for news and sends each page what it does not have yet
//! part      a part of a log read again, where somebody looks closer
//! page      the page, one document made of the files in `page/`
//! ```
//!
//! Nothing here writes. A run that is written, killed, resumed or removed while it is read is none the worse for it.
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

/// Everything there is to ask for. Runs are named as the list names them: no path is made of a request.
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
            let asked = request.value("id").zip(number("from").zip(number("to")));
            json(asked.and_then(|(id, (from, to))| live.part(id, from, to)))
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
