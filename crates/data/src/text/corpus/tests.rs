//! Tests of every kind of source through `open`, and of refused specifications.

use std::collections::HashSet;

use super::*;
use crate::formats::{FileFormat, Format, OnError};
use crate::order::loader::Rows;
use crate::order::stall::Waited;
use crate::scratch::Scratch;
use crate::text::prepare::{Preparation, Tokenizer, prepare};

fn synthetic() -> Spec {
    Spec { vocab: 512, context: 64, seed: 1, ..Spec::default() }
}

fn text(scratch: &Scratch) -> Spec {
    let lines: String =
        (0..2000).map(|line| format!("Number {line} is followed by {}.\n", line + 1)).collect();
    let path = vec![written(scratch, "numbers.txt", lines.as_bytes())];
    Spec { path, vocab: 300, held_out: 0.2, ..synthetic() }
}

fn written(scratch: &Scratch, name: &str, bytes: &[u8]) -> String {
    scratch.write(name, bytes).to_str().unwrap().into()
}

fn refused(spec: &Spec) -> String {
    let error = open(spec).err().expect("the specification is refused");
    assert!(error.is_input());
    error.sentence
}

#[test]
fn the_synthetic_language_opens_without_a_file() {
    let corpus = open(&synthetic()).unwrap();
    let floor = corpus.floor().unwrap();
    assert!(floor.trigram_nats > 1.2 * floor.nats);
    assert_eq!(corpus.describe().tokens, None);
    let mut loader = corpus.train_loader(&corpus.start(), LoaderOptions::default()).unwrap();
    let rows = loader.next_rows(6).unwrap();
    assert_eq!((rows.count(), rows.tokens.len(), rows.epoch), (6, 6 * 64, 0.0));
    assert!(rows.weights.iter().all(|weight| *weight == 1.0));
    let story: Vec<u32> = rows.tokens[..64].iter().map(|token| *token as u32).collect();
    assert!(corpus.vocabulary().decode(&story).contains(" at the "));
    assert_eq!(corpus.held_out_rows(7).unwrap().count(), 7);
    assert_eq!(corpus.held_out_rows(7).unwrap(), corpus.held_out_rows(7).unwrap());
}

#[test]
fn the_floor_is_that_of_the_tokens_predicted() {
    let language = Language::new();
    for document_mask in [false, true] {
        let corpus = open(&Spec { document_mask, context: 4096, ..synthetic() }).unwrap();
        let rows = corpus.held_out_rows(50).unwrap();
        let tokens: Vec<&i32> = rows.tokens.iter().collect();
        let nats = documents(&tokens).into_iter().map(|document| {
            let document: Vec<u32> = document.into_iter().chain([1]).map(|token| token as u32).collect();
            language.surprise(&document).iter().sum::<f64>()
        });
        let mean = nats.sum::<f64>() / f64::from(rows.weights.iter().sum::<f32>());
        let floor = corpus.floor().unwrap().nats;
        assert!((mean / floor - 1.0).abs() < 0.01, "mask {document_mask}: sampled {mean}, computed {floor}");
    }
}

#[test]
fn held_out_documents_are_never_trained_on() {
    let scratch = Scratch::new("held-out");
    for spec in [synthetic(), text(&scratch)] {
        let corpus = open(&spec).unwrap();
        let mut loader = corpus.train_loader(&corpus.start(), LoaderOptions::default()).unwrap();
        let rows = loader.next_rows(2000).unwrap();
        let streams =
            (0..STREAMS).map(|lane| rows.tokens.chunks(64).skip(lane).step_by(STREAMS).flatten().collect());
        let trained: HashSet<Vec<i32>> = streams.flat_map(|stream: Vec<&i32>| documents(&stream)).collect();
        let held = documents(&corpus.held_out_rows(100).unwrap().tokens.iter().collect::<Vec<_>>());
        let common = held.iter().filter(|document| trained.contains(*document)).count();
        match spec.path.is_empty() {
            // The shortest stories repeat by chance; the test fails only where many of the draws do.
            true => {
                assert!(common * 10 < held.len(), "{common} of {} documents", held.len())
            }
            false => assert_eq!((common, held.is_empty()), (0, false)),
        }
    }
}

