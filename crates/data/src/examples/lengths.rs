//! How long examples are, in as few numbers as a plan of memory and time needs.

use super::ExampleTable;
use super::drawn::prompt_of;
use crate::random::Uniform;

/// The sizes of equal shares of the examples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lengths {
    /// Shortest first; the last has the most tokens and the most learned tokens there are.
    shares: Vec<Extent>,
    /// Where examples share prefixes: equal shares of the trees they make, smallest first. The last is the largest.
    trees: Vec<Tree>,
}

/// The size of an example: what it takes of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    pub tokens: usize,
    /// Tokens of it that are predicted.
    pub learned: usize,
}

impl Extent {
    /// An example all of whose tokens are learned.
    pub fn whole(tokens: usize) -> Extent {
        Extent { tokens, learned: tokens }
    }

    /// Whether there is room for it.
    pub(crate) fn fits(&self, room: Extent) -> bool {
        self.tokens <= room.tokens && self.learned <= room.learned
    }
}

/// Examples behind a prefix that they share, or one example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tree {
    pub examples: usize,
    /// Tokens that all begin with.
    pub prefix: usize,
    /// Tokens behind the prefix, of all examples.
    pub branches: usize,
    /// Tokens that are predicted, of all examples.
    pub learned: usize,
}

impl Tree {
    /// Tokens that are computed.
    pub fn tokens(&self) -> usize {
        self.prefix + self.branches
    }

    /// Its numbers, as a config lists them.
    pub fn numbers(&self) -> [usize; 4] {
        [self.examples, self.prefix, self.branches, self.learned]
    }

    /// Of four numbers each, one after another; `None` where a number is missing or contradicts another.
    pub fn list(numbers: &[usize]) -> Option<Vec<Tree>> {
        numbers.chunks(4).map(Tree::given).collect()
    }

    /// Of four numbers; `None` where an example would be empty.
    fn given(numbers: &[usize]) -> Option<Tree> {
        let &[examples, prefix, branches, learned] = numbers else { return None };
        let is_whole = examples > 0 && branches >= examples && learned <= branches;
        is_whole.then_some(Tree { examples, prefix, branches, learned })
    }

    /// The size of each of its examples, taken to be equal.
    fn example(&self) -> Extent {
        Extent {
            tokens: self.prefix + self.branches.div_ceil(self.examples),
            learned: self.learned.div_ceil(self.examples),
        }
    }
}

/// Shares that are told apart: enough that the sum over an update is off by less than a percent.
const SHARES: usize = 64;

/// How widely lengths spread where they are drawn: deviation of their logarithm, as instructions and reviews have it.
const SPREAD: f64 = 0.6;

impl Lengths {
    /// Of given shares and the learned tokens of each, all where those are not known; `None` where there is no share, or an
    /// empty example.
    pub fn given(tokens: &[usize], learned: &[usize]) -> Option<Lengths> {
        let is_known = learned.len() == tokens.len();
        let extent = |(i, &tokens): (usize, &usize)| match is_known {
            true => Extent { tokens, learned: learned[i].min(tokens) },
            false => Extent::whole(tokens),
        };
        let mut shares: Vec<Extent> = tokens.iter().enumerate().map(extent).collect();
        shares.sort_unstable();
        let is_whole = shares.first().is_some_and(|shortest| shortest.tokens > 0);
        is_whole.then_some(Lengths { shares, trees: vec![] })
    }

    /// With shares of trees.
    pub fn with_trees(self, trees: Vec<Tree>) -> Lengths {
        Lengths { trees, ..self }
    }

    /// Measured; `None` for a table without examples.
    pub fn of(table: &ExampleTable) -> Option<Lengths> {
        let mut all: Vec<Extent> = (0..table.count()).map(|index| table.extent_of(index)).collect();
        all.sort_unstable();
        let longest = all.last()?.tokens;
        let most_learned = all.iter().map(|extent| extent.learned).max()?;
        if all.len() > SHARES {
            let count = all.len();
            let share = |share: usize| {
                let members = &all[share * count / SHARES..(share + 1) * count / SHARES];
                let learned: usize = members.iter().map(|extent| extent.learned).sum();
                Extent {
                    tokens: all[(2 * share + 1) * count / (2 * SHARES)].tokens,
                    learned: learned.div_ceil(members.len()),
                }
            };
            all = (0..SHARES).map(share).collect();
        }
        let last = all.last_mut()?;
        *last = Extent { tokens: longest, learned: most_learned };
        Some(Lengths { shares: all, trees: trees(table) })
    }

    /// Lognormal with this mean, cut off at `longest`, which a few examples reach.
    pub fn drawn(mean: usize, longest: usize) -> Lengths {
        let (mean, longest) = (mean.max(1) as f64, longest.max(1));
        let shares = |median: f64| -> Vec<usize> {
            let share = |i: usize| {
                let deviations = normal_quantile((i as f64 + 0.5) / SHARES as f64);
                ((median * (SPREAD * deviations).exp()).round() as usize).clamp(1, longest)
            };
            let mut shares: Vec<usize> = (0..SHARES).map(share).collect();
            shares[SHARES - 1] = longest;
            shares
        };
        // The mean grows with the median, which may lie above the longest: half the interval until it is found.
        let (mut below, mut above) = (1.0, 20.0 * longest as f64);
        for _ in 0..50 {
            let middle = (below + above) / 2.0;
            let got = shares(middle).iter().sum::<usize>() as f64 / SHARES as f64;
            if got < mean { below = middle } else { above = middle }
        }
        let extent = |tokens: usize| Extent { tokens, learned: tokens - prompt_of(tokens).min(tokens) };
        Lengths { shares: shares((below + above) / 2.0).into_iter().map(extent).collect(), trees: vec![] }
    }

