//! Examples of an update, laid out in micro-batches of static extents.
//!
//! What is learned does not depend on it: an update is the same examples with the same weights in every layout, and
//! sums are divided by the weight of the whole update. What depends on it is how much is computed for nothing.

use super::Example;
use crate::order::pack::Segment;

/// The extents of one plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Examples one after another, each a segment of its own; none is cut.
    Packed { tokens: usize, segments: usize },
    /// A row an example, filled up behind it.
    Padded { rows: usize, len: usize },
}

impl Shape {
    /// Tokens that are computed, whatever is in them.
    pub fn tokens(self) -> usize {
        match self {
            Shape::Packed { tokens, .. } => tokens,
            Shape::Padded { rows, len } => rows * len,
        }
    }

    /// Examples there is room for.
    pub fn segments(self) -> usize {
        match self {
            Shape::Packed { segments, .. } => segments,
            Shape::Padded { rows, .. } => rows,
        }
    }

    /// Where example `index` of a padded micro-batch begins.
    fn row_start(self, index: usize) -> Option<usize> {
        match self {
            Shape::Packed { .. } => None,
            Shape::Padded { len, .. } => Some(index * len),
        }
    }
}

/// The shapes that the plans of a run are made for, largest first and all packed or all padded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout(Vec<Shape>);

/// Plans of different extents that a run may have: each is compiled, captured and has inputs of its own.
pub const MOST_SHAPES: usize = 4;

impl Layout {
    pub fn new(shapes: Vec<Shape>) -> Layout {
        assert!((1..=MOST_SHAPES).contains(&shapes.len()), "{} shapes", shapes.len());
        let is_packed = |shape: &Shape| matches!(shape, Shape::Packed { .. });
        assert!(shapes.iter().all(|shape| is_packed(shape) == is_packed(&shapes[0])), "one kind of shapes");
        assert!(shapes.is_sorted_by(|a, b| a.tokens() > b.tokens()), "largest first");
        Layout(shapes)
    }

    pub fn shapes(&self) -> &[Shape] {
        &self.0
    }

    pub fn is_packed(&self) -> bool {
        matches!(self.0[0], Shape::Packed { .. })
    }

    /// Which of an update's examples, given by their lengths, lie in which micro-batch, and the shape of each. The same
    /// lengths give the same layout, and every example fits the largest shape alone.
    pub(crate) fn places(&self, lengths: &[usize]) -> Vec<Place> {
        match self.0[0] {
            Shape::Packed { tokens, segments } => self.packed(lengths, tokens, segments),
            Shape::Padded { rows, .. } => self.padded(lengths, rows),
        }
    }

    /// Longest first, each into the first micro-batch with room for it.
    fn packed(&self, lengths: &[usize], tokens: usize, segments: usize) -> Vec<Place> {
        let mut bins: Vec<(usize, Vec<usize>)> = vec![];
        for index in longest_first(lengths) {
            let len = lengths[index];
            assert!(len <= tokens, "an example of {len} tokens in a plan of {tokens}");
            match bins.iter_mut().find(|(used, members)| used + len <= tokens && members.len() < segments) {
                Some((used, members)) => {
                    *used += len;
                    members.push(index);
                }
                None => bins.push((len, vec![index])),
            }
        }
        let place = |(used, mut members): (usize, Vec<usize>)| {
            members.sort_unstable();
            Place { shape: self.smallest(|shape| shape.tokens() >= used), members }
        };
        bins.into_iter().map(place).collect()
    }

    /// Neighbours in length share a micro-batch, so that each is as long as its longest. Where there is one length only
    /// they stay in their order.
    fn padded(&self, lengths: &[usize], rows: usize) -> Vec<Place> {
        let order = if self.0.len() > 1 { longest_first(lengths) } else { (0..lengths.len()).collect() };
        let place = |members: &[usize]| {
            let longest = members.iter().map(|index| lengths[*index]).max().expect("a chunk has members");
            let holds = |shape: Shape| matches!(shape, Shape::Padded { len, .. } if len >= longest);
            Place { shape: self.smallest(holds), members: members.to_vec() }
        };
        order.chunks(rows).map(place).collect()
    }

    fn smallest(&self, holds: impl Fn(Shape) -> bool) -> usize {
        self.0.iter().rposition(|shape| holds(*shape)).expect("every example fits the largest shape")
    }
}

/// Indices by falling length, equal ones in their order.
fn longest_first(lengths: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(lengths[*index]));
    order
}

/// A micro-batch before it is filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// Of the layout's shapes.
    pub shape: usize,
    /// Of the update's examples.
    pub members: Vec<usize>,
}

/// Examples as a plan takes them. All vectors are as long as the plan has room; what is no example's predicts nothing
/// and counts nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatch {
    /// The plan: the shape's place in the layout.
    pub shape: usize,
    pub tokens: Vec<i32>,
    /// The token to predict; -1 where there is none.
    pub targets: Vec<i32>,
    /// The weight of the prediction in the loss.
    pub weights: Vec<f32>,
    /// The position within the example.
    pub positions: Vec<i32>,
    /// Where each example lies; as many as there are examples.
    pub segments: Vec<Segment>,
    /// The global index of each example, by which dropout draws.
    pub samples: Vec<u64>,
    /// The class of each example; -1 where it has none. As many as there is room for.
    pub labels: Vec<i32>,
    /// The weight of each class in the loss.
    pub label_weights: Vec<f32>,
}