/// Splits a stream of tokens into whole documents.
fn documents(stream: &[&i32]) -> Vec<Vec<i32>> {
    let documents = stream.split(|token| **token == 1).filter(|tokens| tokens.first() == Some(&&0));
    documents.map(|tokens| tokens.iter().map(|token| **token).collect()).collect()
}

#[test]
fn text_is_tokenised_split_and_counted() {
    let scratch = Scratch::new("open-text");
    let spec = text(&scratch);
    let corpus = open(&spec).unwrap();
    assert_eq!(corpus.vocabulary().size(), 300);
    let Description { documents, tokens, held_out_documents, held_out_tokens, .. } = corpus.describe();
    assert!(documents.unwrap() > 30 && held_out_documents.unwrap() > 3);
    let mut loader = corpus.train_loader(&corpus.start(), LoaderOptions::default()).unwrap();
    let rows = loader.next_rows(tokens.unwrap() as usize / 64).unwrap();
    assert!((rows.epoch - 1.0).abs() < 0.01, "{}", rows.epoch);

    let held = corpus.held_out_rows(usize::MAX).unwrap();
    assert_eq!(held.count() as u64, (held_out_tokens.unwrap() - 1).div_ceil(64));
    assert_eq!(held.weights.iter().sum::<f32>() as u64, held_out_tokens.unwrap() - 1);
    assert!(
        held.weights.iter().zip(&held.targets).all(|(weight, target)| (*weight == 0.0) == (*target == -1))
    );
    // Another seed reorders training and leaves evaluation alone.
    let other = open(&Spec { seed: 2, ..spec.clone() }).unwrap();
    assert_eq!(other.held_out_rows(5).unwrap(), corpus.held_out_rows(5).unwrap());
    let none = open(&Spec { held_out: 0.0, ..spec }).unwrap();
    assert!(none.held_out_rows(1).unwrap_err().sentence.contains("data.held_out above 0"));
}

#[test]
fn a_saved_tokeniser_opens_the_same_corpus_and_other_data_refuses_the_cursor() {
    let scratch = Scratch::new("reopen");
    let spec = text(&scratch);
    let corpus = open(&spec).unwrap();
    let tokenizer = scratch.path().join("tokenizer.json");
    corpus.vocabulary().save(&tokenizer).unwrap();
    let again = open(&Spec { tokenizer: Some(tokenizer), ..spec.clone() }).unwrap();
    assert_eq!(again.start(), corpus.start());
    assert!(again.train_loader(&corpus.start(), LoaderOptions::default()).is_ok());

    let other_seed = open(&Spec { seed: 2, ..spec.clone() }).unwrap();
    let mut more = std::fs::read(&spec.path[0]).unwrap();
    more.extend_from_slice(&more.clone());
    let longer = open(&Spec { path: vec![written(&scratch, "longer.txt", &more)], ..spec }).unwrap();
    for corpus_now in [other_seed, longer] {
        let error = corpus_now.train_loader(&corpus.start(), LoaderOptions::default()).err().unwrap();
        assert!(error.is_input() && error.sentence.contains("not what this run began with"), "{error}");
    }
}

#[test]
fn unusable_specifications_are_refused_before_reading() {
    let scratch = Scratch::new("refused");
    assert!(refused(&Spec { vocab: 100, ..synthetic() }).contains("but the model only 100"));
    assert!(refused(&Spec { context: 0, ..synthetic() }).contains("model.context"));
    assert!(refused(&Spec { held_out: 1.0, ..synthetic() }).contains("data.held_out=1"));
    assert!(refused(&Spec { held_out: f64::NAN, ..synthetic() }).contains("data.held_out=NaN"));
    assert!(
        refused(&Spec { source: SourceKind::Synthetic, path: vec!["book.txt".into()], ..synthetic() })
            .contains("data.source=text")
    );
    assert!(refused(&Spec { source: SourceKind::Text, ..synthetic() }).contains("data.path is empty"));
    assert!(refused(&Spec { vocab: 256, ..text(&scratch) }).contains("need 258"));
}

