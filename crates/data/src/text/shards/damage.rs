//! Tests that feed damaged shards, manifests and token files.
//!
//! Damage must never cause a panic, a hang or unbounded memory, and changed content must never be accepted as the original.

use flatout_fuzz::{Limits, feed};

use super::manifest::Manifest;
use super::shard::{Shard, ShardWriter};
use crate::error::DataError;
use crate::order::documents::Spent;
use crate::scratch::Scratch;
use crate::text::prepare::{Preparation, Tokenizer, prepare};
use crate::text::token_files::{BinOptions, TokenFiles};

#[test]
fn shards() {
    let scratch = Scratch::new("fuzz-shard");
    let path = scratch.path().join("a.tokens");
    let documents: Vec<Vec<u32>> =
        (1..9).map(|length| (0..length * length).map(|at| at * 3).collect()).collect();
    let seed = |vocabulary: u64, count: usize| {
        let mut writer = ShardWriter::create(&path, 5, vocabulary).unwrap();
        documents[..count].iter().for_each(|document| writer.push(document, 11).unwrap());
        writer.finish().unwrap();
        std::fs::read(&path).unwrap()
    };
    let seeds = vec![seed(1000, 8), seed(1 << 20, 3), seed(1000, 0)];
    let read = || -> Result<Vec<Vec<u32>>, DataError> {
        let shard = Shard::open(&path, true)?;
        shard.verify()?;
        let document = |index| {
            let mut tokens = Vec::new();
            shard.append(index, &mut tokens).map(|()| tokens)
        };
        (0..shard.header().documents).map(document).collect()
    };
    feed("shards", &seeds, Limits::default(), |bytes| {
        std::fs::write(&path, bytes).unwrap();
        match read() {
            Ok(found) => assert_eq!(found, documents[..found.len()], "a changed shard was accepted"),
            Err(error) => assert!(error.is_input() && error.sentence.contains("a.tokens"), "{error}"),
        }
    });
}

#[test]
fn manifests() {
    let scratch = Scratch::new("fuzz-manifest");
    let source = scratch.write("a.jsonl", &b"{\"text\": \"some words\"}\n{\"text\": 5}\n".repeat(30));
    let preparation = Preparation {
        sources: vec![source.to_str().unwrap().into()],
        out: scratch.path().join("shards"),
        tokenizer: Tokenizer::Train(260),
        read: crate::formats::ReadOptions {
            on_error: crate::formats::OnError::Skip,
            ..crate::formats::ReadOptions::default()
        },
        shard_tokens: 100,
        workers: 1,
        restart: false,
        is_cache: false,
    };
    let manifest = prepare(&preparation, &mut |_| {}).unwrap().manifest;
    feed("manifests", &[manifest.to_json().into_bytes()], Limits::default(), |bytes| {
        if let Ok(manifest) = Manifest::parse(bytes) {
            assert_eq!(Manifest::parse(manifest.to_json().as_bytes()), Ok(manifest.clone()));
            assert!(manifest.shards.iter().all(|shard| !shard.file.contains('/') && shard.file != ".."));
        }
    });
}

#[test]
fn token_files() {
    let scratch = Scratch::new("fuzz-bin");
    let path = scratch.path().join("a.bin");
    let raw: Vec<u8> = (0..600u16).flat_map(|token| (token % 50).to_le_bytes()).collect();
    let headed = |magic: u32, version: u32, count: u32| {
        let mut header = vec![0; 1024];
        for (place, number) in [magic, version, count].into_iter().enumerate() {
            header[4 * place..4 * place + 4].copy_from_slice(&number.to_le_bytes());
        }
        [header, raw.clone()].concat()
    };
    let seeds = vec![raw.clone(), headed(20_240_520, 1, 600), headed(20_240_801, 7, 300)];
    for eos in [None, Some(7)] {
        let options = BinOptions { token_bytes: 2, eos, vocabulary: 1 << 17 };
        feed("token files", &seeds, Limits::default(), |bytes| {
            std::fs::write(&path, bytes).unwrap();
            match TokenFiles::open(std::slice::from_ref(&path), options, 0.0) {
                Err(error) => assert!(error.is_input() && error.sentence.contains("a.bin"), "{error}"),
                Ok(sides) => {
                    let documents = sides.train;
                    let mut tokens = Vec::new();
                    for index in 0..documents.count().unwrap() {
                        documents.append(index, &mut tokens, &mut Spent::default()).unwrap();
                    }
                    assert!(2 * tokens.len() <= bytes.len());
                    assert_eq!(documents.tokens().unwrap().tokens, tokens.len() as u64);
                    assert!(eos.is_none_or(|eos| !tokens.contains(&eos)), "an end is no token of a document");
                }
            }
        });
    }
}
