//! Learning rates by group: a parameter moves only by the rate of its own group, whatever the type of its moments and the split
//! of the update.

use std::collections::BTreeMap;

use flatout_ir::Role;
use flatout_train::resolve::compile;
use flatout_train::run::checkpoint::{Entry, TensorFile};

use crate::small_run::{config, train_in};

/// One update without clipping, in which a parameter's new value depends only on its own gradient and rate.
const ONE: [&str; 6] = [
    "train.steps=1",
    "schedule.warmup_steps=0",
    "schedule.name=constant",
    "optimizer.clip=0",
    "train.freeze=**.ffn_norm",
    "lr=1e-3",
];
/// Groups that do not separate weights with a common input: those would no longer be one product, and round differently.
const GROUPS: &str = "train.groups=[{paths=['embed'],lr=1e-2},{paths=['**.wo'],lr=1e-4,weight_decay=0.5},{paths=['layers.1.ffn'],lr_scale=0.5}]";

/// The parameters after one update, by name.
fn trained(overrides: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("run");
    train_in(&dir, &config(&[&ONE, overrides].concat()), |_| {});
    let file = TensorFile::open(&dir.join("checkpoints/step-1/state.safetensors")).expect("a checkpoint");
    let weights = file.entries().iter().filter(|(name, _)| !name.starts_with("optimizer."));
    let read = |(name, entry): (&String, &Entry)| {
        let mut bytes = vec![0; entry.bytes()];
        file.read_into(name, &mut bytes).expect("a tensor");
        (name.clone(), bytes)
    };
    weights.map(read).collect()
}

#[test]
fn every_group_moves_by_its_own_rate() {
    let alone = |lr: &str, decay: &str| trained(&[&format!("lr={lr}"), &format!("weight_decay={decay}")]);
    let [base, table, heads, half] = [("1e-3", "0.1"), ("1e-2", "0.1"), ("1e-4", "0.5"), ("5e-4", "0.1")]
        .map(|(lr, decay)| alone(lr, decay));
    let states = ["optimizer.state=fp32", "optimizer.state=bf16", "optimizer.state=int8"];
    for state in states {
        for fused in ["fuse.optimizer=on", "fuse.optimizer=off"] {
            let together = trained(&[GROUPS, state, fused]);
            assert_eq!(together.keys().collect::<Vec<_>>(), base.keys().collect::<Vec<_>>());
            for (name, values) in &together {
                let is_of = |part: &str| name.contains(part);
                let wanted = match () {
                    _ if name.starts_with("embed") => &table,
                    _ if is_of(".wo") => &heads,
                    _ if is_of("layers.1.ffn.") => &half,
                    _ => &base,
                };
                assert!(values == &wanted[name], "{name} with {state} {fused}");
            }
        }
    }
    assert!(table["embed.weight"] != base["embed.weight"], "rates are not idle");
}

/// A separate rate costs as much as a separate factor: a region, and no launch to fetch the rate.
#[test]
fn rates_are_read_where_the_host_writes_them() {
    let launches = |groups: &str| {
        let compiled = compile::compile(&config(&[groups]), &compile::target()).expect("plans");
        let apply = compiled.plans.plans.iter().find(|plan| plan.role == Role::Apply).expect("a plan");
        apply.launches.len()
    };
    let scaled = "train.groups=[{paths=['embed'],lr_scale=10},{paths=['**.wo'],lr_scale=0.5}]";
    let rated = "train.groups=[{paths=['embed'],lr=1e-2},{paths=['**.wo'],lr=1e-4}]";
    assert_eq!(launches(rated), launches(scaled));
}
