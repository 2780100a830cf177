//! Chooses the shapes of plans so that examples of the given lengths leave little padding.
//!
//! Some updates are drawn from the lengths and laid out in the largest allowed shape. From the sizes of the resulting
//! micro-batches, at most four extents are chosen that minimise padding.

use super::layout::{ImageRoom, Layout, MOST_SHAPES, Member, Shape};
use super::lengths::{Extent, Lengths, Tree};
use super::updates::sorted_windows;
use crate::random::{Uniform, key};

/// Options of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutOptions {
    /// Whether examples are packed one after another, in place of one per row.
    pub is_packed: bool,
    /// Whether plans have several extents, in place of a single one.
    pub has_buckets: bool,
    /// Whether examples of similar length share an update, which changes the composition of updates.
    pub is_sorted: bool,
    /// Whether the loss reads only the rows with a target, in place of every row.
    pub reads_learned: bool,
    /// Whether examples with a common prefix share its computation, which changes the order of examples.
    pub shares_prefixes: bool,
    /// Whether every plan has room for images, because it trains the tower that reads them. Otherwise micro-batches without
    /// images run plans without a tower.
    pub always_sees: bool,
}

/// The size of an update, and of the memory for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Examples per update.
    pub batch: usize,
    /// Rows of `context` tokens that fit in memory at once.
    pub rows: usize,
    pub context: usize,
    /// Patches that become one token, for a model that sees images; 1 otherwise.
    pub block: usize,
    /// Consecutive examples that lie in one micro-batch because one loss compares them; 1 where each counts alone.
    pub together: usize,
}

/// A layout and its cost.
#[derive(Debug, Clone, PartialEq)]
pub struct Arrangement {
    pub layout: Layout,
    pub manner: LayoutOptions,
    /// Mean number of runs of each shape's plan per update.
    pub runs: Vec<f64>,
    /// Mean tokens of examples per update; a shared prefix counts once.
    pub real_tokens: f64,
    /// Share of the examples' tokens that are not computed because they share another example's computation.
    pub shared: f64,
    /// Share of computed rows that the loss reads.
    pub read_share: f64,
    /// Share of computed tokens that are padding.
    pub padding: f64,
    /// That share where every example is a row of `context` tokens.
    pub padding_of_rows: f64,
    /// Share of computed patches that are padding; `None` where no example has an image.
    pub patch_padding: Option<f64>,
    /// Whether images are frames, each a single token, and not divided into patches.
    pub is_of_frames: bool,
}

/// Token counts of packed plans are multiples of this: kernels work on tiles of this many tokens.
const TILE: usize = 128;
/// Lengths of padded rows are multiples of this, as matrix units of 8-bit floats want them.
const LENGTH_STEP: usize = 16;
/// Number of examples drawn to estimate the sizes of updates.
const DRAWN_EXAMPLES: usize = 1 << 16;
/// Least and most updates drawn.
const UPDATES: [usize; 2] = [16, 1024];
/// Share of the computation that another plan must save.
const WORTH: f64 = 0.01;

