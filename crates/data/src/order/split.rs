//! Splits documents into training and held-out ones by a hash of their content alone.
//!
//! A document that occurs twice is on the same side twice. The seed, the names and the format of the files, and documents added
//! later do not change the side of a document.

use std::sync::Arc;

use super::documents::{Documents, Spent, TokenCount};
use crate::error::DataError;
use crate::random::key;

/// A subset of the documents of a source, by index.
#[derive(Debug, Clone)]
pub(crate) enum Selection {
    /// These indices, in ascending order.
    Only(Arc<Vec<u64>>),
    /// All of `count` documents but these, which are in ascending order.
    AllBut { count: u64, left_out: Arc<Vec<u64>> },
}

impl Selection {
    pub(crate) fn count(&self) -> u64 {
        match self {
            Selection::Only(these) => these.len() as u64,
            Selection::AllBut { count, left_out } => count - left_out.len() as u64,
        }
    }

    /// Index in the source of the selection's document number `place`.
    pub(crate) fn at(&self, place: u64) -> u64 {
        match self {
            Selection::Only(these) => these[place as usize],
            Selection::AllBut { left_out, .. } => {
                // Number of excluded documents before it: the smallest `n` for which place + n is not excluded.
                let (mut low, mut high) = (0, left_out.len());
                while low < high {
                    let middle = (low + high) / 2;
                    if left_out[middle] - middle as u64 <= place {
                        low = middle + 1;
                    } else {
                        high = middle;
                    }
                }
                place + low as u64
            }
        }
    }
}

/// A share as a bound on hashes: documents whose hash is below it are held out.
pub(crate) fn threshold(held_out: f64) -> u64 {
    (held_out * 2f64.powi(64)) as u64
}

/// The documents of a source, split into training and held-out ones.
#[derive(Debug, Clone)]
pub(crate) struct Split {
    pub train: Selection,
    pub held_out: Selection,
    /// Hash that changes with the content and the order of the documents.
    pub content: u64,
}

/// Takes the hashes of a source's documents in order. Remembers held-out and unusable documents only.
pub(crate) struct Splitter {
    threshold: u64,
    count: u64,
    held_out: Vec<u64>,
    unusable: Vec<u64>,
    least: Extreme,
    most: Extreme,
    content: u64,
}

/// The documents with the smallest or the largest hash.
#[derive(Default)]
struct Extreme {
    hash: Option<u64>,
    documents: Vec<u64>,
}

impl Extreme {
    fn see(&mut self, document: u64, hash: u64, is_beyond: impl Fn(u64, u64) -> bool) {
        if self.hash.is_none_or(|held| is_beyond(hash, held)) {
            self.hash = Some(hash);
            self.documents.clear();
        }
        if self.hash == Some(hash) {
            self.documents.push(document);
        }
    }
}

impl Splitter {
    pub(crate) fn new(held_out: f64) -> Self {
        Self {
            threshold: threshold(held_out),
            count: 0,
            held_out: Vec::new(),
            unusable: Vec::new(),
            least: Extreme::default(),
            most: Extreme::default(),
            content: 0,
        }
    }

    /// Takes the hash of the next document; `None` for an unusable one, which is on neither side.
    pub(crate) fn push(&mut self, hash: Option<u64>) {
        let document = self.count;
        self.count += 1;
        let Some(hash) = hash else { return self.unusable.push(document) };
        self.content = key(self.content, hash);
        self.least.see(document, hash, |hash, least| hash < least);
        self.most.see(document, hash, |hash, most| hash > most);
        if hash < self.threshold {
            self.held_out.push(document);
        }
    }

    /// The split. Where a share above 0 is held out, each side gets at least one document. `shown` names the source in the
    /// error where that is impossible.
    pub(crate) fn finish(self, shown: &str) -> Result<Split, DataError> {
        let usable = self.count - self.unusable.len() as u64;
        if usable == 0 {
            return Err(DataError::input(format!(
                "There is no text in {shown}: name files with text in data.path."
            )));
        }
        let mut held_out = self.held_out;
        if self.threshold > 0 {
            if self.least.hash == self.most.hash {
                return Err(DataError::input(format!(
                    "The text of {shown} has too few different documents to hold some out for evaluation: give more \
                     text, or set data.held_out=0 to train on all of it."
                )));
            }
            if held_out.is_empty() {
                held_out = self.least.documents;
            } else if held_out.len() as u64 == usable {
                held_out.retain(|document| self.most.documents.binary_search(document).is_err());
            }
        }
        let mut left_out = [held_out.as_slice(), &self.unusable].concat();
        left_out.sort_unstable();
        Ok(Split {
            train: Selection::AllBut { count: self.count, left_out: Arc::new(left_out) },
            held_out: Selection::Only(Arc::new(held_out)),
            content: key(self.content, self.threshold),
        })
    }
}

