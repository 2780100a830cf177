//! Preferences through the program: files of pairs are inspected, planned, trained on, evaluated and measured, and wrong files are refused.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{CommandOutput, execute};
use crate::tar::tar;

fn ok(dir: &Path, words: &[&str]) -> CommandOutput {
    let result = execute(dir, words);
    assert_eq!(result.code, Some(0), "{words:?}: {}", result.err);
    result
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("one object")
}

const SMALL: [&str; 14] = [
    "model.width=32",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=48",
    "model.vocab=320",
    "model.context=64",
    "data.synthetic_rows=80",
    "train.batch=4",
    "train.steps=4",
    "schedule.warmup_steps=1",
    "eval.every=2",
    "eval.rows=4",
    "backend=cpu",
];

fn with<'w>(command: &[&'w str], more: &[&'w str]) -> Vec<&'w str> {
    [command, &SMALL, more].concat()
}

fn write_pairs(dir: &Path) {
    let row = |i: usize| format!(r#"{{"prompt":"Question {i}: ","chosen":"yes {i}","rejected":"no {i}"}}"#);
    let rows: Vec<String> = (0..40).map(row).collect();
    fs::write(dir.join("pairs.jsonl"), rows.join("\n")).expect("a file");
}

#[test]
fn pairs_are_inspected_planned_trained_and_evaluated() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    write_pairs(dir);
    let shown = ok(dir, &["data", "inspect", "pairs.jsonl", "--task", "preference"]);
    let result = &shown.out;
    for words in ["pairs    ", "chosen, ", "rejected, ", "`prompt`, `chosen` and `rejected`"] {
        assert!(result.contains(words), "{words}: {result}");
    }
    let shown = json(&ok(dir, &["data", "inspect", "pairs.jsonl", "--task", "preference", "--json"]).out);
    let answers: Vec<&str> =
        shown["samples"].as_array().expect("samples").iter().map(|s| s["answer"].as_str().unwrap()).collect();
    assert_eq!(answers[..2], ["chosen", "rejected"]);

    let recipe = ["plan", "preference-tiny"];
    assert!(ok(dir, &with(&recipe, &["data.path=pairs.jsonl"])).out.contains("memory"));
    let trained = ok(dir, &with(&["train", "preference-tiny", "--run", "run"], &["data.path=pairs.jsonl"]));
    assert!(trained.err.contains("reward accuracy") && trained.err.contains("pairs"), "{}", trained.err);
    let events = fs::read_to_string(dir.join("run/events.jsonl")).expect("events");
    let of = |kind: &str| -> Vec<Value> {
        events.lines().map(json).filter(|event| event["event"] == kind).collect()
    };
    for event in [of("step"), of("eval")].concat() {
        for number in ["reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected", "logp_chosen"]
        {
            assert!(event["metrics"][number].is_number(), "{number}: {event}");
        }
    }
    assert!(of("start")[0]["start_seconds"]["reference"].is_number());
    assert!(
        dir.join("run/plots/reward_margin.svg").is_file() && dir.join("run/reference.safetensors").is_file()
    );
    assert!(fs::read_to_string(dir.join("run/report.md")).expect("a report").contains("reward accuracy"));
    let best = fs::read_to_string(dir.join("run/checkpoints/best.json")).expect("the best");
    assert!(best.contains("reward_accuracy"), "{best}");

    let found = json(&ok(dir, &["eval", "run", "--json"]).out);
    let last = of("eval").pop().expect("an evaluation");
    let [got, wanted] = [&found, &last].map(|of| of["loss"].as_f64().expect("a loss"));
    assert!((got - wanted).abs() < 1e-5, "{found} {last}");
    assert_eq!(found["metrics"]["reward_accuracy"], last["metrics"]["reward_accuracy"]);
    assert!(ok(dir, &["eval", "run"]).out.contains("held-out pairs"));
    let other = execute(dir, &["eval", "run", "data.path=pairs.jsonl"]);
    assert_eq!(other.code, Some(2));
    assert!(other.err.contains("name one with preference.reference"), "{}", other.err);
    let other = ok(dir, &["eval", "run", "data.path=pairs.jsonl", "preference.reference=run"]);
    // The model is its own reference, so rewards are zero.
    assert!(other.out.contains("margin 0.0000") && other.out.contains("40 pairs"), "{}", other.out);

    // A run that starts from another run has that one as its reference.
    let begun = [
        "train",
        "preference-tiny",
        "model.from=run",
        "data.tokenizer=run/tokenizer.json",
        "--run",
        "second",
    ];
    let few = [
        "data.path=pairs.jsonl",
        "train.steps=2",
        "eval.rows=2",
        "schedule.warmup_steps=0",
        "adapter.kind=lora",
    ];
    ok(dir, &[&begun[..], &few].concat());
    assert!(ok(dir, &["eval", "second", "data.path=pairs.jsonl"]).out.contains("reward accuracy"));
}

#[test]
fn labelled_answers_are_trained_and_switches_are_measured() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let row = |i: usize| {
        format!(r#"{{"prompt":"Question {i}: ","completion":"yes {i}","label":{}}}"#, !i.is_multiple_of(3))
    };
    let rows: Vec<String> = (0..40).map(row).collect();
    fs::write(dir.join("kto.jsonl"), rows.join("\n")).expect("a file");
    let shown = ok(dir, &["data", "inspect", "kto.jsonl", "--task", "preference"]);
    assert!(shown.out.contains("wanted, "), "{}", shown.out);
    let kto = ["data.path=kto.jsonl", "preference.loss=kto", "preference.sft=0"];
    ok(dir, &with(&["train", "preference-tiny", "--run", "run"], &kto));
    let found = json(&ok(dir, &["eval", "run", "--json"]).out);
    assert!(found["metrics"]["reward_margin"].is_number(), "{found}");

    let switches = ["ablate", "preference-tiny", "--only", "shared_prefix", "--budget", "1", "--json"];
    let measured = json(&ok(dir, &with(&switches, &[])).out);
    assert!(measured.to_string().contains("shared_prefix"), "{measured}");
}

#[test]
fn wrong_pairs_end_with_a_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    write_pairs(dir);
    let mut text = fs::read_to_string(dir.join("pairs.jsonl")).expect("a file");
    text += "\n{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"b\"}\n";
    fs::write(dir.join("wrong.jsonl"), text).expect("a file");
    let result =
        execute(dir, &with(&["train", "preference-tiny", "--run", "run"], &["data.path=wrong.jsonl"]));
    result.assert_refused(&["wrong.jsonl, line 41: both answers are equal"]);
    assert!(!dir.join("run").exists(), "nothing is left");
    let skip = ["data.path=wrong.jsonl", "data.on_error=skip"];
    let result = ok(dir, &with(&["train", "preference-tiny", "--run", "run"], &skip));
    assert!(result.err.contains("1 answers that cannot be compared"), "{}", result.err);
    for (word, sentence) in [
        ("preference.loss=ppo", "preference.loss"),
        ("data.train_on=each", "answers are compared whole"),
        ("preference.reference=nowhere", "nowhere does not exist"),
        ("loss_type=sigmoid", "preference.loss"),
    ] {
        let result = execute(
            dir,
            &with(&["train", "preference-tiny", "--run", "other"], &["data.path=pairs.jsonl", word]),
        );
        result.assert_refused(&[sentence]);
    }
}

