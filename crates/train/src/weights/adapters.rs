//! Selects the weights of a model that have adapters, by the patterns of section `adapter`, and merges adapters into weights.

use flatout_ir::passes::adapter::{is_end, slot_beside};
use flatout_ir::passes::adapters::adaptable;
use flatout_ir::{Adapter, Graph, Slot};
use flatout_models::config::{Head, Model};
use rayon::prelude::*;

use crate::UserError;
use crate::config::pattern::matches;
use crate::config::{AdapterGroup, AdapterKind, Config, nearest};
use crate::refuse;
use crate::weights::peft;

/// The adapters that a config asks for, in the order of the model's weights. Of several groups with one name that match a weight
/// the last one wins; groups with different names each add an adapter.
pub fn of(config: &Config, model: &Graph) -> Result<Vec<Adapter>, UserError> {
    let asked = &config.adapter;
    if asked.kind == AdapterKind::None {
        return Ok(vec![]);
    }
    let weights = adaptable(model);
    let groups = asked.all();
    for pattern in groups.iter().flat_map(|group| &group.paths) {
        check_pattern(pattern, config, model, &weights)?;
    }
    let mut names: Vec<&str> = vec![];
    for group in &groups {
        if !names.contains(&group.name.as_str()) {
            names.push(&group.name);
        }
    }
    let mut adapters: Vec<Adapter> = vec![];
    for (weight, _) in weights {
        let is_meant =
            |group: &&AdapterGroup| group.paths.iter().any(|pattern| names_weight(pattern, weight));
        let first = adapters.len();
        for name in &names {
            let Some(group) = groups.iter().rfind(|g| g.name == *name && is_meant(g)) else { continue };
            let rank = group.rank.unwrap_or(asked.rank);
            adapters.push(Adapter {
                name: name.to_string(),
                weight: weight.to_string(),
                rank,
                scale: group.alpha.or(asked.alpha).unwrap_or(2.0 * rank as f64) / rank as f64,
                dropout: group.dropout.unwrap_or(asked.dropout) as f32,
                dora: asked.kind == AdapterKind::Dora,
            });
        }
        if let [one, other, ..] = &adapters[first..]
            && one.dora
        {
            refuse!(
                "`adapter.groups` gives {weight} the adapters {} and {}: with adapter.kind=dora a weight has one",
                one.name,
                other.name
            );
        }
        if adapters.len() == first {
            continue;
        }
        if asked.kind == AdapterKind::Dora && is_end(weight) {
            refuse!(
                "`adapter.paths` names {weight}, and `adapter.kind` is dora: the embedding and the head can only have LoRA \
                 adapters: give adapter.kind=lora, or leave it out"
            );
        }
        let slot = &slot_beside(model, weight).expect("a weight of the model").path;
        if let Some(pattern) = asked.also_train.iter().find(|pattern| matches(pattern, slot)) {
            let which = if slot == weight { "it" } else { weight };
            refuse!(
                "`adapter.also_train` has `{pattern}`, which matches {slot}: {which} has an adapter, and is frozen beside it"
            );
        }
    }
    Ok(adapters)
}

/// Whether a pattern selects a weight. The embedding and the head must be named explicitly: a wildcard matches only weights in
/// layers.
fn names_weight(pattern: &str, weight: &str) -> bool {
    let first = |path: &str| path.split('.').next().map(String::from);
    matches(pattern, weight) && (!is_end(weight) || first(pattern) == first(weight))
}

/// Refuses to merge adapters of the embedding or the head if these are one tied table: after merging they would differ.
pub fn check_merge(model: &Model, adapters: &[Adapter], instead: &str) -> Result<(), UserError> {
    let is_tied = model.as_decoder().is_some_and(|decoder| decoder.tied && decoder.head == Head::Tokens);
    match adapters.iter().find(|adapter| is_tied && is_end(&adapter.weight)) {
        Some(Adapter { weight, .. }) => refuse!(
            "`{weight}` has an adapter, and the embedding is also the head of this model: merged, the two would differ; \
             {instead}"
        ),
        None => Ok(()),
    }
}

