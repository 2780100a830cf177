//! Examples for fine-tuning: conversations, with or without images, and texts or pairs with a class, laid out in micro-batches.
//!
//! A set is tokenised and kept in memory: lengths are known before examples are laid out, and an epoch is a permutation.
//!
//! ```text
//! formats::Records   rows with their fields   (synthetic, shapes: generated rows, without and with images)
//!    -> conversation   instructions in their published formats      labelled   texts and pairs with a class
//!    -> preference     preferred and rejected answers to one prompt, and answers judged as wanted or not
//!    -> visual         conversations with images, and questions about them
//!    -> frames         videos and still images with a text, from tar shards
//!    -> template       conversations rendered by a model's template   (model_files: where it is found; jinja: its language)
//!    -> mask           the learned parts of the text   (marks: of an answer)
//!    -> encoder        text to tokens with offsets; pairs in a tokeniser's frame
//! row_reader runs these steps for every row, in parallel
//! sides      keeps rows that share images on the same side of the split
//! sets       `open`, which reads and splits a set and counts skipped rows
//! spans      the trained and untrained parts of an example, for inspection
//! question   questions to a model, rendered by the same template
//! drawn      examples of the synthetic language with drawn lengths
//! prefixes   shared prefixes of examples
//!    -> lengths      the distribution of example sizes
//!    -> arrangement  extents of plans that leave little padding
//!    -> layout       examples in micro-batches of these extents
//!    -> updates      examples in training order, by update, and the cursor
//! ```

use std::ops::Range;
use std::sync::Arc;

pub(crate) mod arrangement;
pub mod choices;
mod conversation;
pub(crate) mod drawn;
mod encoder;
mod frames;
mod labelled;
pub(crate) mod layout;
pub(crate) mod lengths;
mod marks;
mod mask;
mod preference;
mod prefixes;
mod question;
mod row_error;
mod row_reader;
mod sets;
mod shapes;
mod sides;
mod spans;
mod synthetic;
mod template;
pub(crate) mod updates;
mod visual;

use crate::order::mixture::{Mixture, MixtureSource};
use crate::order::permutation::Order;
use crate::random::{fingerprint, key};
use crate::vision::{Grid, Stretch, positions};
pub use conversation::{Conversation, Schema};
pub use frames::{FrameSpec, MOST_FRAMES, frames_in_words};
pub use labelled::Columns;
pub(crate) use labelled::{Classes, LabelCounts, label_of};
use layout::Member;
use lengths::Extent;
pub use mask::TrainOn;
use prefixes::Prefixes;
pub use question::{QuestionPart, Questions, Turn};
pub use sets::{
    ClassCount, ExampleKind, ExampleSets, ExampleSpec, ImageCounts, SetDescription, TooLong, class_names,
    open, open_reporting, shows_images,
};
pub use spans::spans;
pub use template::{CHATML, ChatTemplate, Date, Refusal, Rendered, template_text};
pub use visual::{MAX_IMAGE_BYTES, VisionSpec};

/// An example, borrowed from a table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Example<'a> {
    pub tokens: &'a [u32],
    /// The weight in the loss of predicting `tokens[i]` from those before it; 0 for tokens that are only read. The first token
    /// is predicted from nothing and has weight 0.
    pub weights: &'a [f32],
    /// The class of the example, where classes are learned.
    pub label: Option<u32>,
    /// Images among the tokens, in order.
    pub images: &'a [Sighting],
}

/// An image among the tokens of an example. It has one token per merge block of its patches, or per block of a subset, and none
/// of them is learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sighting {
    /// Position of its first token.
    pub start: u32,
    /// Index in the set's [`ImageStore`](crate::vision::ImageStore).
    pub image: u32,
    pub grid: Grid,
    /// Side of a merge block, in patches.
    pub merge: usize,
    /// Number of its tokens.
    pub tokens: u32,
    /// Hash of the image's bytes.
    pub hash: u64,
}

