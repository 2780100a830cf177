//! A test program of ranks: they run steps with one collective each, can be ordered to fail in various ways, and
//! measure their wire.
//!
//! ```text
//! cargo run --release -p flatout-world --example rank -- --ranks 4 --measure
//! ```
//! The tests start it. `--order 2:exit=7@5` makes rank 2 leave with code 7 at step 5.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use flatout_world::launch::{GRACE, own_command};
use flatout_world::{
    Failure, Flags, Joining, Launch, RankPlacement, Sockets, Start, Status, Timing, Wire, World, launch,
    place,
};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

/// The command line.
#[derive(Default)]
struct Arguments {
    flags: Flags,
    steps: u64,
    step_ms: u64,
    /// Where every rank writes its process id, and the step at which it ended.
    folder: Option<PathBuf>,
    orders: Vec<Order>,
    timing: Timing,
    shows_all: bool,
    measures: bool,
}

struct Order {
    rank: usize,
    what: String,
    step: u64,
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(sentence) => return refuse(&sentence),
    };
    let env = |name: &str| std::env::var(name).ok();
    match place(&arguments.flags, &env, std::os::unix::process::parent_id()) {
        Err(sentence) => refuse(&sentence),
        Ok(Start::Rank(place)) => rank(&arguments, place),
        Ok(Start::Copies(copies)) => {
            let say = |sentence: &str| eprintln!("rank: {sentence}");
            let shows_all = arguments.shows_all;
            match launch(&Launch {
                copies,
                command: &|_| own_command(),
                shows_all,
                grace: GRACE,
                say: &say,
                about: &|_| {},
            }) {
                Ok(code) => ExitCode::from(code),
                Err(sentence) => {
                    say(&sentence);
                    ExitCode::FAILURE
                }
            }
        }
    }
}

fn refuse(sentence: &str) -> ExitCode {
    eprintln!("rank: {sentence}");
    ExitCode::from(2)
}

fn arguments() -> Result<Arguments, String> {
    let mut all = Arguments { steps: 10, ..Arguments::default() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let number = |text: String| text.parse::<u64>().map_err(|_| format!("{word} {text} is not a number"));
        let milliseconds = |text: String| number(text).map(Duration::from_millis);
        match word.as_str() {
            "--ranks" => all.flags.ranks = Some(number(value()?)? as usize),
            "--nodes" => all.flags.nodes = Some(number(value()?)? as usize),
            "--node" => all.flags.node = Some(number(value()?)? as usize),
            "--address" => all.flags.address = Some(value()?),
            "--steps" => all.steps = number(value()?)?,
            "--step-ms" => all.step_ms = number(value()?)?,
            "--folder" => all.folder = Some(value()?.into()),
            "--order" => all.orders.push(order(&value()?).ok_or("an order is RANK:WHAT@STEP")?),
            "--join-ms" => all.timing.join = milliseconds(value()?)?,
            "--beat-ms" => all.timing.beat_every = milliseconds(value()?)?,
            "--silent-ms" => all.timing.silent_after = milliseconds(value()?)?,
            "--still-ms" => all.timing.still_after = milliseconds(value()?)?,
            "--all" => all.shows_all = true,
            "--measure" => all.measures = true,
            other => return Err(format!("`{other}` is no flag")),
        }
    }
    Ok(all)
}

fn order(text: &str) -> Option<Order> {
    let (rank, rest) = text.split_once(':')?;
    let (what, step) = rest.split_once('@').unwrap_or((rest, "0"));
    Some(Order { rank: rank.parse().ok()?, what: what.into(), step: step.parse().ok()? })
}

fn leave(failure: &Failure) {
    if failure.is_mine_to_say {
        eprintln!("rank: {failure}");
    }
    signal_hook::low_level::exit(1);
}

