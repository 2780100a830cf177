//! Encoded images as a source found them: their places, and their labels as written.

use std::collections::HashMap;
use std::sync::Arc;

use super::encoded::{Encoded, Storage};
use crate::error::DataError;
use crate::examples::{Classes, LabelCounts};
use crate::formats::{Skipped, SourceLocation};
use crate::images::set::ImageSet;
use crate::random::{fingerprint, key};

/// The labels to read with images.
#[derive(Clone, Copy)]
pub(in crate::images) enum LabelChoice<'a> {
    /// The label, in the field of this name where labels are fields.
    Label(Option<&'a str>),
    /// No labels: the images are to be classified.
    Nothing,
}

pub(in crate::images) struct FoundImages {
    pub kind: &'static str,
    pub files: usize,
    pub holder: Storage,
    pub labels: Labels,
    /// The name of each image in archives, where labels are not read.
    pub names: Vec<String>,
    /// Hash of the name of each image's sample: images of one sample are on one side.
    pub hashes: Vec<u64>,
    pub skipped: Skipped,
}

/// The label of each image. Distinct labels are stored once.
#[derive(Debug, Default, Clone, PartialEq)]
pub(in crate::images) struct Labels {
    names: Vec<(String, SourceLocation)>,
    numbers: HashMap<String, u32>,
    of: Vec<u32>,
}

impl Labels {
    pub fn push(&mut self, label: &str, place: impl FnOnce() -> SourceLocation) {
        let number = match self.numbers.get(label) {
            Some(number) => *number,
            None => {
                let number = self.names.len() as u32;
                self.numbers.insert(label.into(), number);
                self.names.push((label.into(), place()));
                number
            }
        };
        self.of.push(number);
    }

    /// Each distinct label, in the order of their numbers, with its first place.
    pub fn names(&self) -> &[(String, SourceLocation)] {
        &self.names
    }

    /// The number of each image's label.
    pub fn numbers(&self) -> &[u32] {
        &self.of
    }

    /// Adds the labels of a later part.
    pub fn extend(&mut self, later: Labels) {
        for number in later.of {
            let (name, place) = &later.names[number as usize];
            self.push(name, || place.clone());
        }
    }

    /// The classes where none are given: all labels, numbers by value, names alphabetically.
    fn classes(&self, shown: &str) -> Result<Classes, DataError> {
        let mut collected = LabelCounts::default();
        for (name, place) in &self.names {
            // Counted twice, so that a label that occurs once is accepted as a class.
            collected.add(name, place);
            collected.add(name, place);
        }
        collected.classes(shown, false)
    }
}

/// The given classes, or the labels of the training images.
pub(in crate::images) fn classes(
    given: &[String],
    found: &FoundImages,
    shown: &str,
) -> Result<Classes, DataError> {
    if given.is_empty() { found.labels.classes(shown) } else { Classes::given(given) }
}

impl FoundImages {
    /// Hash of everything that identifies these images except their bytes: names, order, labels.
    pub fn mark(&self) -> u64 {
        let labels = self.labels.names.iter().map(|(name, _)| fingerprint(name.as_bytes()));
        let labels = labels.chain(self.labels.of.iter().map(|number| u64::from(*number)));
        let sizes = match &self.holder {
            Storage::Files(_) => 0,
            Storage::Members { members, .. } => {
                members.iter().fold(0, |mark, member| key(mark, member.bytes))
            }
        };
        labels.chain(self.hashes.iter().copied()).fold(sizes, key)
    }

    /// The images as a set. A label that is not a class is an error, because what was trained could not be evaluated.
    pub fn set(self, classes: &Classes, max_pixels: u64) -> Result<ImageSet, DataError> {
        let numbers = self.labels.names.iter().map(|(name, place)| {
            classes.number(name).map_err(|wrong| DataError::input(format!("{place}: {}.", wrong.message)))
        });
        let numbers: Vec<u32> = numbers.collect::<Result<_, _>>()?;
        let of = self.labels.of.iter().map(|label| numbers[*label as usize]).collect();
        Ok(self.of_classes(of, max_pixels))
    }

    /// The images as a set of unknown classes. Each has the first class, so that having none means that it could not be
    /// decoded.
    pub fn unlabelled(self, max_pixels: u64) -> ImageSet {
        let of = vec![0; self.hashes.len()];
        self.of_classes(of, max_pixels)
    }

    fn of_classes(self, of: Vec<u32>, max_pixels: u64) -> ImageSet {
        let mark = self.mark();
        // Four channels of sixteen bits are the most that an image needs, plus a margin for metadata.
        let max_bytes = max_pixels.saturating_mul(8).saturating_add(16 << 20);
        let images = Arc::new(Encoded::new(self.holder, of, max_bytes));
        ImageSet::whole(images, mark)
    }
}
