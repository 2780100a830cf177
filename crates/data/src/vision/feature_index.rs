//! `index.json` of a cache of features: how they were made, and where those of each image lie.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

pub const FILE_NAME: &str = "index.json";
/// Features of an image begin at a multiple of this.
pub const ALIGNMENT: u64 = 4096;
/// The version of this file.
const FORMAT: u64 = 1;

/// How features are made and stored. Two caches of equal formats hold the same features of the same images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureFormat {
    /// Whatever they depend on beside the bytes of the image, by name.
    pub made_with: BTreeMap<String, String>,
    /// Rows that each token of an image has.
    pub levels: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
}

impl FeatureFormat {
    /// Bytes of an image of this number of tokens; `None` where no file is as large.
    pub fn bytes(&self, tokens: usize) -> Option<u64> {
        let rows = (tokens as u64).checked_mul(self.levels as u64)?;
        rows.checked_mul(self.row_bytes as u64).filter(|bytes| *bytes <= i64::MAX as u64)
    }

    /// The first thing in which another format differs: its name, what it is here, and what it is there.
    fn difference(&self, other: &FeatureFormat) -> Option<(String, String, String)> {
        let said =
            |of: &FeatureFormat, name: &str| of.made_with.get(name).map_or("not given", |v| v).to_string();
        let names = self.made_with.keys().chain(other.made_with.keys());
        let made = names.map(|name| (name.clone(), said(self, name), said(other, name)));
        let sizes = [("levels", self.levels, other.levels), ("row_bytes", self.row_bytes, other.row_bytes)];
        let sizes = sizes.map(|(name, here, there)| (name.into(), here.to_string(), there.to_string()));
        made.chain(sizes).find(|(_, here, there)| here != there)
    }
}

/// The features of one image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// SHA-256 of the image's bytes, in hexadecimal digits.
    pub sha256: String,
    /// Its file, where it has one of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Rows and columns of its patches.
    pub grid: [usize; 2],
    pub tokens: usize,
    /// Where its features begin, in bytes.
    pub offset: u64,
    /// XXH3-128 of its features, in hexadecimal digits.
    pub hash: String,
}

/// A file of features, whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureFile {
    pub file: String,
    pub bytes: u64,
    pub images: Vec<Entry>,
}

/// The whole index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureIndex {
    version: u64,
    pub format: FeatureFormat,
    pub parts: Vec<FeatureFile>,
}

/// The name of a part by its number.
pub fn part_name(number: usize) -> String {
    format!("features-{number:05}.bin")
}

impl FeatureIndex {
    /// Of a cache without any features.
    pub fn new(format: FeatureFormat) -> FeatureIndex {
        FeatureIndex { version: FORMAT, format, parts: vec![] }
    }

    /// Reads an index that is of this format; otherwise a clause that says what is wrong with it.
    pub fn parse(bytes: &[u8], format: &FeatureFormat) -> Result<FeatureIndex, String> {
        let index: FeatureIndex =
            serde_json::from_slice(bytes).map_err(|error| format!("does not read ({error})"))?;
        if index.version != FORMAT {
            return Err(format!(
                "has version {} of its form, and this program reads {FORMAT}",
                index.version
            ));
        }
        if let Some((name, now, then)) = format.difference(&index.format) {
            return Err(format!("is of features that were made with `{name}` = {then}, and it is {now} now"));
        }
        index.check()?;
        Ok(index)
    }

    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("an index has a JSON form")
    }

    pub fn entries(&self) -> impl Iterator<Item = (usize, &Entry)> {
        self.parts.iter().enumerate().flat_map(|(number, part)| part.images.iter().map(move |e| (number, e)))
    }

    /// Whether features lie one behind another in their parts, and each image has them once.
    fn check(&self) -> Result<(), String> {
        let is_hexadecimal = |text: &str, digits: usize| {
            text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        };
        let mut known = HashSet::new();
        for (number, part) in self.parts.iter().enumerate() {
            if part.file != part_name(number) {
                return Err(format!("calls part {number} `{}`, not {}", part.file, part_name(number)));
            }
            let mut end = 0;
            for entry in &part.images {
                let wrong = |what: &str| Err(format!("has an image in {} whose {what}", part.file));
                if !is_hexadecimal(&entry.sha256, 64) {
                    return wrong("sha256 is not a SHA-256");
                }
                if !is_hexadecimal(&entry.hash, 32) {
                    return wrong("hash is not a hash");
                }
                if !known.insert(&entry.sha256) {
                    return wrong("features are there twice");
                }
                let Some(bytes) = self.format.bytes(entry.tokens).filter(|_| entry.tokens > 0) else {
                    return wrong("tokens is not a number of tokens");
                };
                if entry.offset % ALIGNMENT != 0 || entry.offset < end {
                    return wrong("offset is not where features may begin");
                }
                let Some(own_end) = entry.offset.checked_add(bytes).filter(|end| *end <= part.bytes) else {
                    return wrong("features reach behind the end of the file");
                };
                end = own_end;
            }
            if end != part.bytes {
                return Err(format!(
                    "gives {} {} bytes, and its features end at {end}",
                    part.file, part.bytes
                ));
            }
        }
        Ok(())
    }
}
