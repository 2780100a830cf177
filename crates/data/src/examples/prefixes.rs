//! Groups examples with a common prefix, so that the prefix is computed once.
//!
//! Questions about one document or image, and conversations with one system prompt, have a common prefix. Examples are grouped
//! so that the most tokens are saved. A group shares the tokens that all its members begin with, up to the token before the
//! first learned one.

use std::borrow::Cow;

use super::{Example, ExampleTable};
use crate::order::permutation::Permutation;
use crate::random::key;

/// Groups of examples and the number of tokens that each shares.
#[derive(Debug, Clone, PartialEq)]
pub struct Prefixes {
    /// The group of each example.
    group_of: Vec<u32>,
    /// Tokens that the members of a group share; 0 where it has one member.
    tokens: Vec<usize>,
    /// Members of all groups, one group after another.
    members: Vec<u32>,
    /// End of each group in `members`.
    ends: Vec<usize>,
}

/// Least tokens of a shared prefix: fewer do not justify a separate order.
const LEAST_TOKENS: usize = 32;
/// Most consecutive members of a group in an epoch. More would save little and shuffle less.
const AT_ONCE: usize = 16;

impl Prefixes {
    /// Groups the examples of a table.
    pub(super) fn of(table: &ExampleTable) -> Prefixes {
        let beginnings: Vec<Cow<'_, [u32]>> = table.iter().map(|example| beginning(&example)).collect();
        let mut order: Vec<u32> = (0..table.count() as u32).collect();
        order.sort_by(|&a, &b| beginnings[a as usize].cmp(&beginnings[b as usize]));
        let common: Vec<usize> = order
            .windows(2)
            .map(|pair| common(&beginnings[pair[0] as usize], &beginnings[pair[1] as usize]))
            .collect();
        let mut groups: Vec<(usize, Vec<u32>)> = best_runs(order.len(), &common)
            .into_iter()
            .map(|(start, end, tokens)| {
                let mut members = order[start..end].to_vec();
                members.sort_unstable();
                (tokens, members)
            })
            .collect();
        // Groups are ordered by their first members, so that their numbers do not depend on token ids.
        groups.sort_by_key(|(_, members)| members[0]);
        let mut found =
            Prefixes { group_of: vec![0; table.count()], tokens: vec![], members: vec![], ends: vec![] };
        for (number, (tokens, members)) in groups.into_iter().enumerate() {
            members.iter().for_each(|member| found.group_of[*member as usize] = number as u32);
            found.tokens.push(tokens);
            found.members.extend(members);
            found.ends.push(found.members.len());
        }
        found
    }

    /// Makes every pair of a table a group, which shares its prompt.
    pub(super) fn of_pairs(table: &ExampleTable) -> Prefixes {
        let pairs = table.units();
        let shared = |pair: usize| {
            let [chosen, rejected] = [2 * pair, 2 * pair + 1].map(|example| beginning(&table.get(example)));
            common(&chosen, &rejected)
        };
        Prefixes {
            group_of: (0..table.count() as u32).map(|example| example / 2).collect(),
            tokens: (0..pairs).map(shared).collect(),
            members: (0..table.count() as u32).collect(),
            ends: (1..=pairs).map(|pair| 2 * pair).collect(),
        }
    }

    /// The group of an example, and the number of tokens it shares.
    pub(super) fn of_example(&self, example: usize) -> (u32, usize) {
        let group = self.group_of[example];
        (group, self.tokens[group as usize])
    }

    /// Groups as lists of members, with the number of tokens they share.
    pub(super) fn trees(&self) -> impl Iterator<Item = (usize, &[u32])> {
        let group = move |number: usize| {
            let start = if number == 0 { 0 } else { self.ends[number - 1] };
            self.members[start..self.ends[number]]
                .chunks(AT_ONCE)
                .map(move |members| (self.tokens[number], members))
        };
        (0..self.ends.len()).flat_map(group)
    }

    /// A shuffled order of all examples in which members of a group follow one another, at most [`AT_ONCE`] at a time.
    pub(super) fn order(&self, seed: u64) -> Vec<u32> {
        let mut trees: Vec<Vec<u32>> = vec![];
        let mut start = 0;
        for (number, &end) in self.ends.iter().enumerate() {
            let members = &self.members[start..end];
            let shuffled = Permutation::new(members.len() as u64, key(seed, number as u64 + 1));
            let drawn: Vec<u32> =
                (0..members.len()).map(|i| members[shuffled.at(i as u64) as usize]).collect();
            trees.extend(drawn.chunks(AT_ONCE).map(<[u32]>::to_vec));
            start = end;
        }
        let shuffled = Permutation::new(trees.len() as u64, key(seed, 0));
        (0..trees.len()).flat_map(|i| trees[shuffled.at(i as u64) as usize].iter().copied()).collect()
    }
}

