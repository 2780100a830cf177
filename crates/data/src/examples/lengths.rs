//! The distribution of example sizes, in as few numbers as a plan of memory and time needs.

use std::ops::{Add, Sub};

use super::ExampleTable;
use super::drawn::prompt_of;
use crate::random::Uniform;

/// Quantiles of the sizes of examples: the mean sizes of equal shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lengths {
    /// Shares without images first, shortest first; the last one has the maximum in every dimension.
    shares: Vec<Extent>,
    /// Where examples share prefixes, or are pairs: quantiles of the trees they form, smallest first. The last one is the
    /// largest.
    trees: Vec<Tree>,
    /// Patches of the largest image; 0 where there is none.
    largest_image: usize,
}

/// The size of an example: the room it takes in a micro-batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extent {
    pub tokens: usize,
    /// Tokens that are predicted.
    pub learned: usize,
    /// Images among the tokens, and their patches.
    pub images: usize,
    pub patches: usize,
}

impl Extent {
    /// An example all of whose tokens are learned.
    pub fn whole(tokens: usize) -> Extent {
        Extent { tokens, learned: tokens, ..Extent::default() }
    }

    /// Whether it fits into `room`.
    pub(crate) fn fits(&self, room: Extent) -> bool {
        self.most(room) == room
    }

    /// The maximum in every dimension.
    pub fn most(self, other: Extent) -> Extent {
        self.with(other, usize::max)
    }

    fn with(self, other: Extent, of: impl Fn(usize, usize) -> usize) -> Extent {
        Extent {
            tokens: of(self.tokens, other.tokens),
            learned: of(self.learned, other.learned),
            images: of(self.images, other.images),
            patches: of(self.patches, other.patches),
        }
    }

    /// The mean, rounded up.
    fn mean(all: &[Extent]) -> Extent {
        let sum: Extent = all.iter().copied().sum();
        sum.with(Extent::default(), |count, _| count.div_ceil(all.len().max(1)))
    }

    /// Sort key among shares.
    fn rank(&self) -> (bool, usize, usize) {
        (self.images > 0, self.tokens, self.learned)
    }
}

impl Add for Extent {
    type Output = Extent;

    fn add(self, other: Extent) -> Extent {
        self.with(other, usize::add)
    }
}

impl Sub for Extent {
    type Output = Extent;

    fn sub(self, other: Extent) -> Extent {
        self.with(other, usize::sub)
    }
}

impl std::iter::Sum for Extent {
    fn sum<I: Iterator<Item = Extent>>(all: I) -> Extent {
        all.fold(Extent::default(), Extent::add)
    }
}

/// Examples with a common prefix, or a single example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tree {
    pub examples: usize,
    /// The shared prefix, of which nothing is learned.
    pub prefix: Extent,
    /// The remaining tokens of all examples.
    pub branches: Extent,
}

impl Tree {
    /// Size of everything that is computed.
    pub fn extent(&self) -> Extent {
        self.prefix + self.branches
    }

    /// Its numbers, as a config lists them.
    pub fn numbers(&self) -> [usize; 4] {
        [self.examples, self.prefix.tokens, self.branches.tokens, self.branches.learned]
    }

    /// The numbers of its images, as a config lists them.
    pub fn image_numbers(&self) -> [usize; 4] {
        [self.prefix.images, self.prefix.patches, self.branches.images, self.branches.patches]
    }

    /// Parses trees from four numbers each, and four of images or none; `None` where a number is missing or contradicts
    /// another.
    pub fn list(numbers: &[usize], image_numbers: &[usize]) -> Option<Vec<Tree>> {
        if !image_numbers.is_empty() && image_numbers.len() != numbers.len() {
            return None;
        }
        let images = image_numbers.chunks(4).chain(std::iter::repeat(&[0; 4][..]));
        numbers.chunks(4).zip(images).map(|(numbers, images)| Tree::given(numbers, images)).collect()
    }

    /// Parses one tree from four numbers, and four of images; `None` where an example would be empty.
    fn given(numbers: &[usize], images: &[usize]) -> Option<Tree> {
        let &[examples, prefix, tokens, learned] = numbers else { return None };
        let &[shared_images, shared_patches, images, patches] = images else { return None };
        let is_whole = examples > 0 && tokens >= examples && learned <= tokens;
        is_whole.then_some(Tree {
            examples,
            prefix: Extent { tokens: prefix, learned: 0, images: shared_images, patches: shared_patches },
            branches: Extent { tokens, learned, images, patches },
        })
    }

    /// A tree of this maximum size, with the same number of examples and the same prefix.
    pub fn holding(self, most: Extent) -> Tree {
        let all = self.extent().most(most);
        let branches = all.with(self.prefix, usize::saturating_sub);
        Tree { branches: Extent { tokens: branches.tokens.max(branches.learned), ..branches }, ..self }
    }

