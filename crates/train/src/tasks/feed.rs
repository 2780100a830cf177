//! Rows of tokens or laid out examples into the inputs of a plan. Rows that are missing at the end of a batch get weight 0.

use flatout_data::{MicroBatch, Rows, Segment};
use flatout_ir::passes::input_path;
use flatout_ir::{Role, plan::PlacedSlot};
use flatout_runtime::{RuntimeError, Session};

/// What dropout draws from beside the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    pub seed: u64,
    pub step: u64,
}

/// Writes rows `from..from + count` of `rows`; the plan was compiled for `capacity` rows.
pub fn feed(
    session: &mut Session,
    role: Role,
    rows: &Rows,
    from: usize,
    capacity: usize,
    draw: Draw,
) -> Result<(), RuntimeError> {
    let context = rows.context;
    let count = capacity.min(rows.count() - from);
    let tokens = from * context..(from + count) * context;
    let missing = (capacity - count) * context;
    let padded = |values: &[i32], fill: i32| {
        let mut values = values[tokens.clone()].to_vec();
        values.resize(values.len() + missing, fill);
        values
    };
    let mut write = |name: &str, values: Vec<i32>| session.write_i32(&input_path(role, name), &values);
    write("tokens", padded(&rows.tokens, 0))?;
    write("targets", padded(&rows.targets, -1))?;
    write("positions", padded(&rows.positions, 0))?;
    let mut weights = rows.weights[tokens].to_vec();
    weights.resize(weights.len() + missing, 0.0);
    session.write_f32(&input_path(role, "weights"), &weights)?;

    if let Some(slot) = slot(session, role, "segment_start") {
        let capacity = slot.ty.elements();
        let (mut starts, mut lens) = (vec![0; capacity], vec![0; capacity]);
        let all = rows.segments[from..from + count].iter().enumerate();
        let all = all.flat_map(|(row, segments)| {
            segments.iter().map(move |s| (row * context + s.start as usize, s.len))
        });
        for (i, (start, len)) in all.enumerate() {
            (starts[i], lens[i]) = (start as i32, len as i32);
        }
        session.write_i32(&input_path(role, "segment_start"), &starts)?;
        session.write_i32(&input_path(role, "segment_len"), &lens)?;
    }
    if slot(session, role, "rng").is_some() {
        let rng = [draw.seed as i32, (draw.seed >> 32) as i32, draw.step as i32];
        session.write_i32(&input_path(role, "rng"), &rng)?;
        let samples = rows.sample[from..from + count].iter().copied().chain(std::iter::repeat(0));
        let keys = samples.take(capacity).flat_map(|s| (0..context as i32).flat_map(move |t| [s as i32, t]));
        session.write_i32(&input_path(role, "rows"), &keys.collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Writes a micro-batch of examples into the inputs that the plan has, for which it was laid out.
pub fn feed_examples(
    session: &mut Session,
    role: Role,
    batch: &MicroBatch,
    draw: Draw,
) -> Result<(), RuntimeError> {
    let segments = |of: fn(&Segment) -> u32| -> Vec<i32> {
        let room = batch.labels.len();
        batch.segments.iter().map(|s| of(s) as i32).chain(std::iter::repeat(0)).take(room).collect()
    };
    let has = |session: &Session, name: &str| slot(session, role, name).is_some();
    let mut write = |name: &str, values: &dyn Fn() -> Vec<i32>| match has(session, name) {
        true => session.write_i32(&input_path(role, name), &values()),
        false => Ok(()),
    };
    write("tokens", &|| batch.tokens.clone())?;
    write("positions", &|| batch.positions.clone())?;
    write("targets", &|| batch.targets.clone())?;
    write("labels", &|| batch.labels.clone())?;
    write("segment_start", &|| segments(|s| s.start))?;
    write("segment_len", &|| segments(|s| s.len))?;
    write("rng", &|| vec![draw.seed as i32, (draw.seed >> 32) as i32, draw.step as i32])?;
    write("rows", &|| batch.draw_keys())?;
    for (name, values) in [("weights", &batch.weights), ("label_weights", &batch.label_weights)] {
        if has(session, name) {
            session.write_f32(&input_path(role, name), values)?;
        }
    }
    Ok(())
}

fn slot<'a>(session: &'a Session, role: Role, name: &str) -> Option<&'a PlacedSlot> {
    session.plans().slot(&input_path(role, name))
}
