//! `ranks`: lists the ranks that joined when the command is started as several, and times their exchanges.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use flatout_train::{Failure, UserError};
use flatout_world::{Sockets, Wire, World};
use serde::Serialize;

use crate::launch::{self, Begun};
use crate::screen::{Screen, bytes};

/// (bytes to every other rank, number of exchanges).
const EXCHANGES: [(usize, usize); 3] = [(4 << 10, 1000), (64 << 10, 500), (1 << 20, 100)];

#[derive(Parser)]
pub struct CheckRanks {
    #[command(flatten)]
    meeting: launch::Meeting,
}

#[derive(Serialize)]
struct Report {
    ranks: usize,
    nodes: usize,
    members: Vec<Member>,
    exchanges: Vec<Exchange>,
}

#[derive(Serialize)]
struct Member {
    rank: usize,
    host: String,
    process: u32,
}

#[derive(Serialize)]
struct Exchange {
    bytes: usize,
    median_us: f64,
    /// The 99th percentile.
    p99_us: f64,
}

pub fn ranks(args: &CheckRanks, screen: &Screen) -> Result<ExitCode, Failure> {
    let launch::Meeting { ranks, run } = &args.meeting;
    if ranks.gpus.is_some() || ranks.share_gpu {
        return Err(Failure::User(UserError(
            "`ranks` times the sockets between processes and opens no GPU: give --ranks".into(),
        )));
    }
    let world = match launch::begin(ranks, run.as_deref(), screen, || None)? {
        Begun::Ended(code) => return Ok(code),
        Begun::Rank(world) => world,
    };
    let failed = |failure: flatout_world::Failure| Failure::Environment(failure.sentence);
    let sockets = Sockets::connect(&world).map_err(failed)?;
    let exchanges = EXCHANGES.into_iter().map(|(bytes, times)| time(&world, &sockets, bytes, times));
    let exchanges: Vec<Exchange> = exchanges.collect::<Result<_, _>>().map_err(failed)?;
    let members = world.members().iter().enumerate();
    let members =
        members.map(|(rank, member)| Member { rank, host: member.host.clone(), process: member.process });
    let report = Report { ranks: world.ranks, nodes: world.nodes, members: members.collect(), exchanges };
    let is_first = world.rank == 0;
    world.finish().map_err(failed)?;
    if is_first {
        show(&report, screen);
    }
    Ok(ExitCode::SUCCESS)
}

/// Times exchanges in which every rank sends a number of bytes to every other.
fn time(
    world: &World,
    wire: &Sockets,
    bytes: usize,
    times: usize,
) -> Result<Exchange, flatout_world::Failure> {
    let mine = vec![vec![world.rank as u8; bytes]; world.ranks];
    let mut theirs = mine.clone();
    let mut took_us = vec![];
    for _ in 0..times {
        let send: Vec<&[u8]> = mine.iter().map(Vec::as_slice).collect();
        let mut receive: Vec<&mut [u8]> = theirs.iter_mut().map(Vec::as_mut_slice).collect();
        let began = Instant::now();
        wire.exchange(&send, &mut receive).map_err(|error| world.fail_wire(&error))?;
        took_us.push(began.elapsed().as_secs_f64() * 1e6);
    }
    if let Some(from) =
        theirs.iter().enumerate().position(|(from, got)| got.iter().any(|byte| *byte != from as u8))
    {
        return Err(world.fail(&format!("it received other bytes than rank {from} sent")));
    }
    took_us.sort_by(f64::total_cmp);
    Ok(Exchange { bytes, median_us: took_us[times / 2], p99_us: took_us[times * 99 / 100] })
}

fn show(report: &Report, screen: &Screen) {
    if screen.json {
        return screen.object(report);
    }
    let number = |count: usize, word: &str| format!("{count} {word}{}", if count == 1 { "" } else { "s" });
    screen.result(format!("{} on {}", number(report.ranks, "rank"), number(report.nodes, "node")));
    for Member { rank, host, process } in &report.members {
        screen.result(format!("  rank {rank}: {host}, process {process}"));
    }
    for Exchange { bytes: size, median_us, p99_us } in &report.exchanges {
        let size = bytes(*size as u64);
        screen.result(format!(
            "  {size} to every other rank: median {median_us:.0} us, 99% within {p99_us:.0} us"
        ));
    }
}
