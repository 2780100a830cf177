//! Lays out the examples of an update in micro-batches of static extents.
//!
//! The layout does not change what is learned: in every layout an update has the same examples with the same weights, and sums
//! are divided by the weight of the whole update. It only determines the amount of padding.

use std::collections::HashMap;
use std::ops::Range;

use super::lengths::Extent;
use super::{Example, Sighting};
use crate::order::pack::Segment;

/// The extents of one plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Examples one after another, each a segment of its own; none is cut.
    Packed { tokens: usize, segments: usize },
    /// One example per row, with padding at its end.
    Padded { rows: usize, len: usize },
}

impl Shape {
    /// Computed tokens, padding included.
    pub fn tokens(self) -> usize {
        match self {
            Shape::Packed { tokens, .. } => tokens,
            Shape::Padded { rows, len } => rows * len,
        }
    }

    /// Maximum number of examples.
    pub fn segments(self) -> usize {
        match self {
            Shape::Packed { segments, .. } => segments,
            Shape::Padded { rows, .. } => rows,
        }
    }

    /// Start of example `index` in a padded micro-batch.
    fn row_start(self, index: usize) -> Option<usize> {
        match self {
            Shape::Packed { .. } => None,
            Shape::Padded { len, .. } => Some(index * len),
        }
    }
}

/// The shapes that the plans of a run are made for, largest first, all packed or all padded, with the number of rows of each
/// that the loss reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    shapes: Vec<Shape>,
    /// `None` where the loss reads every row.
    read: Option<Vec<usize>>,
    /// Maximum tokens of a tree, where examples share prefixes.
    trees: Option<usize>,
    /// Each shape's room for images; `None` where no example has one.
    seen: Option<Vec<ImageRoom>>,
    /// Consecutive examples that lie in one micro-batch because one loss compares them; 1 where each counts alone.
    together: usize,
}

/// Maximum number of images and of their patches. For videos: the distinct images, and their frames, each of which counts as a
/// patch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ImageRoom {
    pub patches: usize,
    pub images: usize,
    /// Patches of the largest image, or frames of the longest video.
    pub largest: usize,
}

/// The frames of an example, or of a shared prefix: its first rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VideoRows {
    /// Row of the first frame.
    pub row: usize,
    /// For every frame, the index of its image among those that the micro-batch shows.
    pub images: Vec<u32>,
}

/// The size of an example, and of the prefix that it shares with its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Member {
    pub extent: Extent,
    /// Ignored where the prefix has no tokens.
    pub group: u32,
    pub prefix: Extent,
}

impl Member {
    /// The room it takes after its prefix.
    fn branch(&self) -> Extent {
        self.extent - self.prefix
    }
}

/// Maximum number of plans with different extents: each is compiled and captured and has inputs of its own.
pub const MOST_SHAPES: usize = 4;

impl Layout {
    /// A layout in which the loss reads every row.
    pub fn new(shapes: Vec<Shape>) -> Layout {
        Layout::with_loss_rows(shapes, None)
    }

    /// A layout in which the loss reads `read` rows of each shape, or every row.
    pub fn with_loss_rows(shapes: Vec<Shape>, read: Option<Vec<usize>>) -> Layout {
        assert!((1..=MOST_SHAPES).contains(&shapes.len()), "{} shapes", shapes.len());
        let is_packed = |shape: &Shape| matches!(shape, Shape::Packed { .. });
        assert!(shapes.iter().all(|shape| is_packed(shape) == is_packed(&shapes[0])), "one kind of shapes");
        let is_falling = |read: &Vec<usize>| read.len() == shapes.len() && read.is_sorted_by(|a, b| a >= b);
        assert!(read.as_ref().is_none_or(is_falling), "largest first: {read:?}");
        Layout { shapes, read, trees: None, seen: None, together: 1 }.checked()
    }

    /// Puts every `together` consecutive examples in one micro-batch. The largest shape must have room for them.
    pub fn comparing(self, together: usize) -> Layout {
        let has_room = self.shapes.iter().all(|shape| shape.segments() >= together);
        assert!(together > 0 && has_room, "{together} examples that are compared in {self:?}");
        Layout { together, ..self }
    }

    /// Number of examples that one loss compares; 1 where each counts alone.
    pub fn together(&self) -> usize {
        self.together
    }

