//! Resolves which parameters are trained, and how: path patterns from the config, applied to a model's parameter paths.
//!
//! A path is a sequence of names separated by dots, as `layers.3.attn.wq`. A pattern may use `*` for any characters within a name
//! and `**` for any number of names. It matches the path and everything below it, so `layers.0` names a whole block.

use flatout_ir::Graph;
use flatout_ir::optimizers::Name;
use flatout_ir::passes::adapter::SCOPE;

use crate::UserError;
use crate::config::pattern::matches;
use crate::config::{AdapterKind, Config, Word};
use crate::refuse;
use crate::weights::adapters::also_trains;
use crate::weights::pretrained::parameters;

/// How one parameter is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Frozen parameters have no gradient and no optimiser state.
    pub frozen: bool,
    /// Index of its learning rate in `Config::rates`.
    pub rate: usize,
    /// Factor on the learning rate.
    pub lr_scale: f64,
    pub weight_decay: f64,
}

/// The rule for every parameter, given as path and number of axes. Matrices decay and vectors do not, unless a group says
/// otherwise. Of several groups that match, the last one wins; for the learning rate, the last one that sets a rate. A pattern
/// that matches nothing is an error, because it would otherwise be ignored silently. With adapters, only these and the parameters
/// that `adapter.also_train` names are trained.
pub fn rules(config: &Config, parameters: &[(&str, usize)]) -> Result<Vec<Rule>, UserError> {
    let frozen = config.train.freeze.iter().map(|pattern| ("train.freeze", pattern));
    let grouped = config.train.groups.0.iter().flat_map(|group| &group.paths);
    for pattern in &config.train.freeze {
        if let Some((adapter, _)) =
            parameters.iter().find(|(p, _)| p.starts_with(SCOPE) && matches(pattern, p))
        {
            refuse!(
                "`train.freeze` has `{pattern}`, which matches `{adapter}`: an adapter is there to be trained"
            );
        }
    }
    let kept = config.adapter.also_train.iter().map(|pattern| ("adapter.also_train", pattern));
    for (key, pattern) in frozen.chain(kept).chain(grouped.map(|pattern| ("train.groups", pattern))) {
        if !parameters.iter().any(|(path, _)| matches(pattern, path)) {
            refuse!(
                "`{key}` has `{pattern}`, which matches no parameter; there is `{}` and so on",
                parameters.first().map_or("none", |(path, _)| *path)
            );
        }
    }
    let rules: Vec<Rule> = parameters.iter().map(|(path, axes)| rule(config, path, *axes)).collect();
    if rules.iter().all(|rule| rule.frozen) {
        refuse!("`train.freeze` freezes every parameter, which leaves nothing to train");
    }
    Ok(rules)
}

/// The config for plans that use a part of the model and train nothing, such as text without its tower: patterns that name
/// parameters of other parts are left out.
pub fn of_part(config: &Config, part: &Graph) -> Config {
    let is_there = |pattern: &String| {
        let mut parameters = part.slots.iter().filter(|slot| slot.class.is_parameter());
        parameters.any(|slot| matches(pattern, &slot.path))
    };
    let mut config = config.clone();
    config.train.freeze.retain(is_there);
    retain_groups(&mut config, is_there);
    // The part may have no matrices of the kind that another optimiser requires.
    config.optimizer.name = Word(Name::AdamW);
    config
}

/// Drops patterns of groups that match no parameter of the model. Embedded recipes have patterns for several models; a pattern
/// that a user writes is kept, and is refused if it matches nothing.
pub fn leave_out_absent(config: &mut Config) {
    let parameters = parameters(&config.model);
    retain_groups(config, |pattern| parameters.keys().any(|path| matches(pattern, path)));
}

/// Keeps the selected patterns, and the groups that still have one.
fn retain_groups(config: &mut Config, is_kept: impl Fn(&String) -> bool) {
    for group in &mut config.train.groups.0 {
        group.paths.retain(&is_kept);
    }
    config.train.groups.0.retain(|group| !group.paths.is_empty());
}