    /// The size of each of its examples, assumed to be equal.
    fn example(&self) -> Extent {
        let branch = self.branches.with(Extent::default(), |count, _| count.div_ceil(self.examples));
        self.prefix + branch
    }
}

/// Number of shares, large enough that the sum over an update is off by less than a percent.
const SHARES: usize = 64;

/// Standard deviation of the logarithm of drawn lengths, as in sets of instructions and reviews.
const SPREAD: f64 = 0.6;

impl Lengths {
    /// Parses shares: tokens of each, learned tokens (all, where none are given), and images and patches (none, where not
    /// given). `None` where there is no share, or an empty example.
    pub fn given(tokens: &[usize], learned: &[usize], [images, patches]: [&[usize]; 2]) -> Option<Lengths> {
        let of =
            |numbers: &[usize], i: usize| numbers.get(i).copied().filter(|_| numbers.len() == tokens.len());
        let extent = |(i, &tokens): (usize, &usize)| Extent {
            tokens,
            learned: of(learned, i).map_or(tokens, |learned| learned.min(tokens)),
            images: of(images, i).unwrap_or(0),
            patches: of(patches, i).unwrap_or(0),
        };
        let shares: Vec<Extent> = tokens.iter().enumerate().map(extent).collect();
        let is_whole = !shares.is_empty() && shares.iter().all(|share| share.tokens > 0);
        let largest_image = shares.iter().map(|share| share.patches).max().unwrap_or(0);
        is_whole.then(|| Lengths { shares, trees: vec![], largest_image }.sorted())
    }

    fn sorted(mut self) -> Lengths {
        self.shares.sort_by_key(Extent::rank);
        self
    }

    /// Adds quantiles of trees.
    pub fn with_trees(self, trees: Vec<Tree>) -> Lengths {
        Lengths { trees, ..self }
    }

    /// Measures a table; `None` for a table without examples.
    pub fn of(table: &ExampleTable) -> Option<Lengths> {
        let mut all: Vec<Extent> = (0..table.count()).map(|index| table.extent_of(index)).collect();
        let most = all.iter().copied().reduce(Extent::most)?;
        all.sort_by_key(Extent::rank);
        if all.len() > SHARES {
            let count = all.len();
            let share = |share: usize| {
                let members = &all[share * count / SHARES..(share + 1) * count / SHARES];
                Extent { tokens: all[(2 * share + 1) * count / (2 * SHARES)].tokens, ..Extent::mean(members) }
            };
            all = (0..SHARES).map(share).collect();
        }
        *all.last_mut()? = most;
        Some(Lengths { shares: all, trees: trees(table), largest_image: table.largest_image() })
    }

    /// A lognormal distribution with this mean, truncated at `longest`, which a few examples reach.
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
        // The mean grows with the median, which may exceed the longest length: bisection finds it.
        let (mut below, mut above) = (1.0, 20.0 * longest as f64);
        for _ in 0..50 {
            let middle = (below + above) / 2.0;
            let got = shares(middle).iter().sum::<usize>() as f64 / SHARES as f64;
            if got < mean { below = middle } else { above = middle }
        }
        let extent = |tokens: usize| Extent {
            learned: tokens - prompt_of(tokens).min(tokens),
            ..Extent::whole(tokens)
        };
        Lengths {
            shares: shares((below + above) / 2.0).into_iter().map(extent).collect(),
            trees: vec![],
            largest_image: 0,
        }
    }

    pub fn shares(&self) -> &[Extent] {
        &self.shares
    }

    /// Quantiles of trees; empty where examples share nothing and are no pairs.
    pub fn trees(&self) -> &[Tree] {
        &self.trees
    }

    /// Maximum size of a tree, or of an example outside trees.
    pub fn largest_tree(&self) -> Extent {
        self.trees.iter().map(Tree::extent).fold(self.most(), Extent::most)
    }

    /// Maximum size of an example.
    pub fn most(&self) -> Extent {
        self.shares.iter().copied().fold(Extent::default(), Extent::most)
    }

    pub fn longest(&self) -> usize {
        self.most().tokens
    }

    /// Sets the patches of the largest image, where they are known; otherwise a single image may have all patches of an
    /// example.
    pub fn with_largest_image(self, patches: Option<usize>) -> Lengths {
        Lengths { largest_image: patches.unwrap_or(self.largest_image), ..self }
    }

    /// Patches of the largest image; 0 where there is none.
    pub fn largest_image(&self) -> usize {
        self.largest_image
    }

    /// Whether some examples have images.
    pub fn has_images(&self) -> bool {
        self.most().images > 0
    }

    pub fn mean(&self) -> f64 {
        self.shares.iter().map(|extent| extent.tokens).sum::<usize>() as f64 / self.shares.len() as f64
    }

    /// Share of all tokens that is learned.
    pub fn learned_share(&self) -> f64 {
        let learned: usize = self.shares.iter().map(|extent| extent.learned).sum();
        learned as f64 / self.shares.len() as f64 / self.mean()
    }

    /// Draws a share with equal probability: the size of an example, its shared prefix, and the number of examples in its tree.
    pub(crate) fn draw(&self, uniform: &mut Uniform) -> (Extent, Extent, usize) {
        let mut index = |count: usize| (uniform.draw() * count as f64) as usize;
        match self.trees.len() {
            0 => (self.shares[index(self.shares.len())], Extent::default(), 1),
            count => {
                let tree = self.trees[index(count)];
                (tree.example(), tree.prefix, tree.examples)
            }
        }
    }
}

