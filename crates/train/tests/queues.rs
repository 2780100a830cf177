//! Every recipe on several ranks: exchanges that run immediately and at the last moment give the same state, to the bit.

use std::collections::BTreeSet;

use flatout_ir::interpreter::Interpreter;
use flatout_ir::verify::queues;
use flatout_ir::{Plan, PlanSet, Role, Shard, Target};
use flatout_train::device::links;
use flatout_train::ranks::target_among;
use flatout_train::resolve::compile::{Compiled, compile};

use crate::small_recipe::{different, small, target};

/// A recipe with all kinds of exchanges in its plans, on GPUs with known links, so that the number of buckets is chosen.
fn compiled(recipe: &str, ranks: usize, shard: Shard, overlap: &str) -> Compiled {
    let words = [
        "train.batch=8".to_string(),
        "train.micro_batch=1".into(),
        "train.ema=0.9".into(),
        format!("switches.shard={}", shard.name()),
        format!("switches.overlap={overlap}"),
    ];
    let config = small(recipe, 2).with(&words).expect("a setting");
    let linked = Target { links: links::of_nodes("h200", ranks), ..target("h200", &config) };
    compile(&config, &target_among(ranks, linked)).unwrap_or_else(|why| panic!("{recipe}: {why}"))
}

/// The roles whose plans may exchange, in the order of an update.
const ROLES: [Role; 5] = [Role::Derive, Role::GRAD, Role::Apply, Role::Average, Role::Eval];

/// The state of all ranks after weights are copied, gradients are computed where ranks add them, an update, and averages are
/// gathered. Every slot begins with random values.
fn state(plans: &PlanSet, mut run: Interpreter) -> Vec<Vec<f64>> {
    let ranks = plans.mesh.ranks();
    for (number, slot) in plans.slots.iter().enumerate().filter(|(_, slot)| !slot.is_whole) {
        for rank in 0..ranks {
            let drawn = |i: usize| (i * 31 + number * 7 + rank * 3) % 61 + 1;
            let value = |i: usize| if slot.ty.dtype.is_float() { drawn(i) as f64 / 512.0 } else { 0.0 };
            run.set_at(rank, &slot.path, &(0..slot.ty.elements()).map(value).collect::<Vec<_>>());
        }
    }
    for role in ROLES {
        if plans.plan(role).is_some_and(Plan::has_exchanges) {
            run.run(role);
        }
    }
    let roots = plans.slots.iter();
    roots.flat_map(|slot| (0..ranks).map(|rank| run.get_at(rank, &slot.path)).collect::<Vec<_>>()).collect()
}

/// Elements of all ranks' state that the oracle processes quickly.
const MOST_ELEMENTS: usize = 1 << 21;

/// Uses as many ranks for each recipe as the oracle has time for.
#[test]
fn late_exchanges_change_nothing_in_any_recipe() {
    let (mut beside, mut seen) = (0, BTreeSet::new());
    for recipe in different() {
        let slots = compiled(recipe, 2, Shard::None, "on").plans.slots;
        let elements: usize = slots.iter().filter(|slot| !slot.is_whole).map(|slot| slot.ty.elements()).sum();
        let Some(of_recipe) = [8, 4, 2].into_iter().find(|ranks| ranks * elements <= MOST_ELEMENTS) else {
            continue;
        };
        seen.insert(of_recipe);
        for shard in Shard::ALL.iter().copied() {
            let plans = compiled(recipe, of_recipe, shard, "on").plans;
            let what = format!("{recipe} on {of_recipe} ranks with shard={}", shard.name());
            let eager = state(&plans, Interpreter::new(plans.clone()));
            // NaN does not equal itself, so bits are compared.
            let bits = |state: Vec<Vec<f64>>| -> Vec<Vec<u64>> {
                state.into_iter().map(|slot| slot.into_iter().map(f64::to_bits).collect()).collect()
            };
            assert_eq!(bits(state(&plans, Interpreter::late(plans.clone()))), bits(eager), "{what}");
            let run = ROLES.iter().filter_map(|role| plans.plan(*role));
            beside += run.map(|plan| plan.launches_beside_exchanges()).sum::<usize>();
        }
    }
    println!("{beside} launches beside exchanges, on {seen:?} ranks");
    assert!(beside > 20 && seen.len() > 1, "{beside} launches, on {seen:?} ranks");
}

#[test]
fn queues_are_sound_in_every_recipe() {
    for (recipe, ranks) in different().into_iter().flat_map(|recipe| [2, 4, 8].map(|ranks| (recipe, ranks))) {
        let overlaps = if ranks == 2 { &["on", "off"][..] } else { &["on"] };
        for (shard, overlap) in
            Shard::ALL.iter().flat_map(|shard| overlaps.iter().map(move |overlap| (*shard, *overlap)))
        {
            let plans = compiled(recipe, ranks, shard, overlap).plans;
            for plan in &plans.plans {
                let sound = queues(plan);
                assert_eq!(sound, Ok(()), "{recipe}, {ranks} ranks, shard={}, {}", shard.name(), plan.role);
                assert!(overlap == "on" || plan.launches_beside_exchanges() == 0, "{recipe}: {}", plan.role);
            }
        }
    }
}