    /// Gives shapes room for images. Only packed shapes may have it; of two shapes with equal tokens the first has more.
    pub fn with_images(self, seen: Option<Vec<ImageRoom>>) -> Layout {
        assert!(
            seen.as_ref().is_none_or(|seen| self.is_packed() && seen.len() == self.shapes.len()),
            "{seen:?}"
        );
        Layout { seen, ..self }.checked()
    }

    fn checked(self) -> Layout {
        let size = |shape: usize| (self.shapes[shape].tokens(), self.images(shape));
        let is_falling = (1..self.shapes.len()).all(|shape| size(shape - 1) >= size(shape));
        assert!(is_falling, "largest first: {self:?}");
        self
    }

    /// Puts examples with a common prefix into trees of at most `trees` tokens. Only for packed shapes.
    pub fn sharing(self, trees: Option<usize>) -> Layout {
        assert!(trees.is_none() || self.is_packed(), "trees lie one after another");
        Layout { trees, ..self }
    }

    /// Maximum tokens of a tree, where examples share prefixes.
    pub fn trees(&self) -> Option<usize> {
        self.trees
    }

    pub fn shapes(&self) -> &[Shape] {
        &self.shapes
    }

    /// Rows of a shape that the loss reads; `None` where it reads every row.
    pub fn read(&self, shape: usize) -> Option<usize> {
        self.read.as_ref().map(|read| read[shape])
    }

    /// Maximum learned tokens of a shape.
    pub fn most_learned(&self, shape: usize) -> usize {
        self.read(shape).unwrap_or_else(|| self.shapes[shape].tokens())
    }

    /// A shape's room for images.
    pub fn images(&self, shape: usize) -> ImageRoom {
        self.seen.as_ref().map_or(ImageRoom::default(), |seen| seen[shape])
    }

    /// Each shape's room for images; `None` where no example has one.
    pub fn seen(&self) -> Option<&[ImageRoom]> {
        self.seen.as_deref()
    }

    /// A shape's room in every dimension.
    pub(crate) fn room(&self, shape: usize) -> Extent {
        let ImageRoom { patches, images, .. } = self.images(shape);
        Extent { tokens: self.shapes[shape].tokens(), learned: self.most_learned(shape), images, patches }
    }

    pub fn is_packed(&self) -> bool {
        matches!(self.shapes[0], Shape::Packed { .. })
    }

    /// Assigns an update's examples, given by their sizes, to micro-batches, each with its shape. Equal sizes give equal
    /// layouts. Every example must fit the largest shape.
    pub(crate) fn places(&self, examples: &[Member]) -> Vec<BatchAssignment> {
        match self.shapes[0] {
            Shape::Packed { segments, .. } => self.packed(examples, segments),
            Shape::Padded { rows, .. } => self.padded(examples, rows),
        }
    }

    /// First fit by decreasing length.
    fn packed(&self, examples: &[Member], segments: usize) -> Vec<BatchAssignment> {
        struct Bin {
            used: Extent,
            members: Vec<usize>,
        }
        let room = self.room(0);
        let bundles = match self.together {
            1 => {
                self.trees_of(examples, room).into_iter().map(|(extent, tree)| (extent, vec![tree])).collect()
            }
            together => self.compared(examples, together, room),
        };
        let extents: Vec<Extent> = bundles.iter().map(|(extent, _)| *extent).collect();
        let mut bins: Vec<Bin> = vec![];
        for index in longest_first(&extents) {
            let own = extents[index];
            assert!(own.fits(room), "examples of {own:?} in a plan of {room:?}");
            let takes = |bin: &&mut Bin| {
                (bin.used + own).fits(room) && (bin.members.len() + 1) * self.together <= segments
            };
            match bins.iter_mut().find(takes) {
                Some(bin) => {
                    bin.used = bin.used + own;
                    bin.members.push(index);
                }
                None => bins.push(Bin { used: own, members: vec![index] }),
            }
        }
        let place = |Bin { used, mut members }: Bin| {
            members.sort_unstable();
            let trees = members.into_iter().flat_map(|index| bundles[index].1.clone()).collect();
            BatchAssignment { shape: self.smallest(used, |_| true), used, trees }
        };
        bins.into_iter().map(place).collect()
    }