/// Documents as JSONL, whose borders survive compression.
fn stories(count: usize, seed: u64) -> Vec<u8> {
    let language = Language::new();
    let line = |index| {
        let words: Vec<&str> = language
            .document(seed, index as u64)
            .iter()
            .map(|word| language.words()[*word as usize].as_str())
            .filter(|word| !word.starts_with('<'))
            .collect();
        format!("{{\"text\": \"{}\"}}\n", words.join(" "))
    };
    (0..count).map(line).collect::<String>().into_bytes()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    let mut encoder = flate2::bufread::GzEncoder::new(bytes, flate2::Compression::fast());
    std::io::Read::read_to_end(&mut encoder, &mut packed).unwrap();
    packed
}

/// The same documents in every form: in memory, by index, compressed, as shards, as token files, as a mixture.
fn every_form(scratch: &Scratch) -> Vec<(&'static str, Spec)> {
    let jsonl = stories(400, 3);
    let path = written(scratch, "stories.jsonl", &jsonl);
    let base = Spec { vocab: 400, held_out: 0.1, workers: 2, ..synthetic() };
    let memory = Spec { path: vec![path.clone()], ..base.clone() };
    let tokenizer = scratch.path().join("tokenizer.json");
    let corpus = open(&memory).unwrap();
    corpus.vocabulary().save(&tokenizer).unwrap();
    let memory = Spec { tokenizer: Some(tokenizer.clone()), ..memory };
    let streamed = Spec { in_memory_bytes: 0, ..memory.clone() };
    let packed = Spec {
        path: vec![written(scratch, "packed/stories.jsonl.gz", &gzip(&jsonl))],
        cache: Some(scratch.path().join("cache")),
        ..memory.clone()
    };
    let out = scratch.path().join("shards");
    let preparation = Preparation {
        sources: vec![path.clone()],
        out: out.clone(),
        tokenizer: Tokenizer::File(tokenizer),
        read: ReadOptions::default(),
        shard_tokens: 1000,
        workers: 2,
        restart: false,
        is_cache: false,
    };
    let prepared = prepare(&preparation, &mut |_| {}).unwrap();
    assert!(prepared.manifest.shards.len() > 3);
    let shards = Spec { path: vec![out.to_str().unwrap().into()], tokenizer: None, ..memory.clone() };
    let mut tokens: Vec<u16> = Vec::new();
    for line in jsonl.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let value: serde_json::Value = serde_json::from_slice(line).unwrap();
        tokens.extend(
            corpus.vocabulary().encode(value["text"].as_str().unwrap()).unwrap().iter().map(|t| *t as u16),
        );
        tokens.push(1);
    }
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let bin = Spec { path: vec![written(scratch, "stories.bin", &bytes)], ..memory.clone() };
    let part = |spec: &Spec, weight| MixPart { path: spec.path.clone(), weight };
    let other = written(scratch, "other.jsonl", &stories(50, 9));
    let mix = Spec {
        path: Vec::new(),
        mix: vec![part(&shards, 3.0), MixPart { path: vec![other], weight: 1.0 }],
        tokenizer: None,
        in_memory_bytes: 0,
        ..memory.clone()
    };
    vec![
        ("memory", memory),
        ("streamed", streamed),
        ("packed", packed),
        ("shards", shards),
        ("bin", bin),
        ("mix", mix),
        ("synthetic", base),
    ]
}