fn rank(arguments: &Arguments, mut place: RankPlacement) -> ExitCode {
    let own = place.rank;
    let obeys = |what: &str, step: u64| {
        arguments.orders.iter().any(|order| order.rank == own && order.what == what && order.step == step)
    };
    let is_stopped = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGUSR1] {
        signal_hook::flag::register(signal, Arc::clone(&is_stopped)).expect("a handler");
    }
    let keep = |name: &str, text: String| {
        if let Some(folder) = &arguments.folder {
            let partial = folder.join(format!(".{name}-{own}"));
            std::fs::write(&partial, text)
                .and_then(|()| std::fs::rename(&partial, folder.join(format!("{name}-{own}"))))
                .expect("a file");
        }
    };
    keep("process", std::process::id().to_string());
    if obeys("leave", 0) {
        return refuse("this rank was told not to join");
    }
    if obeys("world size", 0) {
        place.ranks += 1;
    }
    let joining = Joining {
        version: if obeys("version", 0) { "0.0.0".into() } else { env!("CARGO_PKG_VERSION").into() },
        secret: if obeys("secret", 0) { Some("guess".into()) } else { std::env::var("FLATOUT_SECRET").ok() },
        device: None,
        folder: arguments.folder.as_deref(),
        timing: arguments.timing,
        note: Arc::new(|line| eprintln!("rank: {line}")),
        leave: Arc::new(leave),
        stop: Arc::new(|_| std::process::exit(3)),
        take_stopper: Arc::new(drop),
    };
    let world = match World::join(&place, joining) {
        Ok(world) => world,
        Err(failure) => {
            if failure.is_mine_to_say {
                eprintln!("rank: {failure}");
            }
            return ExitCode::FAILURE;
        }
    };
    let sockets = Sockets::connect(&world).expect("sockets, or the watcher leaves");
    println!("rank {own} of {} is process {}", world.ranks, std::process::id());
    if arguments.measures {
        measure(&world, &sockets);
    }
    for step in 1..=arguments.steps {
        let told = Status { step, doing: "counting".into(), part: 0 };
        world.beat(told);
        obey(&world, arguments.orders.iter().filter(|order| order.rank == own && order.step == step));
        world.called(if obeys("diverge", step) { "another" } else { "sum" });
        let sum = sum(&world, &sockets, step + own as u64);
        let ranks = world.ranks as u64;
        assert_eq!(sum, ranks * step + ranks * (ranks - 1) / 2);
        std::thread::sleep(Duration::from_millis(arguments.step_ms));
        keep("step", step.to_string());
        if world.agree("stop", u64::from(is_stopped.load(Ordering::SeqCst))).expect("an agreement") > 0 {
            world.finish().expect("an end");
            return ExitCode::from(3);
        }
    }
    world.finish().expect("an end");
    ExitCode::SUCCESS
}

fn obey<'a>(world: &World, orders: impl Iterator<Item = &'a Order>) {
    for order in orders {
        match order.what.split_once('=').unwrap_or((&order.what, "")) {
            ("exit", code) => std::process::exit(code.parse().expect("a code")),
            ("panic", _) => panic!("as ordered"),
            ("fail", _) => drop(world.fail("the disk is full")),
            ("alarm", _) => {
                let alarm = world.alarm();
                std::thread::spawn(move || alarm.fail("a link is down"));
            }
            ("hang", _) => std::thread::sleep(Duration::from_secs(3600)),
            ("barrier", _) => drop(world.barrier("of its own")),
            _ => {}
        }
    }
}

/// The sum of a number over all ranks.
fn sum(world: &World, wire: &Sockets, number: u64) -> u64 {
    let bytes = number.to_le_bytes();
    let mut received = vec![[0u8; 8]; world.ranks];
    let send = vec![&bytes[..]; world.ranks];
    let mut receive: Vec<&mut [u8]> = received.iter_mut().map(|bytes| &mut bytes[..]).collect();
    if let Err(error) = wire.exchange(&send, &mut receive) {
        world.fail_wire(&error);
    }
    received.into_iter().map(u64::from_le_bytes).sum()
}

/// Times exchanges in which every rank sends and receives a given number of bytes for every other.
fn measure(world: &World, wire: &Sockets) {
    for (bytes, times) in [(4 << 10, 4000), (64 << 10, 2000), (1 << 20, 300)] {
        let mine = vec![vec![world.rank as u8; bytes]; world.ranks];
        let mut theirs = vec![vec![0u8; bytes]; world.ranks];
        let mut durations = vec![];
        for _ in 0..times {
            let send: Vec<&[u8]> = mine.iter().map(Vec::as_slice).collect();
            let mut receive: Vec<&mut [u8]> = theirs.iter_mut().map(Vec::as_mut_slice).collect();
            let began = Instant::now();
            wire.exchange(&send, &mut receive).expect("an exchange");
            durations.push(began.elapsed());
        }
        durations.sort();
        if world.rank == 0 {
            let median = durations[times / 2];
            let rate = (bytes * (world.ranks - 1)) as f64 / median.as_secs_f64() / 1e9;
            println!(
                "{} ranks, {bytes} bytes to each: median {:.1} us, 99% within {:.1} us, {rate:.2} GB/s out of a rank",
                world.ranks,
                median.as_secs_f64() * 1e6,
                durations[times * 99 / 100].as_secs_f64() * 1e6
            );
        }
    }
}