    /// Groups of compared examples with their sizes: one tree where they share a prefix and it fits, otherwise one tree each.
    fn compared(&self, examples: &[Member], together: usize, room: Extent) -> Vec<(Extent, Vec<Vec<usize>>)> {
        let room = self.tree_room(room);
        let bundle = |(number, members): (usize, &[Member])| {
            let all = number * together..number * together + members.len();
            let branches: Extent = members[1..].iter().map(Member::branch).sum();
            let tree = members[0].extent + branches;
            let shares = self.trees.is_some() && members[0].prefix.tokens > 0 && tree.fits(room);
            match shares {
                true => (tree, vec![all.collect()]),
                false => (members.iter().map(|member| member.extent).sum(), all.map(|i| vec![i]).collect()),
            }
        };
        examples.chunks(together).enumerate().map(bundle).collect()
    }

    /// The room for one tree.
    fn tree_room(&self, room: Extent) -> Extent {
        Extent { tokens: self.trees.map_or(room.tokens, |most| most.min(room.tokens)), ..room }
    }

    /// Trees of examples with their sizes, in the order of their first members: one tree per group, or several where one would
    /// not fit. An example that shares nothing is a tree of its own.
    fn trees_of(&self, examples: &[Member], room: Extent) -> Vec<(Extent, Vec<usize>)> {
        let room = self.tree_room(room);
        let mut trees: Vec<(Extent, Vec<usize>)> = vec![];
        let mut growing: HashMap<u32, usize> = HashMap::new();
        for (index, example) in examples.iter().enumerate() {
            let shares = self.trees.is_some() && example.prefix.tokens > 0;
            let tree = growing.get(&example.group).filter(|_| shares).map(|tree| &mut trees[*tree]);
            match tree {
                Some((used, members)) if (*used + example.branch()).fits(room) => {
                    *used = *used + example.branch();
                    members.push(index);
                }
                _ => {
                    if shares {
                        growing.insert(example.group, trees.len());
                    }
                    trees.push((example.extent, vec![index]));
                }
            }
        }
        trees
    }

    /// Puts examples of similar length into the same micro-batch, so that each fits the shortest shape. Where there is only one
    /// length, examples keep their order.
    fn padded(&self, examples: &[Member], rows: usize) -> Vec<BatchAssignment> {
        let examples: Vec<Extent> = examples.iter().map(|example| example.extent).collect();
        let units: Vec<Extent> = examples
            .chunks(self.together)
            .map(|unit| unit.iter().copied().fold(unit[0], Extent::most))
            .collect();
        let units = if self.shapes.len() > 1 { longest_first(&units) } else { (0..units.len()).collect() };
        let of_unit = |unit: usize| unit * self.together..((unit + 1) * self.together).min(examples.len());
        let order: Vec<usize> = units.into_iter().flat_map(of_unit).collect();
        let rows = rows / self.together * self.together;
        let place = |members: &[usize]| {
            let extents = || members.iter().map(|index| examples[*index]);
            let longest = extents().map(|extent| extent.tokens).max().expect("a chunk has members");
            let holds = |shape: Shape| matches!(shape, Shape::Padded { len, .. } if len >= longest);
            let (used, trees) = (extents().sum(), members.iter().map(|index| vec![*index]).collect());
            BatchAssignment { shape: self.smallest(used, holds), used, trees }
        };
        order.chunks(rows).map(place).collect()
    }

    /// The smallest shape for which `holds` is true and that has room for `used`.
    fn smallest(&self, used: Extent, holds: impl Fn(Shape) -> bool) -> usize {
        let fits = |shape: &usize| holds(self.shapes[*shape]) && used.fits(self.room(*shape));
        (0..self.shapes.len()).rev().find(fits).expect("every example fits the largest shape")
    }
}

/// Consecutive tokens of an example.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Run {
    own: Segment,
    /// Rows of the example's prefix; empty where the run begins the example.
    prefix: Segment,
    /// Global index of the example.
    sample: u64,
}

/// Indices by descending length; equal lengths keep their order.
fn longest_first(examples: &[Extent]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..examples.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(examples[*index].tokens));
    order
}

/// The examples and the shape of a micro-batch before it is filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BatchAssignment {
    /// Index of the shape in the layout.
    pub shape: usize,
    /// Room that its examples take; a shared prefix counts once.
    pub used: Extent,
    /// Indices of examples in the update, grouped into trees.
    pub trees: Vec<Vec<usize>>,
}