    pub fn shares(&self) -> &[Extent] {
        &self.shares
    }

    /// Shares of trees; none where examples share nothing.
    pub fn trees(&self) -> &[Tree] {
        &self.trees
    }

    /// The most tokens of a tree; as many as the longest example has at least.
    pub fn largest_tree(&self) -> usize {
        self.trees.iter().map(Tree::tokens).max().unwrap_or(0).max(self.longest())
    }

    pub fn longest(&self) -> usize {
        self.shares[self.shares.len() - 1].tokens
    }

    /// The most learned tokens of an example.
    pub fn most_learned(&self) -> usize {
        self.shares.iter().map(|extent| extent.learned).max().unwrap_or(0)
    }

    pub fn mean(&self) -> f64 {
        self.shares.iter().map(|extent| extent.tokens).sum::<usize>() as f64 / self.shares.len() as f64
    }

    /// The share of all tokens that is learned.
    pub fn learned_share(&self) -> f64 {
        let learned: usize = self.shares.iter().map(|extent| extent.learned).sum();
        learned as f64 / self.shares.len() as f64 / self.mean()
    }

    /// One of them, every share as likely: its size and the tokens it begins with that it shares; of a tree as many as it has.
    pub(crate) fn draw(&self, uniform: &mut Uniform) -> (Extent, usize, usize) {
        let mut index = |count: usize| (uniform.draw() * count as f64) as usize;
        match self.trees.len() {
            0 => (self.shares[index(self.shares.len())], 0, 1),
            count => {
                let tree = self.trees[index(count)];
                (tree.example(), tree.prefix, tree.examples)
            }
        }
    }
}

/// Equal shares of the trees of a table.
fn trees(table: &ExampleTable) -> Vec<Tree> {
    let Some(prefixes) = &table.prefixes else { return vec![] };
    let tree = |(prefix, members): (usize, &[u32])| {
        let extents = || members.iter().map(|member| table.extent_of(*member as usize));
        Tree {
            examples: members.len(),
            prefix,
            branches: extents().map(|extent| extent.tokens - prefix).sum(),
            learned: extents().map(|extent| extent.learned).sum(),
        }
    };
    let mut all: Vec<Tree> = prefixes.trees().map(tree).collect();
    all.sort_by_key(Tree::tokens);
    if all.len() > SHARES {
        let mut some: Vec<Tree> =
            (0..SHARES).map(|share| all[(2 * share + 1) * all.len() / (2 * SHARES)]).collect();
        some[SHARES - 1] = all[all.len() - 1];
        all = some;
    }
    all
}

/// How many deviations above the mean a normal variable stays below with this probability, to three digits: the formula
/// 26.2.23 of Abramowitz and Stegun.
fn normal_quantile(p: f64) -> f64 {
    let t = (-2.0 * p.min(1.0 - p).ln()).sqrt();
    let above = 2.515517 + t * (0.802853 + t * 0.010328);
    let below = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308));
    let quantile = t - above / below;
    if p < 0.5 { -quantile } else { quantile }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples::Example;

    fn table(lengths: impl IntoIterator<Item = usize>) -> ExampleTable {
        let mut table = ExampleTable::default();
        for len in lengths {
            table.push(Example { tokens: &vec![3; len], weights: &vec![1.0; len], label: None, images: &[] });
        }
        table
    }

    #[test]
    fn few_examples_are_told_one_by_one_and_many_by_shares() {
        assert_eq!(Lengths::of(&ExampleTable::default()), None);
        let tokens =
            |lengths: &Lengths| lengths.shares().iter().map(|extent| extent.tokens).collect::<Vec<_>>();
        assert_eq!(tokens(&Lengths::of(&table([5, 2, 9])).unwrap()), [2, 5, 9]);
        let many = Lengths::of(&table((1..=1000).rev())).unwrap();
        assert_eq!((many.shares().len(), many.longest(), many.shares()[0].tokens), (64, 1000, 8));
        assert!((many.mean() - 500.5).abs() < 1.0, "{}", many.mean());
        // Of an example whose every token counts the first is predicted from nothing.
        assert!((many.learned_share() - 1.0).abs() < 0.01 && many.most_learned() == 999);
        assert_eq!(Lengths::given(&[], &[]), None);
        assert_eq!(Lengths::given(&[4, 0], &[]), None);
        let given = Lengths::given(&[8, 4], &[2, 3]).unwrap();
        let expected = [Extent { tokens: 4, learned: 3 }, Extent { tokens: 8, learned: 2 }];
        assert_eq!((given.shares(), given.most_learned()), (&expected[..], 3));
    }

    #[test]
    fn drawn_lengths_have_their_mean_and_reach_the_longest() {
        for (mean, longest) in [(200, 512), (20, 4096), (500, 512), (1, 1)] {
            let drawn = Lengths::drawn(mean, longest);
            assert_eq!(drawn.longest(), longest);
            // The last share is the longest, whatever the mean: that much it may be off.
            let off = (drawn.mean() - mean as f64).abs();
            assert!(off < 1.0 + longest as f64 / 64.0, "{mean} {longest}: {}", drawn.mean());
        }
        let shares = Lengths::drawn(200, 512);
        assert!(shares.shares().is_sorted() && (195.0..205.0).contains(&shares.mean()), "{}", shares.mean());
        assert!(shares.shares()[0].tokens < 60 && shares.shares()[32].tokens < 200, "{:?}", shares.shares());
    }

    #[test]
    fn quantiles_of_the_normal_distribution() {
        for (p, want) in [(0.5, 0.0), (0.841345, 1.0), (0.975, 1.959964), (0.001350, -3.0)] {
            assert!((normal_quantile(p) - want).abs() < 1e-3, "{p}: {}", normal_quantile(p));
        }
    }
}
