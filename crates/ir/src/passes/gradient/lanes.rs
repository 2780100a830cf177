//! Lanes: a step's rows are dealt to lanes and summed lane by lane, and one balanced tree over all lanes adds their sums, so
//! that the bits of an update do not depend on the number of ranks.
//!
//! A rank computes the lanes of a subtree. Ranks that add their gradients in every micro-batch have the lanes of a subtree
//! together, and compute neighbouring lanes at the same time. A rank computes its lanes one after the other and adds their sums
//! like a binary counter: the sums of a finished lane are kept aside (`keep`), and sums that complete a pair are added to those
//! kept at their level (`fold`). Each level takes another copy of the sums.

use crate::builder::Builder;
use crate::graph::{Class, Graph, Init, Slot};
use crate::mesh::Axis;
use crate::passes::gradient::differentiate::{CARRIED_SUM, LOSS_SUM, WEIGHT_SUM};
use crate::passes::gradient::layout::is_gradient_region;
use crate::passes::gradient::shards::shard_path;
use crate::passes::options::Options;
use crate::plan::{Refusal, Role};

/// The slot that keeps the sums of a slot at a level.
pub fn lane_path(level: usize, slot: &str) -> String {
    format!("lane.{level}.{slot}")
}

/// Refuses lanes that cannot be divided among ranks as subtrees of one tree.
pub fn check(o: &Options) -> Result<(), Refusal> {
    let (lanes, ranks) = (o.lanes, o.mesh.ranks_of_rows());
    match lanes {
        0 => Err(Refusal("a run has one lane at least".into())),
        _ if lanes == 1 || lanes == ranks || (lanes.is_power_of_two() && lanes.is_multiple_of(ranks)) => {
            Ok(())
        }
        _ if lanes.is_power_of_two() => Err(Refusal(format!(
            "{lanes} lanes do not divide among {ranks} ranks: take as many lanes as ranks, or ranks that divide the lanes"
        ))),
        _ => Err(Refusal(format!(
            "{lanes} lanes on {ranks} ranks: where a rank has several lanes, their number is a power of two"
        ))),
    }
}

/// Number of lanes that a rank computes. Without separate lanes, a rank's rows are one lane.
pub fn lanes_a_rank(o: &Options) -> usize {
    (o.lanes / o.mesh.ranks_of_rows()).max(1)
}

/// Number of ranks that add their gradients in every micro-batch. They compute neighbouring lanes at a time, so the sum is that
/// of a subtree.
pub fn ranks_in_step(o: &Options) -> usize {
    if o.shards_gradients() { o.mesh.ways(Axis::Shard) } else { 1 }
}

/// Whether those ranks add all their sums in every micro-batch, including unsharded ones, because the lanes of one rank are not
/// a subtree.
pub(super) fn sum_in_step(o: &Options) -> bool {
    o.shards_gradients() && lanes_a_rank(o) > 1
}

/// The lanes of a rank, in the order in which it computes them. Row i of a step belongs to lane i modulo the total number of
/// lanes.
pub fn lanes_of(rank: usize, o: &Options) -> Vec<usize> {
    let (each, together) = (lanes_a_rank(o), ranks_in_step(o));
    let first = rank / together * together * each + rank % together;
    (0..each).map(|lane| first + lane * together).collect()
}

/// The plans to run, in order, once the gradients of lane `lane` of a rank's `each` lanes are summed. After the last lane the
/// sums are those of all lanes of the rank, and `apply` follows.
pub fn roles_after(lane: usize, each: usize) -> Vec<Role> {
    let pairs = lane.trailing_ones() as usize;
    let folds = (0..pairs).map(Role::Fold);
    folds.chain((lane + 1 < each).then_some(Role::Keep(pairs))).collect()
}

/// The graphs of `keep` and `fold`, for the sums that `apply` reads; none where a rank has one lane.
pub fn lanes(apply: &Graph, o: &Options) -> Vec<(Role, Graph)> {
    let is_sum = |slot: &&Slot| {
        let is_small = slot.path == LOSS_SUM || slot.path == WEIGHT_SUM || slot.path.starts_with(CARRIED_SUM);
        // Of sharded sums a rank keeps only its share.
        let is_divided = || apply.find_slot(&shard_path(&slot.path)).is_some();
        slot.class == Class::Carry && (is_small || (is_gradient_region(&slot.path) && !is_divided()))
    };
    let sums: Vec<&Slot> = apply.slots.iter().filter(is_sum).collect();
    let levels = lanes_a_rank(o).ilog2() as usize;
    let roles = (0..levels).flat_map(|level| [Role::Keep(level), Role::Fold(level)]);
    roles.map(|role| (role, graph(&sums, role))).collect()
}