fn rows_of(corpus: &Corpus, cursor: &Cursor, threads: usize, count: usize) -> (Rows, Cursor) {
    let options = LoaderOptions { threads, queue_bytes: 1, ..LoaderOptions::default() };
    let mut loader = corpus.train_loader(cursor, options).unwrap();
    let rows = loader.next_rows(count).unwrap();
    (Rows { waited: Waited::default(), ..rows }, loader.cursor().clone())
}

#[test]
fn every_form_gives_the_same_rows_for_any_number_of_threads_and_from_any_cursor() {
    let scratch = Scratch::new("every-form");
    let mut first: Option<(Rows, Rows)> = None;
    for (name, spec) in every_form(&scratch) {
        let corpus = open(&spec).unwrap();
        let (rows, end) = rows_of(&corpus, &corpus.start(), 1, 120);
        for threads in [2, 7] {
            assert_eq!(
                rows_of(&corpus, &corpus.start(), threads, 120),
                (rows.clone(), end.clone()),
                "{name}"
            );
        }
        let (head, middle) = rows_of(&corpus, &corpus.start(), 2, 47);
        let again = open(&spec).unwrap();
        let (tail, _) = rows_of(&again, &middle, 3, 73);
        assert_eq!([head.tokens, tail.tokens].concat(), rows.tokens, "{name}");
        // Every form has the same documents on the same sides and in the same order.
        if ["memory", "streamed", "packed", "shards"].contains(&name) {
            let rows = Rows { epoch: 0.0, ..rows };
            let held_out = corpus.held_out_rows(20).unwrap();
            let (wanted, wanted_held_out) = first.get_or_insert_with(|| (rows.clone(), held_out.clone()));
            assert_eq!((&rows, &held_out), (&*wanted, &*wanted_held_out), "{name}");
        }
    }
}

#[test]
fn sizes_are_counted_or_estimated() {
    let scratch = Scratch::new("sizes");
    let forms = every_form(&scratch);
    let describe = |name: &str| {
        let (_, spec) = forms.iter().find(|(form, _)| *form == name).unwrap();
        open(spec).unwrap().describe()
    };
    let exact = describe("memory");
    assert!(!exact.is_estimated);
    for name in ["packed", "shards"] {
        assert_eq!(describe(name), exact, "{name}");
    }
    let streamed = describe("streamed");
    assert!(streamed.is_estimated && streamed.documents == exact.documents);
    let off = streamed.tokens.unwrap() as f64 / exact.tokens.unwrap() as f64 - 1.0;
    assert!(off.abs() < 0.03, "estimated with an error of {off}");
    let bin = describe("bin");
    assert_eq!(
        bin.documents.unwrap() + bin.held_out_documents.unwrap(),
        exact.documents.unwrap() + exact.held_out_documents.unwrap()
    );
    assert!(describe("mix").is_estimated);
    assert_eq!(describe("synthetic").tokens, None);
}

#[test]
fn a_mixture_has_the_shares_of_tokens_it_was_given() {
    let scratch = Scratch::new("shares");
    let short =
        written(&scratch, "short.jsonl", &b"{\"text\": \"aaa aaa\"}\n{\"text\": \"aaa\"}\n".repeat(50));
    let long = format!("{{\"text\": \"{}\"}}\n{{\"text\": \"{}\"}}\n", "bbb ".repeat(100), "bbb ".repeat(80));
    let long = written(&scratch, "long.jsonl", long.repeat(5).as_bytes());
    let part = |path: &String, weight| MixPart { path: vec![path.clone()], weight };
    let spec = Spec {
        mix: vec![part(&short, 1.0), part(&long, 3.0)],
        vocab: 258,
        held_out: 0.0,
        context: 64,
        ..synthetic()
    };
    let corpus = open(&spec).unwrap();
    let (rows, _) = rows_of(&corpus, &corpus.start(), 2, 4000);
    let text: Vec<u32> = rows.tokens.iter().map(|token| *token as u32).collect();
    let count = |letter: &str| corpus.vocabulary().decode(&text).matches(letter).count() as f64;
    // A quarter of the tokens, frames and spaces included, which short documents have more of: 9 of 14 against 3 of 4.
    let (a, b) = (count("a"), count("b"));
    assert!((0.19..0.255).contains(&(a / (a + b))), "{a} a, {b} b");
    let heavier = open(&Spec { mix: vec![part(&short, 1.0), part(&long, 4.0)], ..spec }).unwrap();
    assert!(
        heavier.train_loader(&corpus.start(), LoaderOptions::default()).is_err(),
        "other weights, other data"
    );
}