/// Examples in the form in which a plan takes them. All vectors have the full length of the plan; padding has no targets and
/// weight 0.
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatch {
    /// The plan, as the index of its shape in the layout.
    pub shape: usize,
    /// Index of its lane among those of the rank.
    pub lane: usize,
    /// Number of rows that the loss reads.
    pub read: usize,
    /// Token ids; -1 where an image takes the token's place.
    pub tokens: Vec<i32>,
    /// The merge block that takes the token's place, counted over all images; -1 where there is none.
    pub seen: Vec<i32>,
    /// Token to predict; -1 where there is none.
    pub targets: Vec<i32>,
    /// Weight of the prediction in the loss.
    pub weights: Vec<f32>,
    /// Time, height and width within the example, which are equal for text.
    pub positions: Vec<[i32; 3]>,
    /// Token types: 1 in the second text of a pair, where the tokeniser has types.
    pub types: Vec<i32>,
    /// Images in the order of their patches, and the room for them.
    pub images: Vec<Sighting>,
    /// Row of each image's first token.
    image_rows: Vec<usize>,
    pub image_room: ImageRoom,
    /// The segment of each example, or of each tree of examples.
    pub segments: Vec<Segment>,
    /// Runs of consecutive tokens; an example without a shared prefix is a single run.
    runs: Vec<Run>,
    /// Global index of each example.
    pub samples: Vec<u64>,
    /// Index of each example in its table.
    pub numbers: Vec<usize>,
    /// Class of each example; -1 where it has none. Padded to the number of examples there is room for.
    pub labels: Vec<i32>,
    /// Weight of each example's class in the loss.
    pub label_weights: Vec<f32>,
    /// Sentences about examples of which nothing is learned because one of their frames cannot be decoded.
    pub left_out: Vec<String>,
}

impl MicroBatch {
    pub(crate) fn empty(layout: &Layout, shape: usize) -> MicroBatch {
        let (tokens, segments) = (layout.shapes[shape].tokens(), layout.shapes[shape].segments());
        MicroBatch {
            shape,
            lane: 0,
            read: layout.most_learned(shape),
            tokens: vec![0; tokens],
            targets: vec![-1; tokens],
            weights: vec![0.0; tokens],
            seen: vec![-1; tokens],
            positions: vec![[0; 3]; tokens],
            types: vec![0; tokens],
            images: vec![],
            image_rows: vec![],
            image_room: layout.images(shape),
            segments: Vec::with_capacity(segments),
            runs: vec![],
            samples: Vec::with_capacity(segments),
            numbers: Vec::with_capacity(segments),
            labels: vec![-1; segments],
            label_weights: vec![0.0; segments],
            left_out: vec![],
        }
    }

    /// The frames of every example that has some, and the images that they show, by their numbers in the set. A still image is
    /// shown once, however many frames it is repeated as. An image in two examples is shown twice, so that a plan has an upper
    /// bound on the frames per image.
    pub fn videos(&self) -> (Vec<VideoRows>, Vec<u32>) {
        let (mut videos, mut shown): (Vec<VideoRows>, Vec<u32>) = (vec![], vec![]);
        let mut before: Option<Sighting> = None;
        let frames = self.seen.iter().enumerate().filter(|(_, frame)| **frame >= 0);
        for (row, frame) in frames {
            let sighting = self.images[*frame as usize];
            if sighting.start == 0 {
                videos.push(VideoRows { row, images: vec![] });
                before = None;
            }
            if before.is_none_or(|before| !sighting.repeats(&before)) {
                shown.push(sighting.image);
            }
            let video = videos.last_mut().expect("frames are the first rows of their example");
            video.images.push(shown.len() as u32 - 1);
            before = Some(sighting);
        }
        (videos, shown)
    }

    /// Removes the targets of the segment that contains a row.
    pub(crate) fn leave_out(&mut self, row: usize, words: String) {
        let holds = |segment: &&Segment| (segment.start..segment.start + segment.len).contains(&(row as u32));
        let segment = self.segments.iter().find(holds).expect("a row of an example");
        let rows = segment.start as usize..(segment.start + segment.len) as usize;
        self.targets[rows.clone()].fill(-1);
        self.weights[rows].fill(0.0);
        self.left_out.push(words);
    }