/// Chooses the shapes that leave the least padding for these lengths.
pub fn arrange(lengths: &Lengths, limits: BatchLimits, manner: LayoutOptions) -> Arrangement {
    let BatchLimits { batch, rows, context, together, .. } = limits;
    assert!(lengths.longest() <= context, "examples are no longer than the context");
    let updates = drawn(lengths, limits, manner);
    let trees = manner
        .shares_prefixes
        .then(|| lengths.largest_tree().tokens.min((rows * context).next_multiple_of(TILE)));
    // Shapes with room for images come with shapes without.
    let has_both = lengths.has_images() && lengths.shares().iter().any(|share| share.images == 0);
    let most = match manner.has_buckets {
        true if has_both && !manner.always_sees => MOST_SHAPES / 2,
        true => MOST_SHAPES,
        false => 1,
    };
    let sharing = |shapes: Vec<Shape>| {
        let endless = lengths.has_images().then(|| vec![ENDLESS; shapes.len()]);
        Layout::new(shapes).sharing(trees).with_images(endless).comparing(together)
    };
    let shape = |extent: usize| match manner.is_packed {
        true => Shape::Packed { tokens: extent, segments: batch },
        false => Shape::Padded { rows, len: extent },
    };
    let (largest, step) = match manner.is_packed {
        true => ((rows * context).next_multiple_of(TILE), TILE),
        false => (context, LENGTH_STEP),
    };
    // Padded to one length: the naive form, whose rows are as long as the context.
    let is_naive = !manner.is_packed && !manner.has_buckets;
    let mut wanted: Vec<usize> = vec![];
    let whole = sharing(match manner.has_buckets && !manner.is_packed && context > 1 {
        // A layout with several lengths sorts the rows of an update; the second length serves only that.
        true => vec![shape(context), shape(context - 1)],
        false => vec![shape(largest)],
    });
    for examples in &updates {
        for place in whole.places(examples) {
            let lengths = place.trees.iter().flatten().map(|index| examples[*index].extent.tokens);
            wanted.push(if manner.is_packed { place.used.tokens } else { lengths.max().unwrap_or(1) });
        }
    }
    let longest = if manner.is_packed { largest_unit(lengths, together).tokens } else { lengths.longest() };
    wanted.push(if is_naive { context } else { longest });
    let rounded = |extent: usize| extent.next_multiple_of(step).min(largest);
    let shapes: Vec<Shape> = extents_for(wanted, rounded, most).into_iter().map(shape).collect();
    let mut trial = Trial::new(sharing(shapes), &updates);
    if manner.reads_learned {
        trial = with_learned_rows(trial, lengths, &updates);
    }
    if lengths.has_images() {
        trial = with_image_room(trial, lengths, &updates, limits, has_both && !manner.always_sees);
    }
    let Trial { layout, runs, used, computed, .. } = trial;
    let of_update = |tokens: usize| tokens as f64 / updates.len() as f64;
    let real_tokens = of_update(used.tokens);
    let unshared = of_update(updates.iter().flatten().map(|member| member.extent.tokens).sum());
    let shapes = || 0..runs.len();
    let read_share = weighed(&runs, shapes().map(|shape| layout.most_learned(shape))) / computed;
    let patches = weighed(&runs, shapes().map(|shape| layout.images(shape).patches));
    Arrangement {
        real_tokens,
        read_share,
        shared: 1.0 - real_tokens / unshared,
        padding: 1.0 - real_tokens / computed,
        padding_of_rows: 1.0 - unshared / (batch * context) as f64,
        is_of_frames: limits.block == 1,
        patch_padding: lengths.has_images().then(|| 1.0 - of_update(used.patches) / patches),
        layout,
        manner,
        runs,
    }
}

/// Unlimited room for images, used before their need is known.
const ENDLESS: ImageRoom =
    ImageRoom { patches: usize::MAX / 4, images: usize::MAX / 4, largest: usize::MAX / 4 };

/// A layout and the statistics of laying out the drawn updates in it.
struct Trial {
    layout: Layout,
    /// Mean number of runs of each shape's plan per update.
    runs: Vec<f64>,
    /// Room that the examples of all updates take; a shared prefix counts once.
    used: Extent,
    /// Share of micro-batches without images.
    blind: f64,
    /// Mean tokens that an update computes, padding included.
    computed: f64,
}

impl Trial {
    fn new(layout: Layout, updates: &[Vec<Member>]) -> Trial {
        let (mut runs, mut used) = (vec![0.0; layout.shapes().len()], Extent::default());
        let (mut places, mut blind) = (0, 0);
        for place in updates.iter().flat_map(|examples| layout.places(examples)) {
            runs[place.shape] += 1.0 / updates.len() as f64;
            used = used + place.used;
            places += 1;
            blind += usize::from(place.used.images == 0);
        }
        let computed = weighed(&runs, layout.shapes().iter().map(|shape| shape.tokens()));
        Trial { layout, runs, used, blind: blind as f64 / places as f64, computed }
    }
}

/// Maximum in every dimension of what must fit one micro-batch: an example, or those that are compared.
fn largest_unit(lengths: &Lengths, together: usize) -> Extent {
    match (together, lengths.trees()) {
        (1, _) => lengths.most(),
        (_, []) => std::iter::repeat_n(lengths.most(), together).sum(),
        (_, trees) => trees.iter().map(Tree::extent).fold(lengths.most(), Extent::most),
    }
}

fn weighed(runs: &[f64], counts: impl Iterator<Item = usize>) -> f64 {
    runs.iter().zip(counts).map(|(runs, count)| runs * count as f64).sum()
}

/// Factors over the mean to try for the room of learned rows and images, in ascending order.
const ROOM: [f64; 6] = [1.0, 1.05, 1.1, 1.25, 1.5, 2.0];

