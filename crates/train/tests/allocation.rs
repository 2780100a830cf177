//! Plans equal allocations, to the byte: recipes with values of every switch, on the CPU with sessions that are opened, for named
//! GPUs by the arithmetic of their plans.

use flatout_ir::plan::Buffer;
use flatout_ir::{PlanSet, Target};
use flatout_measure::forecast::{layers, timeline};
use flatout_train::Config;
use flatout_train::config::AdapterKind;
use flatout_train::device::Device;
use flatout_train::resolve::compile::{Compiled, compile};
use flatout_train::switches::TABLE;

use crate::small_recipe::{different, small, target};

/// Calls `each` with the settings of the matrix that compile: their description, config and plans. Each recipe is compiled with
/// every other value of all switches, the next recipe with the values in between.
fn settings(places: &[&str], mut each: impl FnMut(&str, &Config, &Compiled)) -> usize {
    let mut count = 0;
    for (turn, recipe) in different().into_iter().enumerate() {
        let base = small(recipe, 3);
        for place in places {
            // The default once, and every other value.
            let others = TABLE.iter().filter(|switch| switch.name != "backend").flat_map(|switch| {
                let other = |value: &&&str| Some(**value) != switch.default();
                switch
                    .values()
                    .iter()
                    .filter(other)
                    .map(move |value| format!("switches.{}={value}", switch.name))
            });
            let of_texts = ["data.document_mask=true", "model.tied=false", "train.freeze=[embed.*]"];
            let combined = ["train.seed=0", "eval.rows=0"].into_iter();
            let combined = combined.chain(of_texts.into_iter().filter(|_| base.model.as_decoder().is_some()));
            let all = others.chain(combined.map(String::from));
            for setting in all.skip(turn % 2).step_by(2) {
                let config = base.with(std::slice::from_ref(&setting)).expect("a setting");
                // A config that cannot run is refused before any memory is allocated: tests/switches.rs.
                let Ok(compiled) = compile(&config, &target(place, &config)) else { continue };
                each(&format!("{recipe} on {place} with {setting}"), &config, &compiled);
                count += 1;
            }
        }
    }
    count
}

#[test]
fn a_session_takes_the_bytes_of_its_plan() {
    let device = Device::cpu();
    let count = settings(&["cpu"], |what, _, compiled| {
        let session = device.session(compiled.plans.clone(), &compiled.settled).expect("a session");
        assert_eq!(session.arena_bytes(), compiled.plans.arena_bytes, "{what}");
        adds_up(what, &compiled.plans);
    });
    println!("{count} settings opened");
    assert!(count > 110, "{count}");
}

#[test]
fn a_gpu_needs_the_bytes_of_its_plan_and_not_one_less() {
    let count = settings(&["h200"], |what, config, compiled| {
        adds_up(what, &compiled.plans);
        let needed = compiled.plans.arena_bytes as u64 + compiled.target.bytes_beside();
        let of = |memory_bytes: u64| {
            let mut settings = vec!["switches.recompute=none".to_string()];
            // With adapters, a base in four bits would be chosen instead.
            settings.extend((config.adapter.kind != AdapterKind::None).then(|| "base=bf16".to_string()));
            // A table of images is only kept where there is much more memory.
            let table = compiled.settled.chosen.iter().find(|c| c.switch == "image_table");
            settings.extend(table.map(|chosen| format!("image_table={}", chosen.value)));
            let config = config.with(&settings).expect("a setting");
            let target = Target { memory_bytes, ..compiled.target.clone() };
            compile(&config, &target)
        };
        // Where everything is kept, nothing can be recomputed to save memory.
        if compiled.settled.options.recompute == flatout_ir::Recompute::None {
            assert_eq!(of(needed).expect("enough").plans.arena_bytes, compiled.plans.arena_bytes, "{what}");
            let refused = of(needed - 1).err().map(|failure| failure.to_string()).unwrap_or_default();
            assert!(refused.starts_with("the plan needs"), "{what}: {refused}");
        }
    });
    println!("{count} settings planned");
    assert!(count > 140, "{count}");
}

/// The report's categories, layers and curve over the step account for the same bytes, and no two buffers with overlapping
/// lifetimes share a byte.
fn adds_up(what: &str, plans: &PlanSet) {
    let arena = plans.arena_bytes;
    assert_eq!(plans.categories().values().sum::<usize>(), arena, "{what}: categories");
    let layers = layers::layers(plans);
    assert_eq!(layers.iter().map(|l| l.count * l.each.total()).sum::<usize>(), arena, "{what}: layers");
    assert_eq!(arena, plans.persistent_bytes + plans.transient_bytes, "{what}");
    let end = plans.buffers.iter().map(|b| b.offset + b.bytes).max();
    assert_eq!(end, Some(arena), "{what}: the last buffer ends where the arena does");
    let peak = timeline::describe(plans);
    let alive: usize = peak.alive.iter().map(|a| a.bytes).sum();
    assert_eq!(peak.bytes, plans.persistent_bytes + alive, "{what}: the peak is what is alive");
    assert!(peak.bytes <= arena, "{what}");
    for plan in 0..plans.plans.len() {
        let mut placed: Vec<&Buffer> = plans.transients(plan).collect();
        placed.sort_by_key(|b| b.offset);
        for (i, a) in placed.iter().enumerate() {
            let live = |b: &Buffer| b.live.clone().expect("a transient").1;
            let neighbours = placed[i + 1..].iter().take_while(|b| b.offset < a.offset + a.bytes);
            for b in neighbours {
                let (x, y) = (live(a), live(b));
                assert!(x.end <= y.start || y.end <= x.start, "{what}: {} and {} overlap", a.name, b.name);
            }
        }
    }
}
