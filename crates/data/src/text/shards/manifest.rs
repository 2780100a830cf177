//! `manifest.json`: the contents of a folder of token shards, their origin and their hashes.
//!
//! The manifest is written last, so a folder that has one is complete.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::DataError;

pub(crate) const FILE_NAME: &str = "manifest.json";
const FORMAT: &str = "flatout-shards";
const VERSION: u32 = 1;
/// The rule by which documents are held out, recorded for other tools that read shards.
const RULE: &str = "a document is held out where its text hash is below the share times 2^64";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    pub tokenizer: TokenizerEntry,
    /// The options that determine the documents and their tokens.
    pub options: Options,
    pub sources: Vec<SourceEntry>,
    pub shards: Vec<ShardEntry>,
    pub totals: Totals,
    held_out: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerEntry {
    /// File name in the folder of the manifest.
    pub file: String,
    /// Hash in hexadecimal digits, as are all hashes here.
    pub hash: String,
    pub vocabulary: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    pub field: String,
    pub format: Option<String>,
    pub on_error: String,
    pub max_document_bytes: u64,
    pub shard_tokens: u64,
    /// The requested size, where a tokeniser was trained.
    pub trained_vocabulary: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceEntry {
    pub path: String,
    pub bytes: u64,
    /// Nanoseconds since 1970.
    pub modified_ns: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// File name in the folder of the manifest.
    pub file: String,
    pub bytes: u64,
    pub documents: u64,
    pub tokens: u64,
    /// Hash of the index, which has the hashes of the tokens.
    pub hash: String,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Totals {
    pub documents: u64,
    pub tokens: u64,
    /// Bytes of the documents' text.
    pub text_bytes: u64,
    /// Documents longer than the limit, which were cut into several.
    pub cut: u64,
    /// Skipped documents by reason.
    pub skipped: BTreeMap<String, u64>,
}

impl Manifest {
    pub(crate) fn new(
        tokenizer: TokenizerEntry,
        options: Options,
        sources: Vec<SourceEntry>,
        shards: Vec<ShardEntry>,
        totals: Totals,
    ) -> Self {
        let (format, version, held_out) = (FORMAT.into(), VERSION, RULE.into());
        Self { format, version, tokenizer, options, sources, shards, totals, held_out }
    }

    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a manifest has a JSON form") + "\n"
    }

    /// Parses a manifest; the error says what is wrong with it.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct FormatVersion {
            format: Option<String>,
            version: Option<u64>,
        }
        let declared: FormatVersion =
            serde_json::from_slice(text).map_err(|error| format!("it is not a JSON object: {error}"))?;
        if declared.format.as_deref() != Some(FORMAT) {
            return Err(format!("it is not of format {FORMAT}"));
        }
        if declared.version != Some(u64::from(VERSION)) {
            let version = declared.version.map_or("none".into(), |version| version.to_string());
            return Err(format!("its version is {version} and this program reads version {VERSION}"));
        }
        let manifest: Self = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        manifest.check()?;
        Ok(manifest)
    }

    pub(crate) fn read(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join(FILE_NAME);
        let shown = path.display();
        let text = std::fs::read(&path)
            .map_err(|error| DataError::input(format!("The manifest {shown} cannot be read: {error}.")))?;
        Self::parse(&text)
            .map_err(|why| DataError::input(format!("The manifest {shown} cannot be used: {why}.")))
    }

    fn check(&self) -> Result<(), String> {
        let files = self.shards.iter().map(|shard| &shard.file).chain([&self.tokenizer.file]);
        for file in files {
            let name = Path::new(file).file_name();
            if name.is_none_or(|name| name != file.as_str()) {
                return Err(format!("it names `{file}`, which is not in its folder"));
            }
        }
        let mut names: Vec<&str> = self.shards.iter().map(|shard| shard.file.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("it names the shard {} twice", pair[0]));
        }
        let sum = |of: fn(&ShardEntry) -> u64| {
            self.shards.iter().try_fold(0u64, |sum, shard| sum.checked_add(of(shard)))
        };
        for (what, claimed, counted) in [
            ("documents", self.totals.documents, sum(|shard| shard.documents)),
            ("tokens", self.totals.tokens, sum(|shard| shard.tokens)),
        ] {
            if counted != Some(claimed) {
                return Err(format!("its totals give {claimed} {what}, and its shards do not sum to that"));
            }
        }
        Ok(())
    }
}

/// A hash in the form in which files have it.
pub(crate) fn hexadecimal(hash: u64) -> String {
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let tokenizer =
            TokenizerEntry { file: "tokenizer.json".into(), hash: hexadecimal(7), vocabulary: 300 };
        let options = Options {
            field: "text".into(),
            format: None,
            on_error: "fail".into(),
            max_document_bytes: 1000,
            shard_tokens: 100,
            trained_vocabulary: None,
        };
        let shard = |file: &str, tokens| ShardEntry {
            file: file.into(),
            bytes: 1000,
            documents: 2,
            tokens,
            hash: hexadecimal(1),
        };
        let shards = vec![shard("shard-00000.tokens", 90), shard("shard-00001.tokens", 10)];
        let totals = Totals { documents: 4, tokens: 100, ..Totals::default() };
        Manifest::new(
            tokenizer,
            options,
            vec![SourceEntry { path: "a.txt".into(), bytes: 9, modified_ns: 5 }],
            shards,
            totals,
        )
    }

    #[test]
    fn a_manifest_reads_back() {
        assert_eq!(Manifest::parse(manifest().to_json().as_bytes()), Ok(manifest()));
    }

    #[test]
    fn faults_of_a_manifest_are_named() {
        let with = |change: fn(&mut Manifest)| {
            let mut manifest = manifest();
            change(&mut manifest);
            Manifest::parse(manifest.to_json().as_bytes()).unwrap_err()
        };
        for file in ["../secret", "/etc/passwd", "a/b", "a/", "a/.", "", ".", ".."] {
            let mut outside = manifest();
            outside.shards[0].file = file.into();
            let error = Manifest::parse(outside.to_json().as_bytes()).unwrap_err();
            assert!(error.contains("not in its folder"), "{file}: {error}");
        }
        assert!(with(|m| m.tokenizer.file = "../t".into()).contains("`../t`"));
        assert!(with(|m| m.version = 2).contains("its version is 2"));
        assert!(with(|m| m.format = "other".into()).contains("not of format"));
        assert!(with(|m| m.totals.tokens = 101).contains("101 tokens"));
        assert!(with(|m| m.totals.documents = 1).contains("1 documents"));
        assert!(with(|m| m.shards[0].tokens = u64::MAX).contains("do not sum"));
        assert!(with(|m| m.shards[1].file = m.shards[0].file.clone()).contains("twice"));
        for text in ["", "{", "[]", "{\"format\": 3}", "{\"format\": \"flatout-shards\", \"version\": 1}"] {
            assert!(Manifest::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