impl Sighting {
    /// The positions of its tokens in the example.
    pub fn range(&self) -> Range<usize> {
        self.start as usize..(self.start + self.tokens) as usize
    }

    /// Number of merge blocks, of which the text sees as many as there are tokens.
    fn blocks(&self) -> usize {
        self.grid.tokens(self.merge)
    }

    /// Whether it shows the same image as the one before it: repeated frames of a still image, which is encoded once.
    fn repeats(&self, before: &Sighting) -> bool {
        self.grid == Grid::FRAME && self.image == before.image
    }
}

impl Example<'_> {
    /// Time, height and width of every token. Where the text sees a subset of an image's blocks, positions are those of its
    /// first ones.
    fn positions(&self) -> Vec<[i32; 3]> {
        let (mut text, mut end) = (vec![], 0);
        for image in self.images {
            text.extend([Stretch::Text(image.start as usize - end), Stretch::Image(image.grid)]);
            end = image.range().end;
        }
        text.push(Stretch::Text(self.tokens.len() - end));
        // Without images, positions do not depend on the size of a block.
        let mut all = positions(text, self.images.first().map_or(1, |image| image.merge)).0;
        for image in self.images {
            let end = image.range().end;
            all.drain(end..end + image.blocks() - image.tokens as usize);
        }
        all
    }

    /// Folds the example into a hash.
    pub(crate) fn fold_into(&self, hash: u64) -> u64 {
        let words = self.tokens.iter().copied().chain(self.weights.iter().map(|weight| weight.to_bits()));
        let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        let hash = key(key(hash, fingerprint(&bytes)), self.label.map_or(u64::MAX, u64::from));
        self.images.iter().fold(hash, |hash, image| key(hash, image.hash))
    }

    /// Whether there is anything to learn from it.
    pub fn is_supervised(&self) -> bool {
        self.label.is_some() || self.weights.iter().any(|weight| *weight != 0.0)
    }
}

/// Numbered examples, stored contiguously.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExampleTable {
    tokens: Vec<u32>,
    weights: Vec<f32>,
    labels: Vec<Option<u32>>,
    /// Start of the second text of each pair, where tokens have types.
    seconds: Vec<Option<u32>>,
    /// End of each example in `tokens`.
    ends: Vec<usize>,
    images: Vec<Sighting>,
    /// End of each example's images in `images`.
    image_ends: Vec<usize>,
    /// The prefixes that examples share, where shared prefixes are computed once.
    prefixes: Option<Prefixes>,
    /// Whether examples 2 i and 2 i + 1 are the chosen and the rejected answer to one prompt.
    is_paired: bool,
    /// The shares in which sources are drawn, where there are several.
    mixture: Option<Arc<Mixture>>,
}

impl ExampleTable {
    /// A table of pairs: a chosen answer, then the rejected one to the same prompt.
    pub fn of_pairs() -> ExampleTable {
        ExampleTable { is_paired: true, ..ExampleTable::default() }
    }

    /// Number of examples that are drawn, split and laid out as one unit: 2 for pairs.
    pub fn together(&self) -> usize {
        1 + usize::from(self.is_paired)
    }

    /// Number of units: pairs, or examples where each counts alone.
    pub fn units(&self) -> usize {
        self.count() / self.together()
    }

    /// Tokens of the longest example of a unit.
    fn unit_len(&self, unit: usize) -> usize {
        let examples = unit * self.together()..(unit + 1) * self.together();
        examples.map(|example| self.len_of(example)).max().expect("a unit has examples")
    }

    /// Appends an example. Tokens and weights must have the same length, above 0.
    pub fn push(&mut self, example: Example<'_>) {
        assert_eq!(example.tokens.len(), example.weights.len(), "a weight a token");
        assert!(!example.tokens.is_empty(), "an example has tokens");
        self.tokens.extend(example.tokens);
        self.weights.extend(example.weights);
        self.labels.push(example.label);
        self.seconds.push(None);
        self.images.extend(example.images);
        self.image_ends.push(self.images.len());
        self.ends.push(self.tokens.len());
    }