fn rule(config: &Config, path: &str, axes: usize) -> Rule {
    let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, path));
    let is_left_out =
        config.adapter.kind != AdapterKind::None && !path.starts_with(SCOPE) && !also_trains(config, path);
    let optimizer = config.optimizer.name.0;
    let mut rule = Rule {
        frozen: is_left_out || any(&config.train.freeze),
        rate: if optimizer.of(path, axes) == optimizer { 0 } else { config.rates().len() - 1 },
        lr_scale: 1.0,
        weight_decay: if axes >= 2 { config.optimizer.weight_decay } else { 0.0 },
    };
    let mut rates = 0;
    for group in &config.train.groups.0 {
        rates += usize::from(group.has_rate());
        if !any(&group.paths) {
            continue;
        }
        if group.has_rate() {
            rule.rate = rates;
        }
        rule.lr_scale = group.lr_scale;
        rule.weight_decay = group.weight_decay.unwrap_or(rule.weight_decay);
    }
    rule
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes::resolve;

    fn config(overrides: &[&str]) -> Config {
        let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
        resolve("tiny", &[], &overrides).unwrap()
    }

    const PARAMETERS: &[(&str, usize)] =
        &[("embed", 2), ("layers.0.norm", 1), ("layers.0.q", 2), ("layers.1.q", 2)];

    #[test]
    fn matrices_decay_vectors_do_not_and_later_groups_win() {
        let config = config(&[
            "weight_decay=0.1",
            "freeze=layers.1",
            "groups=[{paths=['layers'],lr_scale=0.5},{paths=['**.q'],lr_scale=0.25,weight_decay=0.0}]",
        ]);
        let rules = rules(&config, PARAMETERS).unwrap();
        assert_eq!(rules[0], Rule { frozen: false, rate: 0, lr_scale: 1.0, weight_decay: 0.1 });
        assert_eq!(rules[1], Rule { frozen: false, rate: 0, lr_scale: 0.5, weight_decay: 0.0 });
        assert_eq!(rules[2], Rule { frozen: false, rate: 0, lr_scale: 0.25, weight_decay: 0.0 });
        assert!(rules[3].frozen);
    }

    #[test]
    fn the_later_rate_wins_and_groups_without_one_leave_it() {
        let groups = "groups=[{paths=['layers'],lr=1e-3},{paths=['embed'],lr_scale=0.5},{paths=['**.q'],final_lr=0.0},\
                      {paths=['**'],weight_decay=0.5}]";
        let config = config(&[groups]);
        assert_eq!(config.rates().len(), 3);
        let rates: Vec<usize> = rules(&config, PARAMETERS).unwrap().iter().map(|rule| rule.rate).collect();
        assert_eq!(rates, [0, 1, 2, 2]);
    }

    #[test]
    fn what_muon_leaves_to_adamw_has_its_rate_unless_a_group_gives_one() {
        let config =
            config(&["optimizer.name=muon", "adamw_lr=1e-3", "groups=[{paths=['layers.1'],lr=2e-3}]"]);
        let beside =
            [("layers.1.norm", 1), ("adapter.own.layers.0.q.a", 2), ("layers.0.conv", 3), ("head", 2)];
        let all = [PARAMETERS, &beside].concat();
        let rates: Vec<usize> = rules(&config, &all).unwrap().iter().map(|rule| rule.rate).collect();
        assert_eq!(rates, [2, 2, 0, 1, 1, 2, 2, 2]);
    }

    #[test]
    fn patterns_without_effect_are_refused() {
        let sentence = |overrides: &[&str]| rules(&config(overrides), PARAMETERS).unwrap_err().0;
        assert!(sentence(&["freeze=head"]).contains("`train.freeze` has `head`, which matches no parameter"));
        assert!(sentence(&["groups=[{paths=['vision']}]"]).contains("`train.groups` has `vision`"));
        assert!(sentence(&["freeze=**"]).contains("nothing to train"));
    }

    /// An embedded recipe serves models that lack some of the parameters it names; patterns that a user writes must match.
    #[test]
    fn groups_of_a_recipe_are_those_of_the_model() {
        let resolved = |recipe: &str, overrides: &[&str]| {
            let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
            resolve(recipe, &[], &overrides).unwrap()
        };
        for recipe in ["dinov2-s-classify", "dinov2-b-classify"] {
            let first = |overrides: &[&str]| resolved(recipe, overrides).train.groups.0[0].paths.clone();
            assert_eq!(first(&[]), ["cls", "patch", "positions"]);
            assert_eq!(first(&["model.registers=4"]), ["cls", "patch", "positions", "registers"]);
            assert_eq!(first(&["model.class_token=false", "model.pooling=mean"]), ["patch", "positions"]);
            let normed = ["cls", "patch", "positions", "input_norm", "input_norm_bias"];
            assert_eq!(first(&["model.input_norm=true"]), normed);
            let groups = |overrides: &[&str]| resolved(recipe, overrides).train.groups.0.len();
            assert_eq!((groups(&[]), groups(&["model.layers=4"])), (4, 2));
            let own = resolved(recipe, &["groups=[{paths=['cls','registers']}]"]);
            let sentence = rules(&own, &[("cls", 1), ("patch.weight", 2)]).unwrap_err().0;
            assert!(sentence.contains("`train.groups` has `registers`"), "{sentence}");
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("own.toml");
        let text = "extends = 'dinov2-s-classify'\n[[train.groups]]\npaths = ['cls', 'registers']\n";
        std::fs::write(&file, text).unwrap();
        let own = resolved(file.to_str().unwrap(), &[]);
        assert_eq!(own.train.groups.0[0].paths, ["cls", "registers"], "it is not the program's");
    }
}
