//! Resolves a config for a target: its switches, and the update rule of each parameter.

use std::collections::{BTreeMap, BTreeSet};

use flatout_ir::passes::{base, fp8_base, layout};
use flatout_ir::{Adapter, Base, Codes, Graph, Moments, Rule, Shard, Target, Update, optimizers};

use crate::UserError;
use crate::config::Config;
use crate::refuse;
use crate::resolve::fp8_layers;
use crate::resolve::groups;
use crate::resolve::lanes;
use crate::resolve::recompute_layers;
use crate::resolve::tower;
use crate::switches::memory::SHARD;
use crate::switches::{self, Settled};
use crate::tasks::image_table;
use crate::weights::adapters;

/// Settles everything that depends on neither data nor plans.
pub fn settle(config: &Config, target: &Target, model: &Graph) -> Result<Settled, UserError> {
    let mut settled = switches::settle(&config.switches, &config.model, target)?;
    settled.decoded = image_table::extents(config).is_some();
    let options = &mut settled.options;
    options.adapters = adapters::of(config, model)?;
    (options.freeze, options.update) = trained(config, model, &options.adapters, options.update.moments)?;
    options.base = base_of(config.switches.memory.codes(), model, &options.freeze);
    options.fp8_layers = fp8_layers::named(config)?;
    options.recompute_layers = recompute_layers::given(config)?;
    options.lanes = lanes::lanes(config, target.ranks)?;
    options.mesh = target.mesh();
    let may_divide = layout::may_divide(model, options);
    // Gradients that no rank can shard are added once per update.
    let is_in_vain = match options.shard {
        Shard::Gradients => !may_divide,
        Shard::Parameters => !may_divide && !layout::may_divide_frozen(model, options),
        Shard::None | Shard::Optimizer => false,
    };
    if is_in_vain {
        options.shard = Shard::Optimizer;
    }
    if settled.choice(SHARD.name).is_some_and(|chosen| chosen.value != Shard::None.name()) && !may_divide {
        settled.options.shard = Shard::None;
        settled.choose(SHARD.name, Shard::None.name(), "nothing that is trained is large enough to share");
    }
    Ok(settled)
}

/// The storage of a model's frozen weights, or of those of a part of it.
pub fn base_of(codes: Option<Codes>, model: &Graph, freeze: &BTreeSet<String>) -> Base {
    let weights = || base::linear(model).intersection(freeze).cloned().collect();
    match codes {
        None => Base::Full,
        Some(Codes::Nf4) => Base::Nf4(weights()),
        Some(Codes::Fp8) => Base::Fp8(fp8_base::groups(model, &weights())),
    }
}

/// Refuses a quantised base in a training without frozen weights of layers.
pub fn check_base(config: &Config, settled: &Settled) -> Result<(), UserError> {
    if let Some(codes) = config.switches.memory.codes()
        && settled.options.base.weights().is_empty()
    {
        let base = switches::memory::Base::of(codes).name();
        refuse!(
            "`base={base}` is for weights of layers that nothing trains, and all of them are trained here: give \
             adapter.kind=lora or adapter.kind=dora, freeze layers with train.freeze, or leave it out"
        );
    }
    Ok(())
}

/// The frozen parameters, and the update of each parameter.
fn trained(
    config: &Config,
    model: &Graph,
    adapters: &[Adapter],
    moments: Moments,
) -> Result<(BTreeSet<String>, Update), UserError> {
    let beside = adapters::parameters(model, adapters);
    // Patterns of a config may name the tower although these plans do not contain it.
    let apart = tower::parameters_apart(config);
    let parameters = model.slots.iter().filter(|s| s.class.is_parameter()).chain(&beside).chain(&apart);
    let parameters: Vec<(&str, usize)> = parameters.map(|s| (s.path.as_str(), s.ty.rank())).collect();
    let trained_rules = groups::rules(config, &parameters)?;
    let by_path = || parameters.iter().map(|(path, _)| path.to_string()).zip(&trained_rules);
    let freeze = by_path().filter(|(_, rule)| rule.frozen).map(|(path, _)| path).collect();
    let of = |rule: &groups::Rule| Rule {
        rate: rule.rate,
        lr_scale: rule.lr_scale as f32,
        weight_decay: rule.weight_decay as f32,
    };
    let rules: BTreeMap<String, Rule> = by_path().map(|(path, rule)| (path, of(rule))).collect();
    let optimizer = &config.optimizer;
    let update = Update {
        name: optimizer.name.0,
        beta1: optimizer.betas[0] as f32,
        beta2: optimizer.betas[1] as f32,
        eps: optimizer.eps as f32,
        muon: optimizer.muon(),
        weight_decay: optimizer.weight_decay as f32,
        clip: optimizer.clip as f32,
        moments,
        average: (config.train.ema > 0.0).then_some(config.train.ema),
        rates: config.rates().len(),
        rules,
    };
    let is_trained = |(i, (path, axes)): (usize, &(&str, usize))| {
        !trained_rules[i].frozen && update.name.of(path, *axes) == update.name
    };
    if !parameters.iter().enumerate().any(is_trained) {
        refuse!(
            "`optimizer.name` is {}, which updates matrices of layers, and none of them is trained here: give \
             optimizer.name=adamw",
            optimizer.name
        );
    }
    if optimizers::of(update.name, &update).is_none() {
        let (name, moments) = (optimizer.name, moments.name());
        refuse!("`optimizer.name` is {name}, which keeps no state in {moments}: give optimizer.state=fp32");
    }
    Ok((freeze, update))
}

#[cfg(test)]
mod tests {
    use flatout_models::form::Form;

    use super::*;
    use crate::recipes::resolve;
    use crate::tasks::{self, capacities::Capacities};

    /// A run trains on codes with the scales of its training graph, and other programs read its weights later.
    #[test]
    fn weights_share_a_scale_alike_in_every_program() {
        let small = || vec!["small".to_string()];
        let whole = ["tiny", "preference-tiny", "vision-tiny", "bdh-cifar10"].map(|recipe| (recipe, vec![]));
        let seen = ["qwen3-vl-2b-vqa", "fvlm-135m-sft", "fvlm-135m-dpo", "text-classify"];
        for (recipe, with) in whole.into_iter().chain(seen.map(|recipe| (recipe, small()))) {
            let config = resolve(recipe, &with, &[]).expect(recipe);
            let model = &config.model;
            let least = model.build(model.least());
            let rows = Capacities::of_rows(&config, 2);
            let mut graphs = vec![tasks::graph(&config, &rows, true), tasks::graph(&config, &rows, false)];
            if model.as_decoder().is_some() && model.classes().is_none() {
                let vision = model.vision().map(|vision| vision.least());
                for seen in [None, vision] {
                    let form = Form::Cached { sequences: 2, tokens: 4, capacity: 8, read: 1, seen };
                    graphs.push(model.build(form));
                }
            }
            for (number, graph) in graphs.iter().enumerate() {
                // Where some of the weights are trained, the others share a scale alike too.
                for trained in ["none", "wq", "wk", "wv", "gate", "up"] {
                    let frozen = |graph: &Graph| {
                        let linear = base::linear(graph).into_iter();
                        linear.filter(|path| !path.ends_with(trained)).collect::<BTreeSet<_>>()
                    };
                    let all = fp8_base::groups(&least, &frozen(&least));
                    for group in fp8_base::groups(graph, &frozen(graph)) {
                        let one = group.first().expect("a weight");
                        let of = all.iter().find(|of| of.contains(one));
                        assert_eq!(of, Some(&group), "{recipe}, graph {number}, {trained} trained");
                    }
                }
            }
        }
    }
}