    /// Sets the start of the second text of the last example: tokens from there on have type 1.
    pub fn set_second(&mut self, start: Option<u32>) {
        *self.seconds.last_mut().expect("an example was pushed") = start;
    }

    /// The tokens of example `index` that have type 1; empty where all have type 0.
    pub(crate) fn second_of(&self, index: usize) -> Range<usize> {
        let len = self.len_of(index);
        self.seconds[index].map_or(len, |start| start as usize)..len
    }

    /// Appends an example whose images are numbered from `image_base` on in this table.
    pub(crate) fn push_renumbered(&mut self, example: Example<'_>, image_base: u32) {
        let renumbered = |sighting: &Sighting| Sighting { image: sighting.image + image_base, ..*sighting };
        let images: Vec<Sighting> = example.images.iter().map(renumbered).collect();
        self.push(Example { images: &images, ..example });
    }

    /// Number of images that examples show, counting each time an image is encoded.
    pub(crate) fn shown_images(&self) -> u64 {
        (0..self.count()).map(|index| self.extent_of(index).images as u64).sum()
    }

    /// Hash that changes with every token, weight, label and image.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.iter().fold(self.count() as u64, |hash, example| example.fold_into(hash))
    }

    /// Draws units of several consecutive sources in shares: for each source, its number of units and its weight.
    pub(crate) fn mix(&mut self, sources: &[(u64, f64)]) {
        let mut base = 0;
        let part = |(count, weight): &(u64, f64)| {
            base += count;
            // Shares are of examples, so each example counts as one token.
            MixtureSource { base: base - count, count: *count, weight: *weight, mean_tokens: 1.0 }
        };
        self.mixture = Some(Arc::new(Mixture::new(sources.iter().map(part).collect())));
        assert_eq!(base, self.units() as u64, "sources are all there is");
    }

    /// The order of units in the series of all epochs.
    pub(crate) fn order(&self, seed: u64) -> Order {
        match &self.mixture {
            Some(mixture) => Order::mixed(mixture.clone(), seed),
            None => Order::new(Some(self.units() as u64), seed),
        }
    }

    /// Units per epoch: all of them, or as many as are drawn until the first source has been read once.
    pub fn epoch_examples(&self) -> u64 {
        let Some(mixture) = &self.mixture else { return self.units() as u64 };
        (mixture.parts[0].count as f64 / mixture.share(0)).round() as u64
    }

    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// Tokens of example `index`.
    pub fn len_of(&self, index: usize) -> usize {
        self.ends[index] - self.start(index)
    }

    /// The size of example `index`.
    pub fn extent_of(&self, index: usize) -> Extent {
        let learned = self.get(index).weights[1..].iter().filter(|weight| **weight != 0.0).count();
        Extent { learned, ..self.beginning_of(index, self.len_of(index)) }
    }

    /// The size of the first `tokens` tokens of example `index`, of which nothing is learned.
    pub(crate) fn beginning_of(&self, index: usize, tokens: usize) -> Extent {
        let shown = self.get(index).images;
        let seen = shown.iter().enumerate().filter(|(_, image)| (image.start as usize) < tokens);
        let of_image = |(at, image): (usize, &Sighting)| Extent {
            images: usize::from(at == 0 || !image.repeats(&shown[at - 1])),
            patches: image.grid.patches(),
            ..Extent::default()
        };
        Extent { tokens, ..seen.map(of_image).sum() }
    }

    pub fn get(&self, index: usize) -> Example<'_> {
        let range = self.start(index)..self.ends[index];
        Example {
            tokens: &self.tokens[range.clone()],
            weights: &self.weights[range],
            label: self.labels[index],
            images: &self.images
                [if index == 0 { 0 } else { self.image_ends[index - 1] }..self.image_ends[index]],
        }
    }

    /// Patches of the largest image, or frames of the longest video; 0 where there is none.
    pub fn largest_image(&self) -> usize {
        let patches = self.images.iter().map(|image| match image.grid {
            // The frames of an example are its first tokens.
            Grid::FRAME => image.start as usize + 1,
            grid => grid.patches(),
        });
        patches.max().unwrap_or(0)
    }

    /// Finds prefixes that examples share, so that each is computed once. The answers of a pair share their prompt, and nothing
    /// with other pairs.
    pub fn share_prefixes(&mut self) {
        self.prefixes = Some(if self.is_paired { Prefixes::of_pairs(self) } else { Prefixes::of(self) });
    }

    /// Every prompt with the answer of the previous example, the first with that of the last, cut at `most` tokens. A model's
    /// scores of such answers show how far it has moved, independently of what it learned about the right ones.
    pub fn mismatched(&self, most: usize) -> ExampleTable {
        let mut table = ExampleTable::default();
        let prompt = |example: &Example<'_>| {
            example.weights.iter().position(|weight| *weight != 0.0).unwrap_or(example.tokens.len())
        };
        for index in 0..self.count() {
            let (asked, other) = (self.get(index), self.get((index + self.count() - 1) % self.count()));
            let (own, from) = (prompt(&asked), prompt(&other));
            let shown = asked.images.iter().take_while(|image| image.range().end <= own).count();
            let tokens = [&asked.tokens[..own], &other.tokens[from..]].concat();
            let weights = [&asked.weights[..own], &other.weights[from..]].concat();
            let len = tokens.len().min(most);
            let images = &asked.images[..shown];
            let example = Example { tokens: &tokens[..len], weights: &weights[..len], label: None, images };
            table.push(example);
        }
        table
    }

    /// Example `index` in the form that a layout takes.
    pub(crate) fn member(&self, index: usize) -> Member {
        let (group, prefix) = self.prefixes.as_ref().map_or((0, 0), |prefixes| prefixes.of_example(index));
        Member { extent: self.extent_of(index), group, prefix: self.beginning_of(index, prefix) }
    }

    pub fn iter(&self) -> impl Iterator<Item = Example<'_>> {
        (0..self.count()).map(|index| self.get(index))
    }

    fn start(&self, index: usize) -> usize {
        if index == 0 { 0 } else { self.ends[index - 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mismatched_prompts_have_the_answers_before_them() {
        let mut table = ExampleTable::default();
        for (tokens, prompt) in [(vec![1, 2, 3], 2), (vec![4, 5, 6, 7], 1), (vec![8, 9], 1)] {
            let weights: Vec<f32> = (0..tokens.len()).map(|at| f32::from(at >= prompt)).collect();
            table.push(Example { tokens: &tokens, weights: &weights, label: Some(1), images: &[] });
        }
        let tokens = |most: usize| -> Vec<Vec<u32>> {
            table.mismatched(most).iter().map(|example| example.tokens.to_vec()).collect()
        };
        assert_eq!(tokens(9), [vec![1, 2, 9], vec![4, 3], vec![8, 5, 6, 7]]);
        assert_eq!(tokens(3), [vec![1, 2, 9], vec![4, 3], vec![8, 5, 6]]);
        assert!(table.mismatched(9).iter().all(|example| example.is_supervised() && example.label.is_none()));
    }

    #[test]
    fn examples_round_trip_through_a_table() {
        let mut table = ExampleTable::default();
        let answer = Example { tokens: &[1, 2, 3], weights: &[0.0, 0.0, 1.0], label: None, images: &[] };
        let class = Example { tokens: &[4], weights: &[0.0], label: Some(1), images: &[] };
        let nothing = Example { tokens: &[5, 6], weights: &[0.0, 0.0], label: None, images: &[] };
        for example in [answer, class, nothing] {
            table.push(example);
        }
        assert_eq!(table.iter().collect::<Vec<_>>(), [answer, class, nothing]);
        assert_eq!((0..3).map(|i| table.len_of(i)).collect::<Vec<_>>(), [3, 1, 2]);
        assert_eq!(table.iter().map(|e| e.is_supervised()).collect::<Vec<_>>(), [true, true, false]);
    }
}