/// Shapes with the least room for learned rows that causes practically no additional micro-batches.
fn with_learned_rows(of_all: Trial, lengths: &Lengths, updates: &[Vec<Member>]) -> Trial {
    let (shapes, trees) = (of_all.layout.shapes(), of_all.layout.trees());
    // Share of the computed tokens; a shared prefix has no learned ones.
    let learned: usize = updates.iter().flatten().map(|member| member.extent.learned).sum();
    let share = learned as f64 / of_all.used.tokens as f64;
    if share >= 1.0 {
        return of_all;
    }
    let most_computed = (1.0 + WORTH) * of_all.computed;
    let most_learned = largest_unit(lengths, of_all.layout.together()).learned;
    let with = |room: f64| {
        let rows = |(index, shape): (usize, &Shape)| {
            let all = shape.tokens();
            let read = match shape {
                // Every example of the batch may have as many learned tokens as any has.
                Shape::Padded { rows, .. } => rows * lengths.most().learned,
                Shape::Packed { .. } => {
                    let least = if index == 0 { most_learned } else { 1 };
                    ((room * share * all as f64).ceil() as usize).max(least)
                }
            };
            read.next_multiple_of(TILE).min(all)
        };
        let read = shapes.iter().enumerate().map(rows).collect();
        let seen = of_all.layout.seen().map(<[ImageRoom]>::to_vec);
        let layout = Layout::with_loss_rows(shapes.to_vec(), Some(read)).sharing(trees).with_images(seen);
        Trial::new(layout.comparing(of_all.layout.together()), updates)
    };
    let enough = ROOM.into_iter().map(with).find(|trial| trial.computed <= most_computed);
    enough.unwrap_or(of_all)
}

/// Shapes with the least room for images that causes practically no additional micro-batches. Where enough micro-batches have
/// no image and may do without room for one, every shape comes with one without.
fn with_image_room(
    of_all: Trial,
    lengths: &Lengths,
    updates: &[Vec<Member>],
    limits: BatchLimits,
    may_be_blind: bool,
) -> Trial {
    let Extent { tokens, patches, images, .. } = of_all.used;
    let most = largest_unit(lengths, limits.together);
    let is_twice = may_be_blind && of_all.blind >= WORTH;
    let most_computed = (1.0 + WORTH) * of_all.computed;
    let of = |room: f64| {
        let layout = &of_all.layout;
        let room_of = |shape: usize| {
            let all = layout.shapes()[shape].tokens() as f64;
            let needed = |count: usize, least: usize| {
                let mean = (room * all * count as f64 / tokens as f64).ceil() as usize;
                mean.max(if shape == 0 { least } else { 1 })
            };
            let patches = needed(patches, most.patches).next_multiple_of(patch_step(limits.block));
            ImageRoom {
                patches,
                images: needed(images, most.images),
                largest: lengths.largest_image().min(patches),
            }
        };
        let (mut shapes, mut seen, mut read) = (vec![], vec![], vec![]);
        for shape in 0..layout.shapes().len() {
            for room in [Some(room_of(shape)), is_twice.then(ImageRoom::default)].into_iter().flatten() {
                shapes.push(layout.shapes()[shape]);
                seen.push(room);
                read.push(layout.most_learned(shape));
            }
        }
        let read = layout.read(0).map(|_| read);
        let all = Layout::with_loss_rows(shapes, read).sharing(layout.trees()).with_images(Some(seen));
        all.comparing(layout.together())
    };
    let mut trial = Trial::new(of(ROOM[0]), updates);
    for room in &ROOM[1..] {
        if trial.computed <= most_computed {
            break;
        }
        trial = Trial::new(of(*room), updates);
    }
    trial
}

/// Patches of plans are multiples of tiles and of the blocks that become tokens. Where every patch becomes a token, patches are
/// frames, of which an example has few, so the step is smaller.
pub fn patch_step(block: usize) -> usize {
    if block == 1 {
        return LENGTH_STEP;
    }
    (1..)
        .map(|times| times * TILE)
        .find(|step| step.is_multiple_of(block))
        .expect("the product of both is one")
}

impl Arrangement {
    /// Mean tokens that an update computes, padding included.
    pub fn computed_tokens(&self) -> f64 {
        self.real_tokens / (1.0 - self.padding)
    }