/// A source as its training and its held-out side.
pub(crate) struct Sides {
    pub train: Arc<dyn Documents>,
    pub held_out: Arc<dyn Documents>,
    /// Hash that changes with the content and the order of the documents.
    pub content: u64,
}

impl Sides {
    /// Both sides of a source whose documents have known lengths.
    pub(crate) fn counted(
        documents: impl Documents + 'static,
        split: Split,
        length: impl Fn(u64) -> u64,
    ) -> Self {
        let all = documents.tokens().map_or(0, |count| count.tokens);
        let held: u64 = (0..split.held_out.count()).map(|place| length(split.held_out.at(place))).sum();
        let documents: Arc<dyn Documents> = Arc::new(documents);
        let side = |selection, tokens| -> Arc<dyn Documents> {
            Arc::new(Side { documents: documents.clone(), selection, tokens: TokenCount::exact(tokens) })
        };
        Self {
            train: side(split.train, all - held),
            held_out: side(split.held_out, held),
            content: split.content,
        }
    }
}

/// The training or the held-out side of a source.
pub(crate) struct Side {
    pub documents: Arc<dyn Documents>,
    pub selection: Selection,
    pub tokens: TokenCount,
}

impl Documents for Side {
    fn count(&self) -> Option<u64> {
        Some(self.selection.count())
    }

    fn tokens(&self) -> Option<TokenCount> {
        Some(self.tokens)
    }

    fn is_tokenised_as_read(&self) -> bool {
        self.documents.is_tokenised_as_read()
    }

    fn append(&self, index: u64, out: &mut Vec<u32>, spent: &mut Spent) -> Result<(), DataError> {
        self.documents.append(self.selection.at(index), out, spent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::mix;

    fn indices(selection: &Selection) -> Vec<u64> {
        (0..selection.count()).map(|place| selection.at(place)).collect()
    }

    fn split(hashes: &[Option<u64>], held_out: f64) -> Result<Split, DataError> {
        let mut splitter = Splitter::new(held_out);
        hashes.iter().for_each(|hash| splitter.push(*hash));
        splitter.finish("a.txt")
    }

    #[test]
    fn sides_are_disjoint_and_omit_only_unusable_documents() {
        for count in [2u64, 5, 100, 1000] {
            for held_out in [0.0, 1e-9, 0.05, 0.5, 0.999_999_999] {
                let unusable = |document: u64| document % 7 == 3;
                let hashes: Vec<Option<u64>> =
                    (0..count).map(|document| (!unusable(document)).then(|| mix(document + 1))).collect();
                let split = split(&hashes, held_out).unwrap();
                let (train, held) = (indices(&split.train), indices(&split.held_out));
                assert!(train.is_sorted() && !train.is_empty());
                assert_eq!(held.is_empty(), held_out == 0.0, "{count} {held_out}");
                let mut all = [train, held].concat();
                all.sort_unstable();
                assert!(all.into_iter().eq((0..count).filter(|document| !unusable(*document))));
            }
        }
    }

    #[test]
    fn the_side_follows_the_content() {
        let one: Vec<Option<u64>> = (0..300).map(|document| Some(mix(document))).collect();
        let held = |hashes: &[Option<u64>]| -> Vec<u64> {
            let split = split(hashes, 0.1).unwrap();
            let mut hashes: Vec<u64> =
                indices(&split.held_out).iter().map(|i| hashes[*i as usize].unwrap()).collect();
            hashes.sort_unstable();
            hashes.dedup();
            hashes
        };
        let twice = [one.clone(), one.clone()].concat();
        assert_eq!(held(&one), held(&twice));
        assert!((10..60).contains(&held(&one).len()));
        let contents = [&one[..], &twice, &one[1..]].map(|hashes| split(hashes, 0.1).unwrap().content);
        assert!(contents[0] != contents[1] && contents[0] != contents[2]);
        assert_ne!(split(&one, 0.1).unwrap().content, split(&one, 0.2).unwrap().content);
    }

    #[test]
    fn too_few_documents_are_an_error() {
        assert!(split(&[], 0.0).unwrap_err().sentence.contains("no text in a.txt"));
        assert!(split(&[None], 0.5).unwrap_err().sentence.contains("no text in a.txt"));
        assert!(split(&[Some(3), Some(3)], 0.5).unwrap_err().sentence.contains("data.held_out=0"));
        assert_eq!(indices(&split(&[Some(3), Some(3)], 0.0).unwrap().train), [0, 1]);
    }
}
