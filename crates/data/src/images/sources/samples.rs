//! Samples of an archive: adjacent members whose names agree up to the first dot of their last component.

use std::collections::HashSet;

use super::tar::{Archive, Entry, Next};
use crate::error::DataError;
use crate::formats::{Reason, SourceLocation, unreadable};
use crate::images::flaw::Flaw;
use crate::random::fingerprint;

/// The members of one sample.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub key: String,
    /// Offset of its first member.
    pub first: u64,
    /// The ending after the key in lower case, such as `json` or `003.jpg`, and the member.
    pub members: Vec<(String, Entry)>,
    /// Whether nothing after it can be read, so that members of it may be missing.
    pub is_last_of_lost: bool,
}

/// The samples of an archive in order.
pub(crate) struct Samples {
    archive: Archive,
    keys: HashSet<u64>,
    /// The first member of the next sample, whose key was not checked for repetition yet.
    next: Option<(String, String, Entry)>,
}

impl Samples {
    pub fn new(archive: Archive) -> Self {
        Self { archive, keys: HashSet::new(), next: None }
    }

    pub fn archive(&self) -> &Archive {
        &self.archive
    }

    /// The next sample. Calls `note` for flaws of members, which may end it.
    pub fn next(
        &mut self,
        note: &mut dyn FnMut(&Flaw, SourceLocation) -> Result<(), DataError>,
    ) -> Result<Option<Sample>, DataError> {
        loop {
            let mut sample: Option<Sample> = None;
            let mut is_lost = false;
            let take = |sample: &mut Option<Sample>, key: String, ending: String, entry: Entry| {
                let first = entry.offset;
                let begun = sample.get_or_insert_with(|| Sample {
                    key,
                    first,
                    members: Vec::new(),
                    is_last_of_lost: false,
                });
                begun.members.push((ending, entry));
            };
            if let Some((key, ending, entry)) = self.next.take() {
                take(&mut sample, key, ending, entry);
            }
            loop {
                match self.archive.next().map_err(|error| unreadable(&self.archive.path, &error))? {
                    Next::End => break,
                    Next::Flaw(flaw, at) => note(&flaw, self.archive.place(at))?,
                    Next::Lost(flaw, at) => {
                        note(&flaw, self.archive.place(at))?;
                        is_lost = true;
                        break;
                    }
                    Next::Entry(entry) => {
                        let Some((key, ending)) = split(&entry.name) else { continue };
                        if sample.as_ref().is_some_and(|sample| sample.key != key) {
                            self.next = Some((key, ending, entry));
                            break;
                        }
                        take(&mut sample, key, ending, entry);
                    }
                }
            }
            let Some(mut sample) = sample else { return Ok(None) };
            sample.is_last_of_lost = is_lost;
            if self.keys.insert(fingerprint(sample.key.as_bytes())) {
                return Ok(Some(sample));
            }
            let message =
                format!("the sample {} was there before, but its members must be adjacent", sample.key);
            note(&Flaw::new(Reason::KeyTwice, message), self.archive.place(sample.first))?;
        }
    }
}

/// The key of a member's sample and the rest of its name in lower case; `None` for names without a dot and hidden ones.
fn split(name: &str) -> Option<(String, String)> {
    let last = name.rfind('/').map_or(0, |at| at + 1);
    let dot = last + name[last..].find('.')?;
    (dot > last).then(|| (name[..dot].to_string(), name[dot + 1..].to_ascii_lowercase()))
}
