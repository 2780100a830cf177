//! `index.json` of a cache of features: how they were computed, and the place of each image's.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

pub const FILE_NAME: &str = "index.json";
/// Features of an image begin at a multiple of this.
pub const ALIGNMENT: u64 = 4096;
/// Version of the file format.
const FORMAT: u64 = 1;

/// The computation and storage of features. Caches of equal formats hold equal features of equal images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureFormat {
    /// Everything besides the image that they depend on, by name.
    pub made_with: BTreeMap<String, String>,
    /// Rows per token of an image.
    pub levels: usize,
    /// Bytes per row.
    pub row_bytes: usize,
}

impl FeatureFormat {
    /// Bytes of an image with this number of tokens; `None` on overflow.
    pub fn bytes(&self, tokens: usize) -> Option<u64> {
        let rows = (tokens as u64).checked_mul(self.levels as u64)?;
        rows.checked_mul(self.row_bytes as u64).filter(|bytes| *bytes <= i64::MAX as u64)
    }

    /// The first difference from another format: its name, the value here, and the value there.
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
    /// Its file, unless it is stored in a row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Height and width in patches.
    pub grid: [usize; 2],
    pub tokens: usize,
    /// Offset of its features in bytes.
    pub offset: u64,
    /// XXH3-128 of its features, in hexadecimal digits.
    pub hash: String,
}

/// A complete file of features.
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

/// The file name of a part.
pub fn part_name(number: usize) -> String {
    format!("features-{number:05}.bin")
}

impl FeatureIndex {
    /// The index of an empty cache.
    pub fn new(format: FeatureFormat) -> FeatureIndex {
        FeatureIndex { version: FORMAT, format, parts: vec![] }
    }

    /// Parses an index of this format; the error is a clause that says what is wrong with it.
    pub fn parse(bytes: &[u8], format: &FeatureFormat) -> Result<FeatureIndex, String> {
        let index: FeatureIndex =
            serde_json::from_slice(bytes).map_err(|error| format!("cannot be parsed ({error})"))?;
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

    /// Checks that features are contiguous in their parts and that images are unique.
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
                    return wrong("features reach beyond the end of the file");
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