#[test]
fn token_files_are_recognised_by_name_where_a_recipe_says_text() {
    let scratch = Scratch::new("said-to-be-text");
    let forms = every_form(&scratch);
    for (name, spec) in forms.iter().filter(|(name, _)| ["shards", "bin"].contains(name)) {
        let as_text = Spec { source: SourceKind::Text, ..spec.clone() };
        let rows = |spec: &Spec| {
            let corpus = open(spec).unwrap();
            rows_of(&corpus, &corpus.start(), 1, 20)
        };
        assert_eq!(rows(&as_text), rows(spec), "{name}");
    }
    let (_, bin) = &forms[4];
    let read = ReadOptions { format: Some(Format::Text), ..ReadOptions::default() };
    let refused = open(&Spec { source: SourceKind::Text, read, ..bin.clone() }).err().unwrap();
    assert!(refused.sentence.contains("stories.bin"), "a format is taken at its word: {refused}");
    assert_eq!(SourceKind::Text.named_by(FileFormat::U16), SourceKind::Bin);
}

#[test]
fn large_inputs_are_announced() {
    let scratch = Scratch::new("announced");
    let words = "so many words ".repeat(700);
    let lines: String = (0..1000).map(|line| format!("{{\"text\": \"{line} {words}\"}}\n")).collect();
    let path = written(&scratch, "large.jsonl", lines.as_bytes());
    let mut events = Vec::new();
    let spec = Spec { path: vec![path], vocab: 300, ..Spec::default() };
    open_reporting(&spec, &mut |one| events.push(one)).unwrap();
    let OpenEvent::Note(first) = &events[0] else { panic!("{events:?}") };
    assert_eq!(first, "reading 10 MB in 1 file");
    assert!(
        matches!(&events[1], OpenEvent::Note(line) if line.contains("training a tokeniser of 300 tokens"))
    );
}

#[test]
fn packed_text_is_tokenised_once() {
    let scratch = Scratch::new("packed-once");
    let forms = every_form(&scratch);
    let (_, spec) = &forms[2];
    let events = |spec: &Spec| {
        let mut events = Vec::new();
        open_reporting(spec, &mut |one| events.push(one)).unwrap();
        events
    };
    let first = events(spec);
    assert!(
        matches!(&first[..], [OpenEvent::Note(line)] if line.contains("are kept in") && line.contains("MB)")),
        "{first:?}"
    );
    assert!(events(spec).is_empty(), "the second time it is there");
    let homeless = open(&Spec { cache: None, ..spec.clone() }).err().unwrap();
    assert!(homeless.is_input() && homeless.sentence.contains("flatout data prepare"), "{homeless}");
}

#[test]
fn indices_of_large_text_are_kept() {
    let scratch = Scratch::new("kept-index");
    let path = written(
        &scratch,
        "large.jsonl",
        "{\"text\": \"A line of text, and then another.\"}\n".repeat(2000).as_bytes(),
    );
    let tokenizer = scratch.path().join("tokenizer.json");
    Vocabulary::train(["A line of text, and then another."].into_iter(), 270)
        .unwrap()
        .save(&tokenizer)
        .unwrap();
    let cache = scratch.path().join("cache");
    let spec = Spec {
        path: vec![path],
        tokenizer: Some(tokenizer),
        cache: Some(cache.clone()),
        held_out: 0.0,
        in_memory_bytes: 0,
        ..synthetic()
    };
    let corpus = open(&spec).unwrap();
    assert!(corpus.describe().is_estimated);
    assert_eq!(std::fs::read_dir(cache.join("indices")).unwrap().count(), 1);
    let (rows, cursor) = rows_of(&corpus, &corpus.start(), 2, 10);
    assert!(rows.epoch < 0.1);
    assert!(open(&spec).unwrap().train_loader(&cursor, LoaderOptions::default()).is_ok());
}