impl MicroBatch {
    pub(crate) fn empty(shape: usize, extents: Shape) -> MicroBatch {
        let (tokens, segments) = (extents.tokens(), extents.segments());
        MicroBatch {
            shape,
            tokens: vec![0; tokens],
            targets: vec![-1; tokens],
            weights: vec![0.0; tokens],
            positions: vec![0; tokens],
            segments: Vec::with_capacity(segments),
            samples: Vec::with_capacity(segments),
            labels: vec![-1; segments],
            label_weights: vec![0.0; segments],
        }
    }

    /// Lays an example behind those that are there.
    pub(crate) fn push(&mut self, extents: Shape, example: Example<'_>, sample: u64, class_weights: &[f32]) {
        let index = self.segments.len();
        let behind = self.segments.last().map_or(0, |last| (last.start + last.len) as usize);
        let start = extents.row_start(index).unwrap_or(behind);
        let len = example.tokens.len();
        for (i, (token, next)) in example.tokens.iter().zip(1..).enumerate() {
            self.tokens[start + i] = *token as i32;
            self.positions[start + i] = i as i32;
            if let Some(weight) = example.weights.get(next).filter(|weight| **weight != 0.0) {
                self.targets[start + i] = example.tokens[next] as i32;
                self.weights[start + i] = *weight;
            }
        }
        if let Some(label) = example.label {
            self.labels[index] = label as i32;
            self.label_weights[index] = class_weights.get(label as usize).copied().unwrap_or(1.0);
        }
        self.segments.push(Segment { start: start as u32, len: len as u32 });
        self.samples.push(sample);
    }

    /// Tokens of examples; the rest is padding.
    pub fn real_tokens(&self) -> usize {
        self.segments.iter().map(|segment| segment.len as usize).sum()
    }

    /// For each token the global index of its example and its place in it, one after another; zeros where there is
    /// none. The same in every layout, so that dropout draws the same.
    pub fn draw_keys(&self) -> Vec<i32> {
        let mut keys = vec![0; 2 * self.tokens.len()];
        for (segment, sample) in self.segments.iter().zip(&self.samples) {
            for i in 0..segment.len {
                let at = 2 * (segment.start + i) as usize;
                (keys[at], keys[at + 1]) = (*sample as i32, i as i32);
            }
        }
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(tokens: &[usize], segments: usize) -> Layout {
        Layout::new(tokens.iter().map(|&tokens| Shape::Packed { tokens, segments }).collect())
    }

    fn padded(lens: &[usize], rows: usize) -> Layout {
        Layout::new(lens.iter().map(|&len| Shape::Padded { rows, len }).collect())
    }

    fn places(layout: &Layout, lengths: &[usize]) -> Vec<(usize, Vec<usize>)> {
        layout.places(lengths).into_iter().map(|place| (place.shape, place.members)).collect()
    }

    #[test]
    fn packing_cuts_no_example_and_takes_the_smallest_plan_that_holds() {
        // 7 and 3 fill ten; 5 and 4 leave one; 2 goes nowhere else.
        let lengths = [3, 5, 7, 4, 2];
        assert_eq!(places(&packed(&[10, 4], 8), &lengths), [(0, vec![0, 2]), (0, vec![1, 3]), (1, vec![4])]);
        // Two examples a micro-batch are allowed, so the third begins another.
        assert_eq!(places(&packed(&[10], 2), &[1, 1, 1]), [(0, vec![0, 1]), (0, vec![2])]);
        assert_eq!(places(&packed(&[30], 8), &lengths), [(0, vec![0, 1, 2, 3, 4])]);
    }

    #[test]
    fn rows_are_as_long_as_the_longest_of_their_micro_batch_needs() {
        let lengths = [3, 9, 2, 8, 4];
        let expected = [(0, vec![1, 3]), (1, vec![4, 0]), (2, vec![2])];
        assert_eq!(places(&padded(&[10, 5, 2], 2), &lengths), expected);
        // Padded to one length, examples stay where they are.
        assert_eq!(places(&padded(&[10], 2), &lengths), [(0, vec![0, 1]), (0, vec![2, 3]), (0, vec![4])]);
    }

    #[test]
    fn a_micro_batch_has_its_examples_and_padding_that_counts_nothing() {
        let answer = Example { tokens: &[5, 6, 7], weights: &[0.0, 0.0, 0.5], label: None };
        let class = Example { tokens: &[8, 9], weights: &[0.0, 0.0], label: Some(1) };
        let fill = |shape: Shape| {
            let mut batch = MicroBatch::empty(0, shape);
            batch.push(shape, answer, 40, &[1.0, 3.0]);
            batch.push(shape, class, 41, &[1.0, 3.0]);
            batch
        };
        let packed = fill(Shape::Packed { tokens: 6, segments: 3 });
        assert_eq!(packed.tokens, [5, 6, 7, 8, 9, 0]);
        assert_eq!(packed.targets, [-1, 7, -1, -1, -1, -1]);
        assert_eq!(packed.weights, [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(packed.positions, [0, 1, 2, 0, 1, 0]);
        assert_eq!(packed.segments, [Segment { start: 0, len: 3 }, Segment { start: 3, len: 2 }]);
        assert_eq!((packed.labels, packed.label_weights), (vec![-1, 1, -1], vec![0.0, 3.0, 0.0]));
        let padded = fill(Shape::Padded { rows: 2, len: 4 });
        assert_eq!(padded.tokens, [5, 6, 7, 0, 8, 9, 0, 0]);
        assert_eq!(padded.positions, [0, 1, 2, 0, 0, 1, 0, 0]);
        assert_eq!(padded.segments[1], Segment { start: 4, len: 2 });
        assert_eq!(padded.draw_keys(), [40, 0, 40, 1, 40, 2, 0, 0, 41, 0, 41, 1, 0, 0, 0, 0]);
        assert_eq!(padded.real_tokens(), 5);
    }
}
