//! The running average of trained parameters: `apply` moves it towards the weights after every update, and evaluation reads it
//! in their place.
//!
//! a' = a + r (p' - a) with r = max(1 - decay, 9 / (10 + n)) after n applied updates, which is the usual warm-up: the decay is
//! min(decay, (1 + n) / (10 + n)), so that an average forgets first values as fast as it has seen later ones. A skipped update
//! changes nothing. Averages are f32 and start as the weights; an update costs 12 more bytes of traffic per parameter.
//!
//! The pass comes last. Readers of averages cast them to bf16 beside their use, because a stored copy would have to be written
//! by every update although few of them are evaluated; row norms of DoRA are computed from averages for the same reason.

use std::collections::{BTreeMap, HashMap};

use crate::builder::{Builder, Tensor};
use crate::graph::{Class, Graph, SlotId, Value};
use crate::ops::elementwise::Elementwise as E;
use crate::passes::forward::adapter::Adapter;
use crate::passes::gradient::shards::{self, Divided};
use crate::passes::types::adapter_norms;
use crate::passes::types::copies::cast_where_read;
use crate::passes::types::precision::copy_path;
use crate::plan::Role;
use crate::replay::Replay;
use crate::types::DType;

/// The prefix of the paths of averages.
const SCOPE: &str = "average.";

/// The slot of a parameter's average.
pub fn average_path(weight: &str) -> String {
    format!("{SCOPE}{weight}")
}

/// The parameter whose average a slot holds.
pub fn averaged_weight(path: &str) -> Option<&str> {
    path.strip_prefix(SCOPE)
}

/// r, from the number of applied updates and whether this one was applied; 0 if it was not.
pub(super) fn rate<'g>(decay: f64, updates: Tensor<'g>, is_finite: Tensor<'g>) -> Tensor<'g> {
    let least = updates.b.fill(1.0 - decay, DType::F32, &[1]);
    is_finite * updates.offset(10.0).recip().scale(9.0).zip(E::Max, least)
}

/// a'.
pub(super) fn moved<'g>(average: Tensor<'g>, weight: Tensor<'g>, rate: Tensor<'g>) -> Tensor<'g> {
    let dims = average.dims();
    average + (weight - average) * rate.reshape(&vec![1; dims.len()]).broadcast(&dims)
}

/// Makes evaluation, and the plans that generate samples beside it, read averages where `apply` updates any. Returns the number
/// of parameters read as averages. Sharded averages are instead gathered into the slots of the weights before evaluation
/// (`shards`).
pub(crate) fn bind(graphs: &mut [(Role, Graph)], adapters: &[Adapter], divided: &[Divided]) -> usize {
    let Some((_, apply)) = graphs.iter().find(|(role, _)| *role == Role::Apply) else { return 0 };
    let gathered = shards::inside(apply, divided);
    let whole = apply.slots.iter().filter(|slot| !gathered.contains_key(&slot.path));
    let averages: Vec<String> =
        whole.filter_map(|slot| averaged_weight(&slot.path)).map(String::from).collect();
    if averages.is_empty() {
        return 0;
    }
    let has_average = |path: &str| averages.iter().any(|average| average == path);
    let reads = |role: Role| matches!(role, Role::Eval | Role::Prefill | Role::Decode);
    let mut most = 0;
    for (_, graph) in graphs.iter_mut().filter(|(role, _)| reads(*role)) {
        let (bound, count) = bound(graph, has_average, adapters);
        *graph = bound;
        most = most.max(count);
    }
    most
}

fn bound(g: &Graph, has_average: impl Fn(&str) -> bool, adapters: &[Adapter]) -> (Graph, usize) {
    let mut slots = g.slots.clone();
    let mut sources: HashMap<String, SlotId> = HashMap::new();
    for (id, slot) in g.slot_ids().zip(&mut slots) {
        if slot.class == Class::Weight && has_average(&slot.path) {
            sources.insert(copy_path(&slot.path), id);
            (slot.path, slot.class) = (average_path(&slot.path), Class::Average);
        }
    }
    let b = Builder::from_graph(Graph { slots, next_key: g.unused_key(), ..Graph::default() });
    let beside = |path: String| if has_average(&path) { average_path(&path) } else { path };
    let norms = norms(&b, g, adapters, beside);
    let mut replay = Replay::new(g);
    replay.new = b.finish();
    (cast_where_read(replay, &sources, &norms), sources.len())
}

/// 1 / ||W + s B A|| for every slot of `g` that holds any; `beside` maps the paths of an adapter's tensors to those to read.
fn norms(
    b: &Builder,
    g: &Graph,
    adapters: &[Adapter],
    beside: impl Fn(String) -> String,
) -> HashMap<SlotId, Value> {
    let mut norms: HashMap<SlotId, Value> = HashMap::new();
    for adapter in adapters.iter().filter(|adapter| adapter.dora) {
        let Some(slot) = g.find_slot(&adapter.inverse_norm()) else { continue };
        let norm = b.at_path(&adapter.weight, || {
            adapter_norms::of(b, adapter, [adapter.a(), adapter.b()].map(&beside))
        });
        norms.insert(slot, norm.v);
    }
    // Norms of weights that share a product lie side by side.
    let parts = norms.keys().filter_map(|slot| Some((g.slot(*slot).part?, *slot)));
    let mut wholes: BTreeMap<SlotId, Vec<(usize, SlotId)>> = BTreeMap::new();
    parts.for_each(|(part, slot)| wholes.entry(part.of).or_default().push((part.offset, slot)));
    for (whole, mut parts) in wholes {
        parts.sort();
        let parts: Vec<Tensor<'_>> = parts.iter().map(|(_, slot)| b.tensor(norms[slot])).collect();
        norms.insert(whole, b.at_path(&g.slot(whole).path, || b.concat(&parts, 0)).v);
    }
    norms
}