#[test]
fn unusable_sources_are_named() {
    let scratch = Scratch::new("bad-sources");
    let forms = every_form(&scratch);
    let of = |name: &str| forms.iter().find(|(form, _)| *form == name).unwrap().1.clone();
    let shards = scratch.path().join("shards");
    let manifest = std::fs::read_to_string(shards.join("manifest.json")).unwrap();
    let shard = shards.join("shard-00001.tokens");
    let bytes = std::fs::read(&shard).unwrap();
    let flipped = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 4;
        bytes
    };
    // Damages the shards in turn and restores them afterwards.
    for (name, damaged, words) in [
        ("cut short", bytes[..bytes.len() - 9].to_vec(), "shard-00001.tokens cannot be used: it has"),
        ("empty", vec![], "fewer than its header"),
        (
            "another file",
            b"PAR1 and more than sixty-four bytes of something that is no shard at all".to_vec(),
            "begin",
        ),
        ("header", flipped(17), "its header is damaged"),
        ("tokens", flipped(64), "its document 0 is damaged"),
        ("index", flipped(bytes.len() - 24), "its index is damaged"),
        ("version", flipped(8), "it is of version"),
        (
            "another shard",
            std::fs::read(shards.join("shard-00000.tokens")).unwrap(),
            "not the one its manifest",
        ),
    ] {
        std::fs::write(&shard, damaged).unwrap();
        let sentence = refused(&of("shards"));
        assert!(sentence.contains(words), "{name}: {sentence}");
        std::fs::write(&shard, &bytes).unwrap();
    }
    std::fs::remove_file(&shard).unwrap();
    assert!(refused(&of("shards")).contains("shard-00001.tokens cannot be read"));
    std::fs::write(&shard, &bytes).unwrap();
    for (name, from, to, words) in [
        ("outside", "shard-00001.tokens", "../stories.jsonl", "not in its folder"),
        ("version", "\"version\": 1", "\"version\": 9", "its version is 9"),
        ("no json", "{", "", "cannot be used"),
        ("a lie", "\"tokens\": ", "\"tokens\": 1", "do not sum"),
    ] {
        std::fs::write(shards.join("manifest.json"), manifest.replacen(from, to, 1)).unwrap();
        let sentence = refused(&of("shards"));
        assert!(sentence.contains(words), "{name}: {sentence}");
    }
    std::fs::write(shards.join("manifest.json"), &manifest).unwrap();
    open(&of("shards")).unwrap();

    let other = scratch.path().join("other.json");
    Vocabulary::train(["another text altogether"].into_iter(), 270).unwrap().save(&other).unwrap();
    let sentence = refused(&Spec { tokenizer: Some(other), ..of("shards") });
    assert!(sentence.contains("made with another tokeniser"), "{sentence}");
    assert!(refused(&Spec { vocab: 300, ..of("shards") }).contains("but the model only 300"));
    let path = of("memory").path.remove(0);
    let both = [of("shards").path, vec![path.clone()]].concat();
    assert!(refused(&Spec { path: both, ..of("memory") }).contains("parts of data.mix"));
    assert!(
        refused(&Spec { source: SourceKind::Shards, ..of("memory") })
            .contains("manifest.json cannot be read")
    );
    assert!(refused(&Spec { eos: Some(900), tokenizer: None, ..of("bin") }).contains("data.eos=900"));
    let spec = Spec { path: vec![path], mix: of("mix").mix, ..of("mix") };
    assert!(refused(&spec).contains("both given"));
    let mut mix = of("mix");
    mix.mix[0].weight = 0.0;
    assert!(refused(&mix).contains("the weight 0"));
    let bad = written(&scratch, "bad.jsonl", &[&b"{\"text\": 5}\n"[..], &stories(2, 4)].concat());
    assert!(refused(&Spec { path: vec![bad.clone()], ..of("memory") }).contains("bad.jsonl, line 1"));
    let read = ReadOptions { on_error: OnError::Skip, ..ReadOptions::default() };
    let mut events = Vec::new();
    open_reporting(&Spec { path: vec![bad], read, ..of("memory") }, &mut |one| events.push(one)).unwrap();
    assert!(
        matches!(&events[..], [OpenEvent::LeftOut(line)] if line.contains("1 left out: 1 field not a string (first:")),
        "{events:?}"
    );
}

