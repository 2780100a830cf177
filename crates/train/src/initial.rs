//! First values of slots: weights by counter-based random numbers, tables by their formula.

use flatout_ir::plan::PlacedSlot;
use flatout_ir::{Class, Init, PlanSet, TensorType, random};
use flatout_runtime::{RuntimeError, Session};
use rayon::prelude::*;

/// Writes every parameter and table. A weight depends on the seed, its own path and nothing else.
pub fn write(session: &mut Session, seed: u64) -> Result<(), RuntimeError> {
    for slot in leaves(session.plans(), |class| class.is_parameter()) {
        session.write_f32(&slot.path, &values(&slot.path, &slot.ty, &slot.init, seed))?;
    }
    write_tables(session)
}

/// Writes the constants, which no checkpoint holds.
pub fn write_tables(session: &mut Session) -> Result<(), RuntimeError> {
    for slot in leaves(session.plans(), |class| class == Class::Const) {
        session.write_f32(&slot.path, &values(&slot.path, &slot.ty, &slot.init, 0))?;
    }
    Ok(())
}

/// Slots of a class that nothing lies inside.
pub fn leaves(plans: &PlanSet, class: impl Fn(Class) -> bool) -> Vec<PlacedSlot> {
    plans.slots.iter().filter(|s| class(s.class) && !s.is_whole).cloned().collect()
}

/// Values a task draws; even, so that pairs stay together.
const CHUNK: usize = 1 << 16;

/// The first values of one slot.
pub fn values(path: &str, ty: &TensorType, init: &Init, seed: u64) -> Vec<f32> {
    let n = ty.elements();
    match *init {
        Init::Zeros => vec![0.0; n],
        Init::Ones => vec![1.0; n],
        Init::Normal { std } => {
            let stream = stream(path);
            let mut values = vec![0.0; n];
            values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
                let first = (chunk * CHUNK / 2) as u64;
                for (i, pair) in values.chunks_mut(2).enumerate() {
                    let drawn = random::normal_pair(seed, stream, first + i as u64);
                    pair.iter_mut().zip(drawn).for_each(|(value, x)| *value = std * x);
                }
            });
            values
        }
        Init::RopeTable { freq } => freq.table(ty.dims[0], ty.dims[1]).map(|value| value as f32).collect(),
    }
}

/// FNV-1a of a path.
fn stream(path: &str) -> u64 {
    path.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3))
}
