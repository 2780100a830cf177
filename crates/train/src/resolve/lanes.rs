//! Lanes of a run: groups of an update's rows that are summed separately. They decide the bits, not only the speed.

use crate::UserError;
use crate::config::Config;
use crate::refuse;
use crate::switches::Toggle;

/// The number of lanes that plans are compiled with: that of the config if the ranks can divide it evenly, otherwise one per
/// rank. In the second case losses equal those of the config's lanes within rounding.
pub fn lanes(config: &Config, ranks: usize) -> Result<usize, UserError> {
    let (batch, asked) = (config.train.batch, config.train.lanes.given().unwrap_or(ranks));
    let is_kept = are_shared_out(asked, ranks);
    if !is_kept && config.switches.kernels.deterministic == Toggle::On {
        refuse!(
            "`deterministic=on` promises the bits of `train.lanes` = {asked}, which {ranks} ranks cannot share out: take a number \
             of ranks that divides it, or leave deterministic out"
        );
    }
    let lanes = if is_kept { asked } else { ranks };
    if lanes > batch {
        refuse!(
            "{lanes} lanes share out `train.batch` = {batch} rows, and some would have none: raise it, or take fewer lanes or ranks"
        );
    }
    Ok(lanes)
}

/// Whether each rank gets the same number of lanes, as a subtree of one tree.
fn are_shared_out(lanes: usize, ranks: usize) -> bool {
    lanes == ranks || (lanes.is_power_of_two() && lanes.is_multiple_of(ranks))
}

/// The warning about bits if a run does not have the lanes it began with.
pub fn other_bits(began: usize, ranks: usize, lanes: usize) -> Option<String> {
    let plural = |count: usize, word: &str| format!("{count} {word}{}", if count == 1 { "" } else { "s" });
    (began != lanes).then(|| {
        format!(
            "the run sums its rows in {}, which {} cannot share out: losses are the same within rounding, and not to the bit",
            plural(began, "lane"),
            plural(ranks, "rank")
        )
    })
}

/// The warning about a given micro-batch that exceeds the rows of a lane.
pub fn lowered(asked: &Config, lanes: usize) -> Option<String> {
    let (rows, given) = (rows_a_lane(asked, lanes), asked.train.micro_batch()?);
    (lanes > 1 && given > rows).then(|| {
        format!(
            "`train.micro_batch` = {given} is more than the rows of a lane: `train.batch` = {} in {lanes} lanes makes {rows}, which are \
             computed at once",
            asked.train.batch
        )
    })
}

/// The most rows of a lane in an update, which bounds the micro-batch.
pub fn rows_a_lane(config: &Config, lanes: usize) -> usize {
    config.train.batch.div_ceil(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipes;

    /// A single rank's plans contain no exchange; those of several ranks do.
    #[test]
    fn one_rank_with_one_lane_exchanges_nothing() {
        use flatout_ir::{Mesh, Role};
        let config = recipes::resolve("tiny", &[], &["train.batch=8".into()]).unwrap();
        let of = |ranks: usize| {
            let target = flatout_ir::Target { ranks, ..crate::resolve::compile::target() };
            crate::resolve::compile::compile(&config, &target).unwrap()
        };
        let has_exchange = |ranks: usize| of(ranks).plans.to_string().contains("all_reduce");
        assert_eq!([1, 2, 3].map(has_exchange), [false, true, true]);
        let one = of(1);
        assert_eq!((one.plans.mesh, one.settled.options.lanes), (Mesh::ONE, 1));
        assert!(one.plans.plan(Role::Keep(0)).is_none() && of(2).plans.plan(Role::Keep(0)).is_none());
        assert_eq!((one.micro_batch, of(2).micro_batch, of(3).micro_batch), (8, 4, 3));
    }

    #[test]
    fn lanes_are_kept_where_ranks_can_share_them_out() {
        let of = |words: &[&str], ranks: usize| {
            let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
            lanes(&recipes::resolve("tiny", &[], &words).unwrap(), ranks)
        };
        assert_eq!([1, 2, 3, 8].map(|ranks| of(&[], ranks)), [1, 2, 3, 8].map(Ok));
        assert_eq!([1, 2, 4, 8].map(|ranks| of(&["train.lanes=8"], ranks)), [8; 4].map(Ok));
        assert_eq!(of(&["train.lanes=8"], 3), Ok(3));
        assert!(of(&["train.lanes=8", "deterministic=on"], 3).unwrap_err().0.contains("cannot share out"));
        assert!(of(&[], 9).unwrap_err().0.starts_with("9 lanes share out `train.batch` = 8 rows"));
        assert_eq!(other_bits(8, 4, 8), None);
        assert!(other_bits(8, 3, 3).unwrap().contains("in 8 lanes, which 3 ranks cannot"));
    }

    #[test]
    fn a_micro_batch_larger_than_a_lane_gives_a_warning() {
        let warning = |words: &[&str], lanes: usize| {
            let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
            lowered(&recipes::resolve("tiny", &[], &words).unwrap(), lanes)
        };
        let sentence = warning(&["train.batch=16", "train.micro_batch=4"], 8).expect("a sentence");
        assert!(
            sentence.starts_with("`train.micro_batch` = 4 is more than") && sentence.contains("makes 2"),
            "{sentence}"
        );
        assert_eq!(warning(&["train.batch=16", "train.micro_batch=2"], 8), None);
        assert_eq!(warning(&["train.batch=16"], 8), None);
        assert_eq!(warning(&["train.batch=16", "train.micro_batch=16"], 1), None);
    }
}
