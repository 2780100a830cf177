//! Text files on several ranks: each reads the streams of its own rows, and together they read, learn and save the same as one rank.

use std::fmt::Write;
use std::fs;

use flatout_train::run::events::{self, Event};
use serde_json::Value;

use crate::fixture::Fixture;
use crate::program::execute;
use crate::ranks_train::words;

/// Bytes of text, more than are tokenised when a run begins.
const BYTES: usize = 17 << 20;
const FILE: &str =
    "tiny data.path=book.jsonl data.tokenizer=tokens/tokenizer.json model.context=32 eval.rows=4";
const MIXTURE: &str =
    "tiny data.mix=[{path='one.jsonl',weight=1},{path='two.jsonl',weight=3}] model.context=32 eval.rows=4";

/// Writes documents of random words until they have this many bytes.
fn write_documents(fixture: &Fixture, name: &str, bytes: usize) {
    let mut text = String::new();
    let mut state = 11u32;
    let mut drawn = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    for document in 0.. {
        if text.len() > bytes {
            break;
        }
        write!(text, "{{\"text\":\"{name} has {document}").unwrap();
        for _ in 0..5 + drawn(60) {
            write!(text, " w{}", drawn(300)).unwrap();
        }
        text.push_str("\"}\n");
    }
    fs::write(fixture.dir(name), text).expect("a file");
}

fn train(fixture: &Fixture, command: &str, run: &str, ranks: &str, steps: &str) {
    let mut all = words(command, run, ranks);
    let steps = format!("train.steps={steps}");
    all.extend([steps.as_str(), "schedule.horizon_steps=20", "checkpoint.every=3"]);
    let result = execute(fixture.folder.path(), &all);
    assert_eq!(result.code, Some(0), "{run}: {}", result.err);
}

fn resume(fixture: &Fixture, run: &str, ranks: &str, steps: &str) {
    let result = execute(
        fixture.folder.path(),
        &["resume", run, &format!("train.steps={steps}"), "--ranks", ranks, "-q"],
    );
    assert_eq!(result.code, Some(0), "{run} on {ranks}: {}", result.err);
}

/// The cursor of a checkpoint, as written in its file.
fn cursor(fixture: &Fixture, run: &str, step: u64) -> String {
    let text = fs::read_to_string(fixture.dir(run).join(format!("checkpoints/step-{step}/state.json")));
    let text = text.expect("a checkpoint");
    let from = text.find("\"cursor\"").expect("a cursor");
    let end = text[from..].find("\"data\"").expect("its last field or its first");
    let whole: Value = serde_json::from_str(&text).expect("JSON");
    let streams = whole["cursor"]["streams"].as_array().expect("positions");
    assert!(streams.len() == 8 && streams.iter().all(Value::is_object), "every position is known");
    format!("{}{}", &text[from..from + end], whole["cursor"])
}

fn warned(fixture: &Fixture, run: &str) -> Vec<String> {
    let of = |event| match event {
        Event::Warning { message } if message.contains("rows of text") => Some(message),
        _ => None,
    };
    fixture.events(run).into_iter().filter_map(of).collect()
}

fn epochs(fixture: &Fixture, run: &str) -> Vec<f64> {
    events::steps(&fixture.events(run)).iter().map(|step| step.epoch).collect()
}

#[test]
fn text_that_is_tokenised_as_it_is_read_is_the_same_for_every_number_of_ranks() {
    let fixture = Fixture::new();
    write_documents(&fixture, "book.jsonl", BYTES);
    write_documents(&fixture, "short.jsonl", 50 << 10);
    let prepare = ["data", "prepare", "short.jsonl", "--out", "tokens", "--vocab", "512"];
    let result = execute(fixture.folder.path(), &prepare);
    assert_eq!(result.code, Some(0), "{}", result.err);
    train(&fixture, FILE, "one", "1", "6");
    for ranks in ["2", "8"] {
        train(&fixture, FILE, ranks, ranks, "6");
        fixture.assert_same("one", ranks, 6);
        assert_eq!(cursor(&fixture, ranks, 6), cursor(&fixture, "one", 6), "{ranks} ranks");
        assert_eq!(warned(&fixture, ranks), Vec::<String>::new(), "{ranks} ranks share no stream");
        // The streams of rank 0 are as far as the others, within a few of a hundred thousand documents.
        let [some, all] = [ranks, "one"].map(|run| *epochs(&fixture, run).last().expect("steps"));
        assert!(all > 0.0 && (some / all - 1.0).abs() < 0.5, "{some} epochs on {ranks} ranks, {all} on one");
    }
    // Three ranks share every stream, and warn once. Any number of ranks can continue from their checkpoint.
    train(&fixture, FILE, "three", "3", "3");
    let [warning] = &warned(&fixture, "three")[..] else { panic!("{:?}", warned(&fixture, "three")) };
    assert!(
        warning.starts_with("a rank reads and tokenises 2.0 rows of text for one")
            && warning.contains("`flatout data prepare`"),
        "{warning}"
    );
    assert_eq!(cursor(&fixture, "three", 3), cursor(&fixture, "one", 3));
    resume(&fixture, "three", "2", "6");
    assert_eq!(cursor(&fixture, "three", 6), cursor(&fixture, "one", 6));
    let [one, three] = ["one", "three"].map(|run| events::steps(&fixture.events(run)));
    for (one, three) in one.iter().zip(&three) {
        assert!((three.loss / one.loss - 1.0).abs() < 1e-5, "{} and {}", one.loss, three.loss);
    }
    // Skipping prepared tokens costs a rank next to nothing.
    train(&fixture, "tiny data.path=tokens model.context=32 eval.rows=4", "prepared", "3", "1");
    assert_eq!(warned(&fixture, "prepared"), Vec::<String>::new());
}

/// A mixture of any size counts its epochs in documents.
#[test]
fn a_mixture_resumes_with_every_number_of_ranks() {
    let fixture = Fixture::new();
    write_documents(&fixture, "one.jsonl", 20 << 10);
    write_documents(&fixture, "two.jsonl", 30 << 10);
    train(&fixture, MIXTURE, "unbroken", "1", "12");
    train(&fixture, MIXTURE, "run", "4", "3");
    for (ranks, steps) in [("1", "5"), ("8", "7"), ("2", "9"), ("4", "12")] {
        resume(&fixture, "run", ranks, steps);
        let [own, whole] = ["run", "unbroken"].map(|run| events::steps(&fixture.events(run)));
        let at = own.len() - 1;
        let [own, whole] = [own[at].epoch, whole[at].epoch];
        assert!(
            whole > 0.02 && (own / whole - 1.0).abs() < 0.5,
            "{own} epochs on {ranks} ranks, {whole} on one"
        );
    }
    fixture.assert_same("unbroken", "run", 12);
    assert_eq!(cursor(&fixture, "run", 12), cursor(&fixture, "unbroken", 12));
}