/// Whether a parameter of the model is trained along with adapters: those that `adapter.also_train` names, and a class head,
/// which is new.
pub fn also_trains(config: &Config, path: &str) -> bool {
    let is_named = config.adapter.also_train.iter().any(|pattern| matches(pattern, path));
    is_named || config.model.class_head().is_some_and(|head| matches(head, path))
}

/// Every tensor of a model's adapters.
pub fn parameters(model: &Graph, adapters: &[Adapter]) -> Vec<Slot> {
    let weights = adaptable(model);
    let of = |adapter: &Adapter| {
        let weight = weights.iter().find(|(path, _)| *path == adapter.weight);
        adapter.parameters(weight.expect("adapters are of the model's weights").1)
    };
    adapters.iter().flat_map(of).collect()
}

/// Merges an adapter into a weight: (m / ||W + s B A|| by rows) (W + s B A), or W + s B A without a magnitude m.
pub fn merge(weight: &mut [f32], adapter: &Adapter, a: &[f32], b: &[f32], magnitude: Option<&[f32]>) {
    let (rank, inner) = (adapter.rank, a.len() / adapter.rank);
    weight.par_chunks_mut(inner).enumerate().for_each(|(row, weight)| {
        let mut sum: Vec<f64> = weight.iter().map(|w| *w as f64).collect();
        for (b, a) in b[row * rank..(row + 1) * rank].iter().zip(a.chunks(inner)) {
            let factor = adapter.scale * *b as f64;
            sum.iter_mut().zip(a).for_each(|(sum, a)| *sum += factor * *a as f64);
        }
        let norm = || sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        let length = magnitude.map_or(1.0, |m| m[row] as f64 / norm());
        weight.iter_mut().zip(&sum).for_each(|(w, x)| *w = (length * x) as f32);
    });
}