/// Quantiles of the trees of a table. A pair is one tree, whether or not its answers share their prompt.
fn trees(table: &ExampleTable) -> Vec<Tree> {
    let tree = |(prefix, members): (usize, &[u32])| {
        let prefix = table.beginning_of(members[0] as usize, prefix);
        let branches = members.iter().map(|member| table.extent_of(*member as usize) - prefix).sum();
        Tree { examples: members.len(), prefix, branches }
    };
    let mut all: Vec<Tree> = match &table.prefixes {
        Some(prefixes) => prefixes.trees().map(tree).collect(),
        None if table.is_paired => {
            (0..table.count() as u32).step_by(2).map(|first| tree((0, &[first, first + 1]))).collect()
        }
        None => return vec![],
    };
    all.sort_by_key(|tree| tree.extent().tokens);
    let most = all.iter().map(Tree::extent).fold(Extent::default(), Extent::most);
    if all.len() > SHARES {
        let mut some: Vec<Tree> =
            (0..SHARES).map(|share| all[(2 * share + 1) * all.len() / (2 * SHARES)]).collect();
        some[SHARES - 1] = all[all.len() - 1];
        all = some;
    }
    if let Some(last) = all.last_mut().filter(|_| table.is_paired) {
        *last = last.holding(most);
    }
    all
}

/// Quantile function of the normal distribution, to three digits: formula 26.2.23 of Abramowitz and Stegun.
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
    fn few_examples_are_listed_and_many_summarised_by_shares() {
        assert_eq!(Lengths::of(&ExampleTable::default()), None);
        let tokens =
            |lengths: &Lengths| lengths.shares().iter().map(|extent| extent.tokens).collect::<Vec<_>>();
        assert_eq!(tokens(&Lengths::of(&table([5, 2, 9])).unwrap()), [2, 5, 9]);
        let many = Lengths::of(&table((1..=1000).rev())).unwrap();
        assert_eq!((many.shares().len(), many.longest(), many.shares()[0].tokens), (64, 1000, 8));
        assert!((many.mean() - 500.5).abs() < 1.0, "{}", many.mean());
        // In an example whose every token counts, the first is predicted from nothing.
        assert!((many.learned_share() - 1.0).abs() < 0.01 && many.most().learned == 999);
        assert_eq!(Lengths::given(&[], &[], [&[]; 2]), None);
        assert_eq!(Lengths::given(&[4, 0], &[], [&[]; 2]), None);
        let given = Lengths::given(&[8, 4], &[2, 3], [&[]; 2]).unwrap();
        let of = |tokens, learned| Extent { learned, ..Extent::whole(tokens) };
        let expected = [of(4, 3), of(8, 2)];
        assert_eq!((given.shares(), given.most().learned), (&expected[..], 3));
    }

    #[test]
    fn drawn_lengths_have_their_mean_and_reach_the_longest() {
        for (mean, longest) in [(200, 512), (20, 4096), (500, 512), (1, 1)] {
            let drawn = Lengths::drawn(mean, longest);
            assert_eq!(drawn.longest(), longest);
            // The last share is the longest length, whatever the mean, which allows this much deviation.
            let off = (drawn.mean() - mean as f64).abs();
            assert!(off < 1.0 + longest as f64 / 64.0, "{mean} {longest}: {}", drawn.mean());
        }
        let shares = Lengths::drawn(200, 512);
        assert!(
            shares.shares().is_sorted_by_key(Extent::rank) && (195.0..205.0).contains(&shares.mean()),
            "{}",
            shares.mean()
        );
        assert!(shares.shares()[0].tokens < 60 && shares.shares()[32].tokens < 200, "{:?}", shares.shares());
    }

    #[test]
    fn quantiles_of_the_normal_distribution() {
        for (p, want) in [(0.5, 0.0), (0.841345, 1.0), (0.975, 1.959964), (0.001350, -3.0)] {
            assert!((normal_quantile(p) - want).abs() < 1e-3, "{p}: {}", normal_quantile(p));
        }
    }
}