/// The tokens of an example that it may share: those whose next token is not learned. Tokens of an image are replaced by its
/// number, and an image is shared whole.
fn beginning<'a>(example: &Example<'a>) -> Cow<'a, [u32]> {
    let first = example.weights.iter().position(|weight| *weight != 0.0).unwrap_or(example.tokens.len());
    let mut end = first.saturating_sub(1);
    if let Some(cut) = example.images.iter().find(|image| image.range().contains(&end)) {
        end = cut.start as usize;
    }
    let mut tokens = Cow::Borrowed(&example.tokens[..end]);
    for image in example.images.iter().filter(|image| image.range().end <= end) {
        tokens.to_mut()[image.range()].fill(u32::MAX - image.image);
    }
    tokens
}

fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Tokens that `count` examples save by sharing `tokens`.
fn saved(count: usize, tokens: usize) -> usize {
    if tokens < LEAST_TOKENS { 0 } else { (count - count.div_ceil(AT_ONCE)) * tokens }
}

/// Partitions `count` sorted prefixes, of which neighbours have `common` first tokens in common, into the runs (start, end,
/// shared tokens) that save the most in total.
///
/// Runs with common tokens nest. A run is taken whole where that saves at least as much as its parts do.
fn best_runs(count: usize, common: &[usize]) -> Vec<(usize, usize, usize)> {
    /// A run that is still open: its start, the tokens it shares, and its closed parts.
    struct Open {
        start: usize,
        tokens: usize,
        parts: Vec<(usize, usize, usize)>,
        saved: usize,
    }
    let close = |run: Open, end: usize| {
        let whole = saved(end - run.start, run.tokens);
        match whole >= run.saved && whole > 0 {
            true => (vec![(run.start, end, run.tokens)], whole),
            false => (run.parts, run.saved),
        }
    };
    let mut open = vec![Open { start: 0, tokens: 0, parts: vec![], saved: 0 }];
    for at in 0..count {
        // The example at `at` alone; it shares with its neighbours what they have in common.
        let (mut parts, mut part_saved, mut start) = (vec![(at, at + 1, 0)], 0, at);
        let next = common.get(at).copied().unwrap_or(0);
        while open.last().is_some_and(|run| run.tokens > next) {
            let mut run = open.pop().expect("there is a last one");
            run.parts.extend(parts);
            run.saved += part_saved;
            start = run.start;
            (parts, part_saved) = close(run, at + 1);
        }
        match open.last_mut() {
            Some(run) if run.tokens == next => {
                run.parts.extend(parts);
                run.saved += part_saved;
            }
            _ => open.push(Open { start, tokens: next, parts, saved: part_saved }),
        }
    }
    open.pop().expect("the outermost shares nothing and stays open").parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples::Sighting;
    use crate::vision::Grid;

    /// Examples of a prefix of `prefix` tokens named `name`, a question, and a learned answer of two tokens.
    fn table(rows: &[(u32, usize, &[u32])]) -> ExampleTable {
        let mut table = ExampleTable::default();
        for (name, prefix, question) in rows {
            let tokens: Vec<u32> = (0..*prefix as u32)
                .map(|i| 1000 * name + i)
                .chain(question.iter().copied())
                .chain([7, 8])
                .collect();
            let weights: Vec<f32> =
                (0..tokens.len()).map(|i| if i + 2 < tokens.len() { 0.0 } else { 1.0 }).collect();
            table.push(Example { tokens: &tokens, weights: &weights, label: None, images: &[] });
        }
        table
    }

    fn groups(prefixes: &Prefixes) -> Vec<(usize, Vec<u32>)> {
        prefixes.trees().map(|(tokens, members)| (tokens, members.to_vec())).collect()
    }

    #[test]
    fn questions_about_one_text_share_its_prefix() {
        let found = Prefixes::of(&table(&[
            (1, 40, &[1, 2]),
            (2, 50, &[3]),
            (1, 40, &[4, 5, 6]),
            (3, 60, &[1]),
            (2, 50, &[9]),
            (1, 40, &[1, 3]),
        ]));
        // The first and the last also share a token of the question, but three sharing forty tokens save more.
        assert_eq!(groups(&found), [(40, vec![0, 2, 5]), (50, vec![1, 4]), (0, vec![3])]);
        assert_eq!(found.of_example(4), (1, 50));
        assert_eq!(groups(&Prefixes::of(&ExampleTable::default())), []);
        // A short prefix is not shared.
        assert_eq!(groups(&Prefixes::of(&table(&[(1, 8, &[1]), (1, 8, &[2])]))).len(), 2);
    }

    #[test]
    fn a_prompt_that_all_have_is_shared_where_no_longer_text_is() {
        let system: Vec<(u32, usize, &[u32])> =
            vec![(1, 100, &[1]), (1, 100, &[2]), (1, 100, &[3]), (1, 100, &[4])];
        assert_eq!(groups(&Prefixes::of(&table(&system))), [(100, vec![0, 1, 2, 3])]);
        // Two documents after the prompt, with two questions each: sharing the documents saves more.
        let document = |number: u32| -> Vec<u32> { (0..200).map(|i| 5000 + 300 * number + i).collect() };
        let rows: Vec<Vec<u32>> = (0..4).map(|i| [document(i / 2), vec![i]].concat()).collect();
        let rows: Vec<(u32, usize, &[u32])> = rows.iter().map(|question| (1, 40, &question[..])).collect();
        assert_eq!(groups(&Prefixes::of(&table(&rows))), [(240, vec![0, 1]), (240, vec![2, 3])]);
    }

    #[test]
    fn nothing_that_is_learned_is_shared() {
        let mut same = ExampleTable::default();
        for weights in [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]] {
            let weights: Vec<f32> = std::iter::repeat_n(0.0, 50).chain(weights).collect();
            same.push(Example { tokens: &vec![4; 53], weights: &weights, label: None, images: &[] });
        }
        // The last token that is only read predicts the first learned one.
        assert_eq!(groups(&Prefixes::of(&same)), [(51, vec![0, 1])]);
        let mut whole = ExampleTable::default();
        for _ in 0..2 {
            whole.push(Example { tokens: &[4; 53], weights: &[1.0; 53], label: None, images: &[] });
        }
        assert_eq!(groups(&Prefixes::of(&whole)), [(0, vec![0]), (0, vec![1])]);
    }

    #[test]
    fn an_order_has_everything_once_and_members_together() {
        let rows: Vec<(u32, usize)> = (0..60u32).map(|i| (i % 7, 40)).collect();
        let questions: Vec<[u32; 1]> = (0..60).map(|i| [i]).collect();
        let rows: Vec<(u32, usize, &[u32])> =
            rows.iter().zip(&questions).map(|((name, prefix), q)| (*name, *prefix, &q[..])).collect();
        let found = Prefixes::of(&table(&rows));
        let order = found.order(3);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..60));
        let changes = order.windows(2).filter(|pair| pair[0] % 7 != pair[1] % 7).count();
        assert_eq!(changes, 6, "each group follows in one piece");
        assert_ne!(order, found.order(4));
    }

    #[test]
    fn runs_cover_everything_whatever_neighbours_share() {
        let mut state = 7u64;
        for _ in 0..200 {
            let mut draw = |below: usize| {
                state = key(state, 1);
                (state % below as u64) as usize
            };
            let common: Vec<usize> = (0..draw(20)).map(|_| 40 * draw(4)).collect();
            let mut at = 0;
            for (start, end, tokens) in best_runs(common.len() + 1, &common) {
                assert_eq!(start, at);
                assert!(
                    end > start && common[start..end - 1].iter().all(|common| *common >= tokens),
                    "{common:?}"
                );
                at = end;
            }
            assert_eq!(at, common.len() + 1);
        }
    }

    #[test]
    fn an_image_is_shared_whole_and_identified_by_its_number() {
        let example = |image: u32, question: u32| {
            let tokens: Vec<u32> = [vec![5; 20], vec![9; 40], vec![question, 8, 8]].concat();
            let weights: Vec<f32> = (0..63).map(|i| if i < 62 { 0.0 } else { 1.0 }).collect();
            (
                tokens,
                weights,
                [Sighting {
                    start: 20,
                    image,
                    grid: Grid { rows: 8, columns: 20 },
                    merge: 2,
                    tokens: 40,
                    hash: 0,
                }],
            )
        };
        let mut table = ExampleTable::default();
        for (image, question) in [(0, 1), (1, 1), (0, 2), (1, 2)] {
            let (tokens, weights, images) = example(image, question);
            table.push(Example { tokens: &tokens, weights: &weights, label: None, images: &images });
        }
        let found = Prefixes::of(&table);
        assert_eq!(groups(&found), [(60, vec![0, 2]), (60, vec![1, 3])]);
        // Where an answer directly follows an image, the image is in no prefix: its last token predicts the answer.
        let mut at_once = ExampleTable::default();
        for _ in 0..2 {
            let (mut tokens, mut weights, images) = example(0, 1);
            tokens.remove(60);
            weights.remove(0);
            weights[60] = 1.0;
            at_once.push(Example { tokens: &tokens, weights: &weights, label: None, images: &images });
        }
        assert_eq!(groups(&Prefixes::of(&at_once)), [(0, vec![0]), (0, vec![1])]);
    }
}
