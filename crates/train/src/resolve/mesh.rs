//! Groups the ranks of a run: each group divides what is sharded, and the groups are replicas of one another.

use flatout_ir::Target;

use crate::UserError;
use crate::config::Config;
use crate::refuse;

/// The target with its ranks grouped as the config asks. A single rank is a group by itself.
pub fn grouped(config: &Config, target: &Target) -> Result<Target, UserError> {
    let ranks = target.ranks;
    let shards = match config.mesh.shards.given().filter(|_| ranks > 1) {
        Some(shards) if shards == 0 || !ranks.is_multiple_of(shards) => refuse!(
            "`mesh.shards` = {shards} does not divide the {ranks} ranks of the run: give a number that does, or auto, by which all of them \
             are one group"
        ),
        shards => shards,
    };
    Ok(Target { shards, ..target.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes;
    use crate::resolve::compile;

    #[test]
    fn ranks_are_replicas_of_groups_that_divide_them() {
        let mesh = |ranks: usize, words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
            let config = recipes::resolve("tiny", &[], &words).unwrap();
            let target = Target { ranks, ..compile::target() };
            grouped(&config, &target).map(|target| target.mesh().to_string())
        };
        assert_eq!(mesh(4, &[]).unwrap(), "shard 4");
        assert_eq!(mesh(4, &["mesh.shards=2"]).unwrap(), "replica 2 shard 2");
        assert_eq!(mesh(4, &["mesh.shards=1"]).unwrap(), "replica 4");
        assert_eq!(mesh(1, &["mesh.shards=2"]).unwrap(), "one rank");
        for shards in ["mesh.shards=3", "mesh.shards=8"] {
            let refused = mesh(4, &[shards]).unwrap_err().0;
            assert!(refused.contains("does not divide the 4 ranks of the run"), "{refused}");
        }
    }

    /// Plans of two groups of two: shards are added within a group in every micro-batch, and between groups once per update.
    #[test]
    fn groups_exchange_along_both_axes() {
        let words = ["train.batch=4", "mesh.shards=2", "shard=parameters"].map(String::from);
        let config = recipes::resolve("tiny", &[], &words).unwrap();
        let target = Target { ranks: 4, ..compile::target() };
        let compiled = compile::compile(&config, &target).unwrap();
        assert_eq!(compiled.plans.mesh.to_string(), "replica 2 shard 2");
        let text = compiled.plans.to_string();
        assert!(text.contains("axis=replica") && text.contains("axis=shard"), "both axes");
    }
}