#[test]
fn a_single_long_text_of_tokens_has_no_frame() {
    let scratch = Scratch::new("frameless");
    let bytes: Vec<u8> = (0..100_000u32).flat_map(|token| ((token % 250) as u16).to_le_bytes()).collect();
    let spec = Spec { path: vec![written(&scratch, "long.bin", &bytes)], vocab: 256, ..synthetic() };
    let corpus = open(&spec).unwrap();
    let (rows, _) = rows_of(&corpus, &corpus.start(), 2, 3000);
    assert!(rows.tokens.iter().all(|token| *token < 250), "no token was added");
    let continues = rows
        .targets
        .iter()
        .zip(&rows.tokens)
        .all(|(target, token)| *target == -1 || *target == (token + 1) % 250);
    assert!(continues, "nothing is predicted across a seam");
    assert!(rows.weights.contains(&0.0));
}

#[test]
fn held_out_files_replace_the_held_out_share() {
    let scratch = Scratch::new("held-out-path");
    let lines = |from: usize| -> String {
        (from..from + 500).map(|line| format!("Number {line} is followed by {}.\n", line + 1)).collect()
    };
    let path = vec![written(&scratch, "train.txt", lines(0).as_bytes())];
    let alone = open(&Spec { path, vocab: 300, held_out: 0.0, ..synthetic() }).unwrap();
    let validation = lines(1000);
    for (name, bytes) in
        [("v.txt", validation.clone().into_bytes()), ("v.txt.gz", gzip(validation.as_bytes()))]
    {
        let spec = Spec {
            path: vec![scratch.path().join("train.txt").to_str().unwrap().into()],
            held_out_path: vec![written(&scratch, name, &bytes)],
            cache: Some(scratch.path().join("cache")),
            vocab: 300,
            held_out: 0.2,
            ..synthetic()
        };
        let corpus = open(&spec).unwrap();
        // All of the training file is trained on, with the order and the tokens it has without held-out files.
        assert_eq!(corpus.vocabulary().fingerprint(), alone.vocabulary().fingerprint());
        let rows = |corpus: &Corpus| rows_of(corpus, &corpus.start(), 1, 8).0;
        assert_eq!(rows(&corpus).tokens, rows(&alone).tokens, "{name}");
        let (described, whole) = (corpus.describe(), alone.describe());
        assert_eq!((described.documents, described.tokens), (whole.documents, whole.tokens));
        assert!(described.held_out_documents > Some(0));
        let held = corpus.held_out_rows(1000).unwrap();
        let text =
            corpus.vocabulary().decode(&held.tokens.iter().map(|token| *token as u32).collect::<Vec<_>>());
        assert!(text.contains("Number 1003 is") && !text.contains("Number 3 is"), "{name}: {text:.200}");
    }
    let made = Spec { held_out_path: vec!["v.txt".into()], ..synthetic() };
    assert!(refused(&made).contains("no use for data.held_out_path"));
    let missing = Spec { held_out_path: vec!["no/such.txt".into()], ..text(&scratch) };
    assert!(refused(&missing).contains("no/such.txt"));
}