/// Rows with images and shards with pairs are recognised by their content, inspected, trained on and used for generation.
#[test]
fn pairs_about_images_and_frames_are_inspected_and_trained() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let pictures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/pictures");
    let names =
        ["rgb.png", "grey.png", "420.jpg", "444.jpg", "palette.png", "rgba.png", "bits.png", "rgb16.png"];
    for name in names {
        fs::copy(pictures.join(name), dir.join(name)).expect("a picture");
    }
    let image = fs::read(dir.join("rgb.png")).expect("a picture");
    let row = |i: usize| {
        let name = names[i % names.len()];
        format!(r#"{{"image":"{name}","question":"Is it {i}?","chosen":"yes {i}","rejected":"no {i}"}}"#)
    };
    let rows: Vec<String> = (0..40).map(row).collect();
    fs::write(dir.join("pairs.jsonl"), rows.join("\n")).expect("a file");
    let shown = ok(dir, &["data", "inspect", "pairs.jsonl", "--task", "preference"]).out;
    for words in
        ["pairs    ", "chosen, ", "image    ", "`question`, `chosen` and `rejected`", "images   8 different"]
    {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    let mut members = vec![];
    for sample in 0..40 {
        members.push((format!("s{sample}.png"), image.clone()));
        let text = format!(
            r#"{{"user":"Is it {sample}?","chosen_assistant":"yes {sample}","rejected_assistant":"no {sample}"}}"#
        );
        members.push((format!("s{sample}.json"), text.into_bytes()));
    }
    fs::write(dir.join("pairs.tar"), tar(&members)).expect("a shard");
    let shown = ok(dir, &["data", "inspect", "pairs.tar", "--task", "preference"]).out;
    for words in ["pairs    ", "rejected, ", "a still image as 8 frames of 224 x 224 pixels", "two answers"] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    let few = [
        "train.epochs=none",
        "train.steps=2",
        "train.batch=4",
        "eval.rows=0",
        "backend=cpu",
        "checkpoint.best=false",
    ];
    let learn = |recipe: &str, own: &[&str], run: &str| {
        ok(dir, &[&["train", recipe, "--with", "small", "--run", run], own, &few[..]].concat())
    };
    learn("qwen3-vl-2b-dpo", &["data.path=pairs.jsonl"], "images");
    const SYSTEM: &str = "You look closely.";
    let frames = ["data.path=pairs.tar", &format!("data.system={SYSTEM}")];
    let result = learn("fvlm-135m-dpo", &frames, "frames");
    assert!(result.err.contains("--frames FOLDER --prompt QUESTION"), "{}", result.err);

    // Generation uses the prompt of training: system message, question, and the beginning of the answer.
    let vocabulary = flatout_data::Vocabulary::load(&dir.join("frames/tokenizer.json")).expect("a tokeniser");
    let questions =
        flatout_data::examples::Questions::open(&vocabulary, None, &[], None).expect("a template");
    let questions = questions.with_system(SYSTEM);
    let asked = questions.tokens("Is it 3?").expect("tokens");
    let about = json(
        &ok(
            dir,
            &[
                "generate",
                "frames",
                "--frames",
                "rgb.png",
                "--prompt",
                "Is it 3?",
                "--max-tokens",
                "2",
                "--json",
            ],
        )
        .out,
    );
    assert_eq!(about["prompt_tokens"], asked.len() + 1);
    let inspect = ["data", "inspect", "fvlm-135m-dpo", "--with", "small", "--json"];
    let shown = json(&ok(dir, &[&inspect[..], &frames].concat()).out);
    let read = shown["samples"][0]["spans"][0]["text"].as_str().expect("a text");
    assert!(read.contains(SYSTEM), "{read}");

    for (path, text, words) in [
        (
            "wrong.jsonl",
            r#"{"image":"gone.png","question":"a","chosen":"b","rejected":"c"}"#,
            ["gone.png", "line 1"],
        ),
        (
            "two.jsonl",
            r#"{"image":["rgb.png","rgb.png"],"question":"<image>a","chosen":"b","rejected":"c"}"#,
            ["2 images", "line 1"],
        ),
    ] {
        fs::write(dir.join(path), text).expect("a file");
        let path = format!("data.path={path}");
        let result = execute(dir, &["train", "qwen3-vl-2b-dpo", "--with", "small", &path, "backend=cpu"]);
        assert!(result.code == Some(2) && words.iter().all(|word| result.err.contains(word)), "{result:?}");
    }
}