fn graph(sums: &[&Slot], role: Role) -> Graph {
    let (Role::Keep(level) | Role::Fold(level)) = role else { unreachable!("asked for lanes") };
    let b = Builder::new();
    b.scope(&role.name(), || {
        for sum in sums {
            let kept =
                Slot { path: lane_path(level, &sum.path), init: Init::Zeros, part: None, ..(*sum).clone() };
            let [own, kept] = [(*sum).clone(), kept].map(|slot| b.edit(|g| g.add_slot(slot)));
            if role == Role::Fold(level) {
                b.write(own, b.read(kept) + b.read(own));
            } else {
                b.write(kept, b.read(own));
                b.write(own, b.fill(0.0, sum.ty.dtype, &sum.ty.dims));
            }
        }
    });
    b.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Mesh;
    use crate::ops::collective::tree;
    use crate::passes::options::Shard;

    /// The sums, written as an expression, as the plans of a rank add them.
    fn counted(lanes: usize) -> String {
        let mut kept: Vec<String> = vec![String::new(); 8];
        let mut sums = String::new();
        for lane in 0..lanes {
            sums = lane.to_string();
            for role in roles_after(lane, lanes) {
                match role {
                    Role::Keep(level) => kept[level] = std::mem::take(&mut sums),
                    Role::Fold(level) => sums = format!("({}+{sums})", std::mem::take(&mut kept[level])),
                    _ => unreachable!("no other plan"),
                }
            }
        }
        assert!(kept.iter().all(String::is_empty), "nothing stays behind: {kept:?}");
        sums
    }

    #[test]
    fn counting_lanes_is_the_balanced_tree() {
        for lanes in [1, 2, 4, 8, 16] {
            let mut sums: Vec<String> = (0..lanes).map(|i| i.to_string()).collect();
            tree(lanes, |onto, term| sums[onto] = format!("({}+{})", sums[onto], sums[term]));
            assert_eq!(counted(lanes), sums[0]);
        }
    }

    #[test]
    fn indivisible_lanes_are_refused() {
        let options =
            |lanes: usize, ranks: usize| Options { lanes, mesh: Mesh::new(1, ranks), ..Options::default() };
        for (lanes, ranks) in [(1, 1), (8, 1), (8, 4), (8, 8), (3, 3), (1, 5)] {
            assert_eq!(check(&options(lanes, ranks)), Ok(()), "{lanes} on {ranks}");
        }
        for (lanes, ranks) in [(0, 1), (8, 3), (6, 3), (6, 1), (4, 8)] {
            assert!(check(&options(lanes, ranks)).is_err(), "{lanes} on {ranks}");
        }
        assert_eq!(lanes_of(1, &options(8, 4)), [2, 3]);
        assert_eq!(lanes_of(2, &options(3, 3)), [2]);
    }

    /// Ranks that sum in every micro-batch: each exchange sums neighbouring lanes, and counting those gives the same tree.
    #[test]
    fn lanes_of_ranks_that_sum_every_batch_are_the_same_tree() {
        for (replicas, shards, lanes) in [(1, 2, 8), (1, 4, 8), (2, 2, 16), (1, 8, 8), (4, 2, 8)] {
            let o = Options {
                lanes,
                mesh: Mesh::new(replicas, shards),
                shard: Shard::Gradients,
                ..Options::default()
            };
            let summed = |mut terms: Vec<String>| {
                tree(terms.len(), |onto, term| terms[onto] = format!("({}+{})", terms[onto], terms[term]));
                terms.swap_remove(0)
            };
            let of_group = |group: usize| {
                let ranks: Vec<Vec<usize>> =
                    (0..shards).map(|rank| lanes_of(group * shards + rank, &o)).collect();
                let each = lanes_a_rank(&o);
                let at_once = |turn: usize| summed(ranks.iter().map(|own| own[turn].to_string()).collect());
                summed((0..each).map(at_once).collect())
            };
            let all = summed((0..replicas).map(of_group).collect());
            assert_eq!(all, summed((0..lanes).map(|lane| lane.to_string()).collect()), "{}", o.mesh);
        }
    }
}
