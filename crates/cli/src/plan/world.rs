//! The part of `plan` about several ranks: how they are linked, and how the run scales over them.

use flatout_measure::forecast::scaling::{Exchange, Refused, Scaled};
use flatout_measure::plan::world::RanksReport;
use flatout_train::resolve::compile::Compiled;
use flatout_train::resolve::prediction;

use crate::runs::print_table;
use crate::screen::{Screen, bytes, count};

/// Prints the links, the sharding, the exchanges and the scaling of several ranks.
pub fn print(world: &RanksReport, compiled: &Compiled, screen: &Screen) {
    let device = &compiled.target.name;
    let place = match (&world.links, world.nodes) {
        (None, _) => "processes that share this machine's cores".into(),
        (Some([local, _]), 1) if world.link_by == "nvml" => {
            format!("this node's {device}, linked by {local} according to NVML")
        }
        (Some([local, _]), 1) => format!("one node of {device}, linked by {local}"),
        (Some([local, net]), nodes) => {
            format!(
                "{nodes} nodes of {} {device}, linked by {local} and between nodes by {net}",
                world.ranks / nodes
            )
        }
    };
    screen.result(format!(
        "ranks            {}: {place}; memory and arithmetic are those of one rank",
        world.ranks
    ));
    let why = world.why.as_ref().map_or(String::new(), |why| format!(" (auto: {why})"));
    screen.result(format!("shared           shard={}{why}", world.level));
    let Some((now, scaled)) = &world.predicted else {
        screen.result("exchanges        are not predicted on CPUs: flatout ranks --ranks N times them");
        return;
    };
    let Exchange { step_ms, compute_ms, wire_ms, exposed_ms, buckets } = now;
    let in_buckets = if *buckets > 1 { format!(", in {buckets} buckets") } else { String::new() };
    screen.result(format!(
        "exchanges        {wire_ms:.2} ms beside {compute_ms:.1} ms of compute{in_buckets}; {exposed_ms:.2} ms of a step of {step_ms:.1} ms are exposed"
    ));
    let by = if prediction::is_calibrated(compiled) { "by timed kernels" } else { "at best" };
    screen.result(match world.is_timed {
        true => format!("                 exchanges were timed on these GPUs (doctor --calibrate), compute is {by}"),
        false => format!("                 exchanges are predicted by a table of links, compute is {by}; none of it was measured on several GPUs"),
    });
    let head = [
        "ranks",
        "nodes",
        "rows at once",
        "memory a rank",
        "compute",
        "wire",
        "exposed",
        "tokens/s",
        "of linear",
    ];
    let mut rows: Vec<Vec<String>> = vec![head.map(String::from).to_vec()];
    for one in scaled {
        rows.push(match one {
            Ok(Scaled {
                ranks,
                nodes,
                micro_batch,
                arena_bytes,
                fits,
                exchange,
                tokens_per_second,
                share_of_linear,
            }) => vec![
                format!("  {ranks}"),
                nodes.to_string(),
                micro_batch.to_string(),
                format!("{}{}", bytes(*arena_bytes as u64), if *fits { "" } else { " (does not fit)" }),
                format!("{:.1} ms", exchange.compute_ms),
                format!("{:.2} ms", exchange.wire_ms),
                format!("{:.2} ms", exchange.exposed_ms),
                count(*tokens_per_second as u64),
                format!("{:.1}%", 100.0 * share_of_linear),
            ],
            Err(Refused { ranks, .. }) => {
                let mut row = vec![format!("  {ranks}"), "cannot run (--json says why)".into()];
                row.resize(head.len(), String::new());
                row
            }
        });
    }
    screen.result("");
    print_table(&rows, 1..9, screen);
    screen.result("");
}