/// Refuses a pattern that matches no weight, because it would otherwise be ignored silently.
fn check_pattern(
    pattern: &str,
    config: &Config,
    model: &Graph,
    weights: &[(&str, [usize; 2])],
) -> Result<(), UserError> {
    if weights.iter().any(|(path, _)| names_weight(pattern, path)) {
        return Ok(());
    }
    let mut others = model.slots.iter().filter(|s| s.class.is_parameter());
    if let Some(other) = others.find(|s| matches(pattern, &s.path)) {
        refuse!(
            "`adapter.paths` has `{pattern}`, which matches `{}`: linear weights of layers have adapters, and `embed` and \
             `head` by their names; train it with adapter.also_train",
            other.path
        );
    }
    let name = |path: &str| path.rsplit('.').next().unwrap_or(path).to_string();
    let decoder = config.model.as_decoder();
    let theirs = decoder.and_then(|decoder| peft::modules(decoder).ok()).unwrap_or_default();
    if let Some(module) = theirs.iter().find(|module| name(&module.name) == name(pattern)) {
        let pattern_of = |weight: &str| match weight.split_once('.') {
            Some((end, _)) if is_end(weight) => format!("`{end}`"),
            _ => format!("`**.{}`", name(weight)),
        };
        let ours: Vec<String> = module.parts.iter().map(|part| pattern_of(&part.weight)).collect();
        refuse!(
            "`adapter.paths` has `{pattern}`, which matches no weight; here that is {}",
            ours.join(" and ")
        );
    }
    let names: Vec<&str> = weights.iter().map(|(path, _)| *path).filter(|path| !is_end(path)).collect();
    match (nearest(pattern, names.iter().copied()), names.first()) {
        (Some(near), _) => {
            refuse!("`adapter.paths` has `{pattern}`, which matches no weight; did you mean `{near}`?")
        }
        (None, Some(first)) => {
            refuse!("`adapter.paths` has `{pattern}`, which matches no weight; there is `{first}` and so on")
        }
        (None, None) => {
            refuse!("`adapter.paths` has `{pattern}`, and the model has no linear weight in a layer")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes::resolve;

    fn adapters(overrides: &[&str]) -> Result<Vec<Adapter>, UserError> {
        let overrides: Vec<String> =
            ["model.layers=2", "adapter.kind=lora"].iter().chain(overrides).map(|s| s.to_string()).collect();
        let config = resolve("tiny", &[], &overrides)?;
        of(&config, &config.model.build(config.model.least()))
    }

    #[test]
    fn patterns_ranks_and_names_decide() {
        let all = adapters(&[]).unwrap();
        assert_eq!(all.len(), 14, "seven linear weights a layer");
        assert!(all.iter().all(|a| a.rank == 16 && a.scale == 2.0 && a.name == "default" && !a.dora));
        let some = adapters(&[
            "adapter.paths=['**.wq','**.wv']",
            "adapter.rank=4",
            "adapter.alpha=8",
            "adapter.groups=[{paths=['layers.1.attn.wv'],rank=2},{name='style',paths=['**.wq'],rank=8,dropout=0.5}]",
        ])
        .unwrap();
        let shown: Vec<String> = some
            .iter()
            .map(|a| format!("{} {} {} {} {}", a.weight, a.name, a.rank, a.scale, a.dropout))
            .collect();
        assert_eq!(
            shown,
            [
                "layers.0.attn.wq default 4 2 0",
                "layers.0.attn.wq style 8 1 0.5",
                "layers.0.attn.wv default 4 2 0",
                "layers.1.attn.wq default 4 2 0",
                "layers.1.attn.wq style 8 1 0.5",
                "layers.1.attn.wv default 2 4 0",
            ]
        );
    }

    /// In `tiny` embedding and head are one tied table, and each of the two is selected by its own name.
    #[test]
    fn the_embedding_and_the_head_are_asked_for_by_name() {
        let weights = |paths: &str| -> Vec<String> {
            let all = adapters(&[&format!("adapter.paths={paths}")]).unwrap();
            all.into_iter().map(|adapter| adapter.weight).collect()
        };
        assert_eq!(weights("['embed']"), ["embed.weight"]);
        assert_eq!(weights("['head','embed.weight']"), ["embed.weight", "head.weight"]);
        assert_eq!(weights("['**']").len(), 14, "a star stands for layers");
        assert_eq!(weights("['layers','head']").len(), 15);
    }

    #[test]
    fn unsupported_adapters_are_refused() {
        let sentence = |overrides: &[&str]| adapters(overrides).unwrap_err().0;
        let typo = sentence(&["adapter.paths=layers.0.attn.qw"]);
        assert!(
            typo.contains("`layers.0.attn.qw`, which matches no weight; did you mean `layers.0.attn.wq`?"),
            "{typo}"
        );
        let habit = sentence(&["adapter.paths=q_proj"]);
        assert!(habit.contains("`q_proj`, which matches no weight; here that is `**.wq`"), "{habit}");
        let nothing = sentence(&["adapter.paths=vision"]);
        assert!(nothing.contains("there is `layers.0.attn.wq` and so on"), "{nothing}");
        let norm = sentence(&["adapter.paths=norm"]);
        assert!(
            norm.contains("matches `norm`: linear weights of layers have adapters, and `embed`"),
            "{norm}"
        );
        let habit = sentence(&["adapter.paths=lm_head"]);
        assert!(habit.contains("`lm_head`, which matches no weight; here that is `head`"), "{habit}");
        let dora = sentence(&["adapter.kind=dora", "adapter.paths=['layers','embed']"]);
        assert!(dora.contains("names embed.weight, and `adapter.kind` is dora"), "{dora}");
        let table = sentence(&["adapter.paths=head", "adapter.also_train=embed"]);
        assert!(table.contains("head.weight has an adapter, and is frozen beside it"), "{table}");
        let trained = sentence(&["adapter.also_train=layers.0"]);
        assert!(trained.contains("it has an adapter, and is frozen beside it"), "{trained}");
        let two = sentence(&["adapter.kind=dora", "adapter.groups=[{name='b',paths=['**.wq']}]"]);
        assert!(two.contains("with adapter.kind=dora a weight has one"), "{two}");
    }
}