    /// Appends a tree of examples with their global indices, which share the first `prefix` tokens.
    pub(crate) fn push(
        &mut self,
        extents: Shape,
        tree: &[(Example<'_>, u64)],
        prefix: usize,
        class_weights: &[f32],
    ) {
        let index = self.segments.len();
        let behind = self.segments.last().map_or(0, |last| (last.start + last.len) as usize);
        let start = extents.row_start(index).unwrap_or(behind);
        let mut end = start;
        let trunk = Segment { start: start as u32, len: prefix as u32 };
        for (number, (example, sample)) in tree.iter().enumerate() {
            let positions = example.positions();
            if number == 0 && prefix > 0 {
                let none = Segment { len: 0, ..trunk };
                end = self.write_part(*example, &positions, *sample, 0..prefix, end, none);
            }
            end = self.write_part(*example, &positions, *sample, prefix..example.tokens.len(), end, trunk);
            if let Some(label) = example.label {
                self.labels[index] = label as i32;
                self.label_weights[index] = class_weights.get(label as usize).copied().unwrap_or(1.0);
            }
            self.samples.push(*sample);
        }
        self.segments.push(Segment { start: start as u32, len: (end - start) as u32 });
    }

    /// Writes a part of an example after its prefix, and returns the row where it ends.
    fn write_part(
        &mut self,
        example: Example<'_>,
        positions: &[[i32; 3]],
        sample: u64,
        part: Range<usize>,
        start: usize,
        prefix: Segment,
    ) -> usize {
        for (at, i) in part.clone().enumerate() {
            self.tokens[start + at] = example.tokens[i] as i32;
            self.positions[start + at] = positions[i];
            if let Some(weight) = example.weights.get(i + 1).filter(|weight| **weight != 0.0) {
                self.targets[start + at] = example.tokens[i + 1] as i32;
                self.weights[start + at] = *weight;
            }
        }
        for image in example.images.iter().filter(|image| part.contains(&(image.start as usize))) {
            let row = start + image.start as usize - part.start;
            let first: usize = self.images.iter().map(Sighting::blocks).sum();
            for block in 0..image.tokens as usize {
                self.tokens[row + block] = -1;
                self.seen[row + block] = (first + block) as i32;
            }
            self.images.push(*image);
            self.image_rows.push(row);
        }
        self.runs.push(Run { own: Segment { start: start as u32, len: part.len() as u32 }, prefix, sample });
        start + part.len()
    }

    /// Assigns to the tokens of an image the merge blocks that the text sees, as many as it has tokens. Initially these are its
    /// first ones.
    pub(crate) fn show(&mut self, number: usize, blocks: &[u32]) {
        let (image, row) = (self.images[number], self.image_rows[number]);
        assert_eq!(blocks.len(), image.tokens as usize, "a block a token");
        let (first, corner) = (self.seen[row], self.positions[row]);
        for (row, block) in (row..).zip(blocks) {
            let offset = image.grid.offset(*block as usize, image.merge);
            self.seen[row] = first + *block as i32;
            self.positions[row] = [0, 1, 2].map(|axis| corner[axis] + offset[axis]);
        }
    }

    /// Number of tokens that are not padding.
    pub fn real_tokens(&self) -> usize {
        self.segments.iter().map(|segment| segment.len as usize).sum()
    }

    /// The example, as an index into `samples`, that each target belongs to: for all rows, or for those that the loss reads.
    pub fn answered(&self, read: bool) -> Vec<Option<u32>> {
        let mut of_row = vec![None; self.targets.len()];
        let numbers: HashMap<u64, u32> =
            self.samples.iter().enumerate().map(|(number, sample)| (*sample, number as u32)).collect();
        for run in &self.runs {
            let rows = run.own.start as usize..(run.own.start + run.own.len) as usize;
            for row in rows.filter(|row| self.targets[*row] >= 0) {
                of_row[row] = numbers.get(&run.sample).copied();
            }
        }
        match read {
            true => {
                of_row.into_iter().zip(&self.targets).filter(|(_, t)| **t >= 0).map(|(of, _)| of).collect()
            }
            false => of_row,
        }
    }

    /// The rows that the loss reads, the token to predict from each, and its weight; padded with -1, -1 and 0.
    pub fn read_rows(&self) -> (Vec<i32>, Vec<i32>, Vec<f32>) {
        let rows = || (0..self.targets.len()).filter(|row| self.targets[*row] >= 0);
        fn filled<T: Copy>(values: impl Iterator<Item = T>, count: usize, rest: T) -> Vec<T> {
            values.chain(std::iter::repeat(rest)).take(count).collect()
        }
        debug_assert!(rows().count() <= self.read, "the layout leaves room for all that is read");
        (
            filled(rows().map(|row| row as i32), self.read, -1),
            filled(rows().map(|row| self.targets[row]), self.read, -1),
            filled(rows().map(|row| self.weights[row]), self.read, 0.0),
        )
    }

    /// For each token, the global index of its example and its position in it, interleaved; zeros for padding. They are the
    /// same in every layout, so that dropout is too; a prefix has those of its first example.
    pub fn draw_keys(&self) -> Vec<i32> {
        let mut keys = vec![0; 2 * self.tokens.len()];
        for run in &self.runs {
            for i in 0..run.own.len {
                let at = 2 * (run.own.start + i) as usize;
                (keys[at], keys[at + 1]) = (run.sample as i32, (run.prefix.len + i) as i32);
            }
        }
        keys
    }

    /// For each token, the rows that it attends to: [a, b) of the prefix and [c, d) of its own run, interleaved; empty for
    /// padding.
    pub fn intervals(&self) -> Vec<i32> {
        let mut all = vec![0; 4 * self.tokens.len()];
        for Run { own, prefix, .. } in &self.runs {
            for i in 0..own.len {
                let row = own.start + i;
                // Where only one interval is not empty, it comes first.
                let seen = match prefix.len {
                    0 => [own.start, row + 1, 0, 0],
                    len => [prefix.start, prefix.start + len, own.start, row + 1],
                };
                let at = 4 * row as usize;
                all[at..at + 4].copy_from_slice(&seen.map(|row| row as i32));
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vision::Grid;

    fn packed(tokens: &[usize], segments: usize) -> Layout {
        Layout::new(tokens.iter().map(|&tokens| Shape::Packed { tokens, segments }).collect())
    }

    fn padded(lens: &[usize], rows: usize) -> Layout {
        Layout::new(lens.iter().map(|&len| Shape::Padded { rows, len }).collect())
    }

    /// An example that shares nothing.
    fn alone(extent: Extent) -> Member {
        Member { extent, group: 0, prefix: Extent::default() }
    }

    fn places(layout: &Layout, lengths: &[usize]) -> Vec<(usize, Vec<usize>)> {
        let whole: Vec<Member> = lengths.iter().map(|tokens| alone(Extent::whole(*tokens))).collect();
        layout.places(&whole).into_iter().map(|place| (place.shape, place.trees.concat())).collect()
    }

    #[test]
    fn packing_cuts_no_example_and_takes_the_smallest_plan_that_holds() {
        // 7 and 3 fill ten; 5 and 4 leave one; 2 fits neither.
        let lengths = [3, 5, 7, 4, 2];
        assert_eq!(places(&packed(&[10, 4], 8), &lengths), [(0, vec![0, 2]), (0, vec![1, 3]), (1, vec![4])]);
        // A micro-batch has room for two examples, so the third begins another.
        assert_eq!(places(&packed(&[10], 2), &[1, 1, 1]), [(0, vec![0, 1]), (0, vec![2])]);
        assert_eq!(places(&packed(&[30], 8), &lengths), [(0, vec![0, 1, 2, 3, 4])]);
    }

    #[test]
    fn a_micro_batch_has_room_for_what_is_read() {
        let extent = |tokens, learned| alone(Extent { learned, ..Extent::whole(tokens) });
        let examples = [extent(6, 3), extent(4, 1), extent(3, 2), extent(2, 2)];
        let shapes = || [16, 8].map(|tokens| Shape::Packed { tokens, segments: 8 }).to_vec();
        let layout = Layout::with_loss_rows(shapes(), Some(vec![4, 2]));
        let found: Vec<_> =
            layout.places(&examples).into_iter().map(|p| (p.shape, p.trees.concat())).collect();
        // All of them would fit sixteen tokens, but only four rows are read of those, and two of the small plan.
        assert_eq!(found, [(0, vec![0, 1]), (0, vec![2, 3])]);
        let layout = Layout::with_loss_rows(shapes(), Some(vec![8, 2]));
        assert_eq!(layout.places(&examples)[0].trees.concat(), [0, 1, 2, 3]);
    }

    #[test]
    fn examples_of_a_group_lie_behind_their_prefix() {
        let of = |tokens, group, prefix| Member {
            extent: Extent { learned: 1, ..Extent::whole(tokens) },
            group,
            prefix: Extent { learned: 0, ..Extent::whole(prefix) },
        };
        let examples = [of(9, 0, 6), of(7, 1, 0), of(8, 0, 6), of(12, 2, 10), of(9, 0, 6), of(11, 2, 10)];
        let layout = packed(&[32], 8);
        // A layout without trees shares nothing: 32 tokens hold four of them.
        assert_eq!(layout.places(&examples).len(), 2);
        let layout = layout.sharing(Some(13));
        let [one, two] = &layout.places(&examples)[..] else { panic!("two micro-batches") };
        // The third of its group would make a tree of 14 tokens, and begins another.
        assert_eq!((one.trees.clone(), one.used.tokens), (vec![vec![0, 2], vec![1], vec![3, 5]], 31));
        assert_eq!((two.trees.clone(), two.used.tokens), (vec![vec![4]], 9));
    }

    #[test]
    fn a_branch_sees_its_prefix_and_itself() {
        let shape = Shape::Packed { tokens: 8, segments: 3 };
        let mut batch = MicroBatch::empty(&Layout::new(vec![shape]).sharing(Some(8)), 0);
        let [a, b] = [[5, 6, 7, 8], [5, 6, 9, 1]];
        let weights = [0.0, 0.0, 0.0, 1.0];
        let of = |tokens| Example { tokens, weights: &weights, label: None, images: &[] };
        batch.push(shape, &[(of(&a), 40), (of(&b), 41)], 2, &[]);
        batch.push(
            shape,
            &[(Example { tokens: &[3], weights: &[0.0], label: None, images: &[] }, 42)],
            0,
            &[],
        );
        assert_eq!(batch.tokens, [5, 6, 7, 8, 9, 1, 3, 0]);
        assert_eq!(batch.positions, [0, 1, 2, 3, 2, 3, 0, 0].map(|at| [at; 3]));
        assert_eq!(batch.targets, [-1, -1, 8, -1, 1, -1, -1, -1]);
        assert_eq!(batch.segments, [Segment { start: 0, len: 6 }, Segment { start: 6, len: 1 }]);
        assert_eq!(batch.samples, [40, 41, 42]);
        let rows: Vec<[i32; 4]> = batch.intervals().chunks(4).map(|row| row.try_into().unwrap()).collect();
        let expected = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 2, 2, 3], [0, 2, 2, 4], [0, 2, 4, 5], [0, 2, 4, 6]];
        assert_eq!(rows[..6], expected);
        assert_eq!(rows[6..], [[6, 7, 0, 0], [0, 0, 0, 0]]);
        assert_eq!(batch.draw_keys(), [40, 0, 40, 1, 40, 2, 40, 3, 41, 2, 41, 3, 42, 0, 0, 0]);
    }

    #[test]
    fn rows_are_as_long_as_the_longest_of_their_micro_batch_needs() {
        let lengths = [3, 9, 2, 8, 4];
        let expected = [(0, vec![1, 3]), (1, vec![4, 0]), (2, vec![2])];
        assert_eq!(places(&padded(&[10, 5, 2], 2), &lengths), expected);
        // Padded to one length, examples keep their order.
        assert_eq!(places(&padded(&[10], 2), &lengths), [(0, vec![0, 1]), (0, vec![2, 3]), (0, vec![4])]);
    }

    #[test]
    fn a_micro_batch_has_its_examples_and_padding_that_counts_nothing() {
        let answer = Example { tokens: &[5, 6, 7], weights: &[0.0, 0.0, 0.5], label: None, images: &[] };
        let class = Example { tokens: &[8, 9], weights: &[0.0, 0.0], label: Some(1), images: &[] };
        let fill = |shape: Shape| {
            let mut batch = MicroBatch::empty(&Layout::with_loss_rows(vec![shape], Some(vec![2])), 0);
            batch.push(shape, &[(answer, 40)], 0, &[1.0, 3.0]);
            batch.push(shape, &[(class, 41)], 0, &[1.0, 3.0]);
            batch
        };
        let packed = fill(Shape::Packed { tokens: 6, segments: 3 });
        assert_eq!(packed.tokens, [5, 6, 7, 8, 9, 0]);
        assert_eq!(packed.targets, [-1, 7, -1, -1, -1, -1]);
        assert_eq!(packed.weights, [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(packed.positions, [0, 1, 2, 0, 1, 0].map(|at| [at; 3]));
        assert_eq!(packed.segments, [Segment { start: 0, len: 3 }, Segment { start: 3, len: 2 }]);
        assert_eq!(packed.read_rows(), (vec![1, -1], vec![7, -1], vec![0.5, 0.0]));
        assert_eq!((packed.labels, packed.label_weights), (vec![-1, 1, -1], vec![0.0, 3.0, 0.0]));
        let padded = fill(Shape::Padded { rows: 2, len: 4 });
        assert_eq!(padded.tokens, [5, 6, 7, 0, 8, 9, 0, 0]);
        assert_eq!(padded.positions, [0, 1, 2, 0, 0, 1, 0, 0].map(|at| [at; 3]));
        assert_eq!(padded.segments[1], Segment { start: 4, len: 2 });
        assert_eq!(padded.draw_keys(), [40, 0, 40, 1, 40, 2, 0, 0, 41, 0, 41, 1, 0, 0, 0, 0]);
        assert_eq!(padded.real_tokens(), 5);
    }

    /// Two questions about one image of two by two blocks after a token, and another question with an image of its own.
    #[test]
    fn a_shared_image_is_laid_out_once() {
        let shape = Shape::Packed { tokens: 18, segments: 2 };
        let layout = Layout::new(vec![shape]).sharing(Some(12));
        let room = ImageRoom { patches: 24, images: 2, largest: 16 };
        let mut batch = MicroBatch::empty(&layout.with_images(Some(vec![room])), 0);
        let grid = Grid { rows: 4, columns: 4 };
        let shared = [Sighting { start: 1, image: 7, grid, merge: 2, tokens: 4, hash: 0 }];
        let [a, b] = [[5, 9, 9, 9, 9, 6, 1], [5, 9, 9, 9, 9, 6, 2]];
        let weights = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0];
        let of = |tokens| Example { tokens, weights: &weights, label: None, images: &shared };
        batch.push(shape, &[(of(&a), 0), (of(&b), 1)], 5, &[]);
        let grid = Grid { rows: 2, columns: 4 };
        let wide = [Sighting { start: 0, image: 3, grid, merge: 2, tokens: 2, hash: 0 }];
        let alone = Example { tokens: &[9, 9, 4], weights: &[0.0, 0.0, 1.0], label: None, images: &wide };
        batch.push(shape, &[(alone, 2)], 0, &[]);
        assert_eq!(batch.tokens[..12], [5, -1, -1, -1, -1, 6, 1, 6, 2, -1, -1, 4]);
        assert_eq!(batch.seen[..12], [-1, 0, 1, 2, 3, -1, -1, -1, -1, 4, 5, -1]);
        assert_eq!(batch.images.iter().map(|image| image.image).collect::<Vec<_>>(), [7, 3]);
        assert_eq!(batch.positions[1..5], [[1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2]]);
        // In every branch the text continues after the longer side of the image.
        assert_eq!(batch.positions[5..9], [[3; 3], [4; 3], [3; 3], [4; 3]]);
        assert_eq!(batch.positions[9..12], [[0, 0, 0], [0, 0, 1], [2; 3]]);
        assert_eq!(batch.read_rows().0[..3], [5, 7, 10]);
    }

    /// Two of four blocks after a token, and one of two in a second example.
    #[test]
    fn tokens_of_an_image_are_the_visible_blocks() {
        let shape = Shape::Packed { tokens: 8, segments: 2 };
        let room = ImageRoom { patches: 24, images: 2, largest: 16 };
        let mut batch = MicroBatch::empty(&Layout::new(vec![shape]).with_images(Some(vec![room])), 0);
        let square = [Sighting {
            start: 1,
            image: 0,
            grid: Grid { rows: 4, columns: 4 },
            merge: 2,
            tokens: 2,
            hash: 0,
        }];
        let wide = [Sighting {
            start: 0,
            image: 1,
            grid: Grid { rows: 2, columns: 4 },
            merge: 2,
            tokens: 1,
            hash: 0,
        }];
        let weights = [0.0, 0.0, 0.0, 1.0];
        let one = Example { tokens: &[5, 9, 9, 6], weights: &weights, label: None, images: &square };
        let two = Example { tokens: &[9, 4], weights: &[0.0, 1.0], label: None, images: &wide };
        batch.push(shape, &[(one, 0)], 0, &[]);
        batch.push(shape, &[(two, 1)], 0, &[]);
        batch.show(0, &[1, 2]);
        batch.show(1, &[1]);
        assert_eq!(batch.tokens[..6], [5, -1, -1, 6, -1, 4]);
        assert_eq!(batch.seen[..6], [-1, 1, 2, -1, 5, -1], "the second image begins behind all four blocks");
        // Blocks keep their positions in the whole image, and the text follows its longer side.
        let positions = [[0; 3], [1, 1, 2], [1, 2, 1], [3; 3], [0, 0, 1], [2; 3]];
        assert_eq!(batch.positions[..6], positions);
    }
}