    /// The layout in words: `3 plans of 8192, 6144, 4096 tokens, 4% padding instead of 61%`.
    pub fn words(&self) -> String {
        let shapes = self.layout.shapes();
        let plans = if shapes.len() == 1 { "1 plan".into() } else { format!("{} plans", shapes.len()) };
        let extent = |shape: &Shape| match shape {
            Shape::Packed { tokens, .. } => tokens.to_string(),
            Shape::Padded { len, .. } => len.to_string(),
        };
        let extents: Vec<String> = shapes.iter().map(extent).collect();
        let unit = match shapes[0] {
            Shape::Packed { .. } => "tokens".to_string(),
            Shape::Padded { rows, .. } => format!("tokens a row and {rows} rows"),
        };
        let percent = |share: f64| format!("{:.0}%", 100.0 * share);
        let padding = match (percent(self.padding), percent(self.padding_of_rows)) {
            (own, naive) if own == naive => format!("{own} padding"),
            (own, naive) => format!("{own} padding instead of {naive}"),
        };
        let read = match self.manner.reads_learned {
            true => format!(", the loss at {} of the rows", percent(self.read_share)),
            false => String::new(),
        };
        let shared = match self.manner.shares_prefixes {
            true => format!(", {} of the tokens shared", percent(self.shared)),
            false => String::new(),
        };
        let patches = match self.patch_padding {
            Some(share) => {
                let room: Vec<String> =
                    (0..shapes.len()).map(|shape| self.layout.images(shape).patches.to_string()).collect();
                let unit = if self.is_of_frames { "frames" } else { "patches" };
                format!(", {} {unit} with {} padding", room.join(", "), percent(share))
            }
            None => String::new(),
        };
        format!("{plans} of {} {unit}, {padding}{shared}{read}{patches}", extents.join(", "))
    }
}

/// The examples of some updates, in the order of a run.
fn drawn(lengths: &Lengths, limits: BatchLimits, manner: LayoutOptions) -> Vec<Vec<Member>> {
    let BatchLimits { batch, together, .. } = limits;
    let count = (DRAWN_EXAMPLES / batch).clamp(UPDATES[0], UPDATES[1]);
    let mut uniform = Uniform::new(key(batch as u64, 0x6c65));
    let mut all: Vec<Member> = vec![];
    for group in 0.. {
        if all.len() >= count * batch {
            break;
        }
        let (extent, prefix, examples) = lengths.draw(&mut uniform);
        all.extend(std::iter::repeat_n(Member { extent, group, prefix }, examples));
    }
    all.truncate(count * batch);
    if manner.is_sorted {
        let longest = |unit: &[Member]| unit.iter().map(|member| member.extent.tokens).max().unwrap_or(0);
        let tokens: Vec<usize> = all.chunks(together).map(longest).collect();
        let order = sorted_windows(&tokens, batch / together, 0);
        all = order.into_iter().flat_map(|unit| all[unit * together..][..together].to_vec()).collect();
    }
    all.chunks(batch).map(<[Member]>::to_vec).collect()
}

