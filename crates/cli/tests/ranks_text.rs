//! Files of text in shares: ranks read the streams of their own rows, and what they read, learn and save is what one rank does.

use std::fmt::Write;
use std::fs;

use flatout_train::run::events::{self, Event};
use serde_json::Value;

use crate::program::say;
use crate::ranks_train::words;
use crate::scene::Scene;

/// Text of more bytes than are tokenised when a run begins.
const BYTES: usize = 17 << 20;
const FILE: &str =
    "tiny data.path=book.jsonl data.tokenizer=tokens/tokenizer.json model.context=32 eval.rows=4";
const MIXTURE: &str =
    "tiny data.mix=[{path='one.jsonl',weight=1},{path='two.jsonl',weight=3}] model.context=32 eval.rows=4";

/// Writes documents of words that are drawn, until they have this many bytes.
fn write_documents(scene: &Scene, name: &str, bytes: usize) {
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
    fs::write(scene.dir(name), text).expect("a file");
}

fn train(scene: &Scene, command: &str, run: &str, ranks: &str, steps: &str) {
    let mut all = words(command, run, ranks);
    let steps = format!("train.steps={steps}");
    all.extend([steps.as_str(), "schedule.horizon_steps=20", "checkpoint.every=3"]);
    let said = say(scene.folder.path(), &all);
    assert_eq!(said.code, Some(0), "{run}: {}", said.err);
}

fn resume(scene: &Scene, run: &str, ranks: &str, steps: &str) {
    let said =
        say(scene.folder.path(), &["resume", run, &format!("train.steps={steps}"), "--ranks", ranks, "-q"]);
    assert_eq!(said.code, Some(0), "{run} on {ranks}: {}", said.err);
}

/// The cursor of a checkpoint as the file has it.
fn cursor(scene: &Scene, run: &str, step: u64) -> String {
    let text = fs::read_to_string(scene.dir(run).join(format!("checkpoints/step-{step}/state.json")));
    let text = text.expect("a checkpoint");
    let from = text.find("\"cursor\"").expect("a cursor");
    let end = text[from..].find("\"data\"").expect("its last field or its first");
    let whole: Value = serde_json::from_str(&text).expect("JSON");
    let streams = whole["cursor"]["streams"].as_array().expect("positions");
    assert!(streams.len() == 8 && streams.iter().all(Value::is_object), "every position is known");
    format!("{}{}", &text[from..from + end], whole["cursor"])
}

fn warned(scene: &Scene, run: &str) -> Vec<String> {
    let of = |event| match event {
        Event::Warning { message } if message.contains("rows of text") => Some(message),
        _ => None,
    };
    scene.events(run).into_iter().filter_map(of).collect()
}

fn epochs(scene: &Scene, run: &str) -> Vec<f64> {
    events::steps(&scene.events(run)).iter().map(|step| step.epoch).collect()
}

#[test]
fn text_that_is_tokenised_as_it_is_read_is_the_same_for_every_number_of_ranks() {
    let scene = Scene::new();
    write_documents(&scene, "book.jsonl", BYTES);
    write_documents(&scene, "short.jsonl", 50 << 10);
    let prepare = ["data", "prepare", "short.jsonl", "--out", "tokens", "--vocab", "512"];
    let said = say(scene.folder.path(), &prepare);
    assert_eq!(said.code, Some(0), "{}", said.err);
    train(&scene, FILE, "one", "1", "6");
    for ranks in ["2", "8"] {
        train(&scene, FILE, ranks, ranks, "6");
        scene.assert_same("one", ranks, 6);
        assert_eq!(cursor(&scene, ranks, 6), cursor(&scene, "one", 6), "{ranks} ranks");
        assert_eq!(warned(&scene, ranks), Vec::<String>::new(), "{ranks} ranks share no stream");
        // The streams of rank 0 are as far as all are, give or take a few of a hundred thousand documents.
        let [some, all] = [ranks, "one"].map(|run| *epochs(&scene, run).last().expect("steps"));
        assert!(all > 0.0 && (some / all - 1.0).abs() < 0.5, "{some} epochs on {ranks} ranks, {all} on one");
    }
    // Three ranks share every stream, and say so once. A checkpoint of theirs is anyone's.
    train(&scene, FILE, "three", "3", "3");
    let [warning] = &warned(&scene, "three")[..] else { panic!("{:?}", warned(&scene, "three")) };
    assert!(
        warning.starts_with("a rank reads and tokenises 2.0 rows of text for one")
            && warning.contains("`flatout data prepare`"),
        "{warning}"
    );
    assert_eq!(cursor(&scene, "three", 3), cursor(&scene, "one", 3));
    resume(&scene, "three", "2", "6");
    assert_eq!(cursor(&scene, "three", 6), cursor(&scene, "one", 6));
    let [one, three] = ["one", "three"].map(|run| events::steps(&scene.events(run)));
    for (one, three) in one.iter().zip(&three) {
        assert!((three.loss / one.loss - 1.0).abs() < 1e-5, "{} and {}", one.loss, three.loss);
    }
    // Tokens that are prepared cost a rank next to nothing to pass over.
    train(&scene, "tiny data.path=tokens model.context=32 eval.rows=4", "prepared", "3", "1");
    assert_eq!(warned(&scene, "prepared"), Vec::<String>::new());
}

/// A mixture counts its epochs in documents, whatever its size.
#[test]
fn a_mixture_goes_on_with_every_number_of_ranks() {
    let scene = Scene::new();
    write_documents(&scene, "one.jsonl", 20 << 10);
    write_documents(&scene, "two.jsonl", 30 << 10);
    train(&scene, MIXTURE, "unbroken", "1", "12");
    train(&scene, MIXTURE, "run", "4", "3");
    for (ranks, steps) in [("1", "5"), ("8", "7"), ("2", "9"), ("4", "12")] {
        resume(&scene, "run", ranks, steps);
        let [own, whole] = ["run", "unbroken"].map(|run| events::steps(&scene.events(run)));
        let at = own.len() - 1;
        let [own, whole] = [own[at].epoch, whole[at].epoch];
        assert!(
            whole > 0.02 && (own / whole - 1.0).abs() < 0.5,
            "{own} epochs on {ranks} ranks, {whole} on one"
        );
    }
    scene.assert_same("unbroken", "run", 12);
    assert_eq!(cursor(&scene, "run", 12), cursor(&scene, "unbroken", 12));
}