/// At most `most` extents, largest first, that leave the least padding in total for the given sizes; fewer where more save next
/// to nothing.
fn extents_for(mut wanted: Vec<usize>, rounded: impl Fn(usize) -> usize, most: usize) -> Vec<usize> {
    wanted.sort_unstable();
    let mut known: Vec<(usize, f64, f64)> = vec![];
    for extent in wanted {
        let room = rounded(extent);
        match known.last_mut().filter(|(last, ..)| *last == room) {
            Some((_, count, sum)) => (*count, *sum) = (*count + 1.0, *sum + extent as f64),
            None => known.push((room, 1.0, extent as f64)),
        }
    }
    let n = known.len();
    let total: f64 = known.iter().map(|(.., sum)| sum).sum();
    // computed[k][j]: least computation with k + 1 extents where the last one covers the size at j.
    let cost = |from: usize, to: usize| -> f64 {
        known[from..=to].iter().map(|(_, count, _)| count * known[to].0 as f64).sum()
    };
    let mut computed = vec![(0..n).map(|j| cost(0, j)).collect::<Vec<f64>>()];
    let mut from = vec![vec![0; n]];
    for k in 1..most.min(n) {
        let before = &computed[k - 1];
        let best = |j: usize| {
            let (mut least, mut at, mut count) = (before[j], 0, 0.0);
            for i in (1..=j).rev() {
                count += known[i].1;
                let now = before[i - 1] + count * known[j].0 as f64;
                if now < least {
                    (least, at) = (now, i);
                }
            }
            (least, at)
        };
        let (row, starts) = (0..n).map(best).unzip();
        computed.push(row);
        from.push(starts);
    }
    let least = computed[computed.len() - 1][n - 1];
    let enough = computed.iter().position(|row| row[n - 1] - least <= WORTH * total);
    let mut k = enough.expect("the last is as good as itself");
    let (mut extents, mut j) = (vec![], n - 1);
    loop {
        extents.push(known[j].0);
        // An extent that starts at 0 covers all remaining sizes. `from` is also 0 where one more extent saves nothing.
        let start = from[k][j];
        if start == 0 {
            return extents;
        }
        (j, k) = (start - 1, k - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKED: LayoutOptions = LayoutOptions {
        is_packed: true,
        has_buckets: true,
        is_sorted: false,
        reads_learned: false,
        shares_prefixes: false,
        always_sees: false,
    };
    const BUCKETED: LayoutOptions = LayoutOptions { is_packed: false, ..PACKED };
    const SORTED: LayoutOptions = LayoutOptions { is_sorted: true, ..BUCKETED };
    const NAIVE: LayoutOptions = LayoutOptions { has_buckets: false, ..BUCKETED };

    fn arranged(manner: LayoutOptions, rows: usize) -> Arrangement {
        arrange(
            &Lengths::drawn(200, 512),
            BatchLimits { batch: 32, rows, context: 512, block: 1, together: 1 },
            manner,
        )
    }

    #[test]
    fn the_extents_are_those_that_leave_the_least_empty() {
        let same = |extent| extent;
        assert_eq!(extents_for(vec![5, 5, 5], same, 4), [5]);
        assert_eq!(extents_for(vec![1, 2, 9, 10], same, 2), [10, 2]);
        assert_eq!(extents_for(vec![1, 50, 100], same, 3), [100, 50, 1]);
        assert_eq!(extents_for(vec![1, 50, 100], same, 1), [100]);
        assert_eq!(extents_for(vec![100, 100, 100, 99], same, 4), [100], "one more saves too little");
        // Compares with every choice of two extents.
        let wanted: Vec<usize> = (0..60).map(|i| 3 + (i * i * 7) % 101).collect();
        let most = *wanted.iter().max().unwrap();
        let computed = |extents: &[usize]| -> usize {
            wanted.iter().map(|w| extents.iter().filter(|e| *e >= w).min().unwrap()).sum()
        };
        let best = (1..most).map(|small| computed(&[most, small])).min().unwrap();
        assert_eq!(computed(&extents_for(wanted.clone(), same, 2)), best);
    }

    #[test]
    fn every_layout_reports_its_padding() {
        let [packed, bucketed, sorted, naive] =
            [PACKED, BUCKETED, SORTED, NAIVE].map(|manner| arranged(manner, 32));
        assert!((0.55..0.65).contains(&naive.padding), "{}", naive.padding);
        assert_eq!(naive.layout.shapes(), [Shape::Padded { rows: 32, len: 512 }]);
        assert_eq!(naive.words(), "1 plan of 512 tokens a row and 32 rows, 61% padding");
        assert!(packed.padding < 0.06, "{}", packed.words());
        assert!(packed.padding < sorted.padding && sorted.padding < bucketed.padding);
        assert!(bucketed.padding < naive.padding, "{} {}", bucketed.words(), naive.words());
        for all in [&packed, &bucketed, &sorted, &naive] {
            assert!(all.layout.shapes().len() <= MOST_SHAPES);
            assert!((all.real_tokens / (32.0 * 200.0) - 1.0).abs() < 0.02, "{}", all.real_tokens);
            assert!((all.runs.iter().sum::<f64>() - 1.0).abs() < 1e-9, "one micro-batch holds an update");
            assert!((all.padding_of_rows - naive.padding).abs() < 0.02, "{all:?}");
        }
        assert!(packed.layout.shapes().iter().all(|shape| shape.tokens().is_multiple_of(128)));
        assert!(packed.words().contains("% padding instead of 6"), "{}", packed.words());
    }

    #[test]
    fn less_room_makes_more_micro_batches() {
        let small = arranged(PACKED, 4);
        assert_eq!(small.layout.shapes()[0].tokens(), 2048);
        assert!(small.runs.iter().sum::<f64>() > 3.0 && small.padding < 0.08, "{small:?}");
        // Sorted by length within the update, batches of eight rows waste less than batches of thirty-two.
        assert!(arranged(BUCKETED, 8).padding < arranged(BUCKETED, 32).padding);
        let one_plan = arranged(LayoutOptions { has_buckets: false, ..PACKED }, 4);
        assert_eq!(one_plan.layout.shapes().len(), 1);
        assert!(one_plan.padding > small.padding);
    }

    #[test]
    fn equal_lengths_need_one_plan() {
        let lengths = Lengths::given(&[64], &[], [&[]; 2]).unwrap();
        for manner in [PACKED, BUCKETED, SORTED, NAIVE] {
            let all = arrange(
                &lengths,
                BatchLimits { batch: 8, rows: 4, context: 64, block: 1, together: 1 },
                manner,
            );
            assert_eq!((all.layout.shapes().len(), all.padding), (1, 0.0), "{manner:?}");
            assert_eq!(all.runs, [2.0]);
        }
    }

    #[test]
    fn one_long_example_fits_whatever_the_rest() {
        let lengths = Lengths::given(&[vec![3; 63], vec![100]].concat(), &[], [&[]; 2]).unwrap();
        let all =
            arrange(&lengths, BatchLimits { batch: 2, rows: 1, context: 100, block: 1, together: 1 }, PACKED);
        assert_eq!(all.layout.shapes()[0].tokens(), 128);
        let all = arrange(
            &lengths,
            BatchLimits { batch: 2, rows: 1, context: 100, block: 1, together: 1 },
            BUCKETED,
        );
        assert_eq!(all.layout.shapes()[0], Shape::Padded { rows: 1, len: 100 });
    }

    #[test]
    fn rows_that_are_read_have_room_and_little_more() {
        // A third of the tokens is learned, less of long examples.
        let tokens: Vec<usize> = (1..=64).map(|i| 8 * i).collect();
        let learned: Vec<usize> = tokens.iter().map(|tokens| 4 + tokens / 4).collect();
        let lengths = Lengths::given(&tokens, &learned, [&[]; 2]).unwrap();
        let limits = BatchLimits { batch: 32, rows: 8, context: 512, block: 1, together: 1 };
        for manner in [PACKED, BUCKETED, SORTED, NAIVE] {
            let all = arrange(&lengths, limits, manner);
            let some = arrange(&lengths, limits, LayoutOptions { reads_learned: true, ..manner });
            assert_eq!(all.read_share, 1.0);
            assert!(some.read_share < 0.6, "{manner:?} {}", some.words());
            assert!(
                some.computed_tokens() <= 1.02 * all.computed_tokens(),
                "{} {}",
                some.words(),
                all.words()
            );
            assert!(some.layout.read(0).is_some_and(|rows| rows >= lengths.most().learned));
            assert!(some.words().contains("% of the rows"), "{}", some.words());
        }
        // Where everything is learned, there is nothing to leave out.
        let whole = Lengths::given(&tokens, &[], [&[]; 2]).unwrap();
        assert_eq!(arrange(&whole, limits, LayoutOptions { reads_learned: true, ..PACKED }).read_share, 1.0);
    }

    #[test]
    fn images_have_room_and_little_more() {
        // Every third example is text; the others have an image of 400 patches and 100 tokens, and a question.
        let tokens: Vec<usize> = (0..60).map(|i| if i % 3 == 0 { 90 } else { 130 + i % 7 }).collect();
        let images: Vec<usize> = (0..60).map(|i| usize::from(i % 3 != 0)).collect();
        let patches: Vec<usize> = images.iter().map(|images| 400 * images).collect();
        let lengths = Lengths::given(&tokens, &vec![4; 60], [&images, &patches]).unwrap();
        let limits = BatchLimits { batch: 8, rows: 1, context: 512, block: 4, together: 1 };
        let all = arrange(&lengths, limits, LayoutOptions { reads_learned: true, ..PACKED });
        let layout = &all.layout;
        assert!(layout.images(0).patches >= 400 && layout.images(0).patches.is_multiple_of(128));
        assert!(all.patch_padding.unwrap() < 0.35 && all.padding < 0.2, "{}", all.words());
        let blind = (0..layout.shapes().len()).filter(|shape| layout.images(*shape).patches == 0);
        assert_eq!(blind.count(), layout.shapes().len() / 2, "{}", all.words());
        let sees = arrange(&lengths, limits, LayoutOptions { always_sees: true, ..PACKED });
        assert!((0..sees.layout.shapes().len()).all(|shape| sees.layout.images(shape).images > 0));
        // A micro-batch of text alone runs a plan without a tower.
        let text = Member { extent: Extent::whole(90), group: 0, prefix: Extent::default() };
        let read_little = Member { extent: Extent { learned: 4, ..text.extent }, ..text };
        let [place] = &layout.places(&[read_little])[..] else { panic!("one micro-batch") };
        assert_eq!(layout.images(place.shape), ImageRoom::default());
    }
}
