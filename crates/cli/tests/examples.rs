//! `data inspect` of conversations and labelled texts, and training on them, through the program.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{CommandOutput, execute, flatout};
use crate::tar::tar;

/// Inspects the data of a small model of two classes.
const CLASSES: [&str; 7] = [
    "data",
    "inspect",
    "tiny",
    "data.task=classes",
    "model.head=classes",
    "model.classes=2",
    "model.vocab=300",
];

fn chats(rows: usize) -> String {
    let row = |at: usize| {
        format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"What is {at} + {at}?\"}},{{\"role\":\"assistant\",\
             \"content\":\"It is {}.\"}}]}}\n",
            2 * at
        )
    };
    (0..rows).map(row).collect()
}

fn done(dir: &Path, words: &[&str]) -> CommandOutput {
    let result = execute(dir, words);
    assert_eq!(result.code, Some(0), "{words:?}: {}", result.err);
    result
}

fn refused(dir: &Path, words: &[&str], parts: &[&str]) {
    execute(dir, words).assert_refused(parts);
}

#[test]
fn samples_with_frames_are_shown_and_video_files_are_refused_with_advice() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let picture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/pictures/rgb.png");
    let image = fs::read(picture).expect("a picture");
    let mut members = vec![];
    for sample in 0..40 {
        for frame in 0..3 {
            members.push((format!("s{sample}.{frame:03}.png"), image.clone()));
        }
        let text = format!(r#"{{"user":"what is {sample}?","assistant":"number {sample}","frame_count":3}}"#);
        members.push((format!("s{sample}.json"), text.into_bytes()));
    }
    fs::write(dir.join("a.tar"), tar(&members)).unwrap();
    let result = done(dir, &["data", "inspect", "a.tar", "--task", "foveated", "--samples", "2"]);
    for words in
        ["frames   3 frames of 224 x 224 pixels, from a.tar, byte ", "[[<frame> x 3<|im_start|>system"]
    {
        assert!(result.out.contains(words), "{} lacks {words:?}", result.out);
    }
    let result = done(dir, &["data", "inspect", "a.tar", "--task", "foveated", "--json"]);
    let shown: Value = serde_json::from_str(&result.out).expect("an object");
    assert_eq!(shown["description"]["rows"], 40);
    assert_eq!(shown["samples"][0]["images"].as_array().unwrap().len(), 3);
    members.push(("v.mp4".into(), b"?".to_vec()));
    members.push(("v.json".into(), br#"{"assistant":"a video"}"#.to_vec()));
    fs::write(dir.join("a.tar"), tar(&members)).unwrap();
    let words = ["train", "fvlm-135m-sft", "--with", "small", "backend=cpu", "data.path=a.tar"];
    refused(
        dir,
        &words,
        &["v.mp4 is a video", "ffmpeg -i v.mp4 -vf \"fps=1,scale=32:32:", "data.on_error=skip"],
    );
    let result = done(dir, &["data", "inspect", "a.tar", "--task", "foveated"]);
    assert!(
        result.out.contains("unusable 1 video that is not cut into frames (first: a.tar, byte "),
        "{}",
        result.out
    );
}

#[test]
fn rows_with_images_are_shown_with_sizes_and_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let pictures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/pictures");
    fs::create_dir(dir.join("images")).unwrap();
    fs::copy(pictures.join("rgb.png"), dir.join("images/a.png")).unwrap();
    let row = |image: &str, at: usize| {
        format!("{{\"image\":\"{image}\",\"question\":\"What is {at}?\",\"answer\":\"It is {at}.\"}}\n")
    };
    let text = "{\"question\":\"Why?\",\"answer\":\"Thus.\"}\n";
    let rows: String = (0..40).map(|at| row("a.png", at)).collect();
    fs::write(dir.join("rows.jsonl"), rows + text + &row("none.png", 7)).unwrap();
    let words = [
        "data",
        "inspect",
        "rows.jsonl",
        "--task",
        "visual_chat",
        "--image-root",
        "images",
        "--samples",
        "1",
    ];
    let result = done(dir, &words);
    for part in [
        "schema   `question` and `answer`, with images",
        "images   1 different in 40 examples, 2,800 tokens; broken: 1",
        "unusable 1 missing image file (first: rows.jsonl, line 42)",
        "image    45 x 30 pixels, 70 tokens (images/a.png)",
        "<|vision_start|><|image_pad|> x 70<|vision_end|>What is 0?",
        "]]It is 0.<|im_end|>",
    ] {
        assert!(result.out.contains(part), "{part}: {}", result.out);
    }
    let result = done(dir, &[&words[..], &["--json"]].concat());
    let seen: Value = serde_json::from_str(&result.out).unwrap();
    assert_eq!(seen["description"]["images"]["tokens"], 2800);
    let image = &seen["samples"][0]["images"][0];
    assert_eq!((&image["width"], &image["height"], &image["tokens"]), (&45.into(), &30.into(), &70.into()));
    refused(dir, &["data", "inspect", "tiny", "data.task=visual_chat"], &["the model sees no images"]);
    let tower = "data inspect tiny data.task=visual_chat model.vocab=400 model.rope_sections=[6,5,5] model.vision.width=16 model.vision.layers=1 \
                 model.vision.heads=2 model.vision.ffn=16 model.vision.patch=4 model.vision.image_token=6 \
                 model.vision.video_token=7 model.vision.start_token=4 model.vision.end_token=5 \
                 data.synthetic_rows=200 data.image_tokens=[4,16]";
    let words: Vec<&str> = tower.split_whitespace().collect();
    let result = done(dir, &words);
    for part in ["from 200 rows", "tokens; broken: 0", "32 x 32 pixels, 16 tokens (in the row)"] {
        assert!(result.out.contains(part), "{part}: {}", result.out);
    }
    let wrong = [&words[..], &["model.vision.image_token=9"]].concat();
    refused(dir, &wrong, &["has <|image_pad|> as token 6", "set model.vision.image_token=6"]);
}

#[test]
fn conversations_are_shown_as_the_loss_sees_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("chat.jsonl"), chats(50) + "{\"messages\":[{\"role\":\"user\",\"content\":\"?\"}]}\n")
        .unwrap();
    let result = done(dir, &["data", "inspect", "chat.jsonl", "--task", "chat", "--samples", "1"]);
    for part in [
        "schema   `messages` (role, content)",
        "template data.template=chatml",
        "unusable 1 nothing to learn (first: chat.jsonl, line 51)",
        "lengths in tokens",
        "[[<|im_start|>user\nWhat is ",
        "<|im_start|>assistant\n]]It is ",
        "<|im_end|>[[\n]]",
    ] {
        assert!(result.out.contains(part), "{:?} lacks {part:?}", result.out);
    }
    assert!(!result.out.contains('\x1b'), "colours where no terminal is");
    let result = done(dir, &["data", "inspect", "chat.jsonl", "--task", "chat", "--json"]);
    let json: Value = serde_json::from_str(&result.out).expect("JSON");
    assert_eq!(
        json["description"]["train"].as_u64().unwrap() + json["description"]["held_out"].as_u64().unwrap(),
        50
    );
    let sample = &json["samples"][0];
    let learned: u64 = sample["spans"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|span| span["is_trained"] == true)
        .map(|span| span["tokens"].as_u64().unwrap())
        .sum();
    assert_eq!(sample["learned_tokens"].as_u64(), Some(learned));
}

#[test]
fn a_recipe_shows_its_synthetic_sets_and_its_own_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let result = done(dir, &[&CLASSES[..], &["data.synthetic_rows=300"]].concat());
    for part in ["pairs of `text_a` and `text_b`", "class    different", "class    same", ", class "] {
        assert!(result.out.contains(part), "{:?} lacks {part:?}", result.out);
    }
    let csv: String = (0..40).map(|at| format!("text {at},{}\n", ["good", "bad"][at % 2])).collect();
    fs::write(dir.join("reviews.csv"), format!("review,mood\n{csv}")).unwrap();
    let words = [&CLASSES[..], &["data.path=reviews.csv"]].concat();
    let named = ["data.text_a=review", "data.label=mood", "data.held_out=0.2"];
    let result = done(dir, &[&words[..], &named[..]].concat());
    assert!(result.out.contains("texts in `review`, labels in `mood`"), "{}", result.out);
    refused(dir, &words, &["reviews.csv, line 2", "name it with data.text_a"]);
    let wrong = ["data.text_a=review", "data.label=mood", "data.classes=[good,fine]"];
    refused(
        dir,
        &[&words[..], &wrong[..]].concat(),
        &["reviews.csv, line 3", "`bad` is none of the classes `good`, `fine`"],
    );
}

#[test]
fn commands_for_documents_refuse_other_tasks() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("a.jsonl"), chats(3) + "{\"messages\":[]}\n").unwrap();
    let words = ["data", "inspect", "tiny", "model.vocab=300", "data.path=a.jsonl"];
    refused(dir, &[&words[..], &["data.task=chat"]].concat(), &["a.jsonl, line 4", "`messages` is empty"]);
    refused(dir, &[&words[..], &["data.template=chatml"]].concat(), &["give data.task=chat"]);
    let colourless =
        flatout(dir, &["data", "inspect", "a.jsonl", "--task", "chat"]).env("NO_COLOR", "1").output();
    assert!(!String::from_utf8(colourless.unwrap().stdout).unwrap().contains('\x1b'));
}

#[test]
fn a_run_is_trained_on_conversations_and_asked_in_their_template() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("chat.jsonl"), chats(60)).unwrap();
    let small = "model.width=32 model.layers=1 model.heads=2 model.kv_heads=1 model.ffn=48 model.vocab=320 \
                 model.context=64 train.steps=6 train.batch=4 schedule.warmup_steps=2 eval.rows=4 backend=cpu";
    let words: Vec<&str> = ["train", "tiny"].into_iter().chain(small.split_whitespace()).collect();
    for (run, more) in [("own", ["data.path=chat.jsonl"]), ("made", ["data.synthetic_rows=300"])] {
        done(dir, &[&words[..], &more[..], &["data.task=chat", "--run", run]].concat());
        let asked = ["generate", run, "--chat", "--prompt", "What is 3 + 3?", "--max-tokens", "8", "--json"];
        let json: Value = serde_json::from_str(&done(dir, &asked).out).expect("JSON");
        assert!(!json["texts"][0].as_str().unwrap().contains("What is"), "{json}");
        assert!(json["prompt_tokens"].as_u64().unwrap() > 8);
        done(dir, &["resume", run, "train.steps=8"]);
    }
    // Too few tokens of every row are left to train on.
    let cut = [&words[..], &["data.path=chat.jsonl", "data.task=chat", "data.max_tokens=8", "--run", "cut"]]
        .concat();
    refused(dir, &cut, &["There is no example to learn from", "longer than data.max_tokens=8"]);
    let classes = [&words[..], &["data.task=classes", "--run", "classes"]].concat();
    refused(dir, &classes, &["`data.task` is classes and `model.head` is tokens"]);
    let head = ["model.head=classes", "model.classes=3"];
    refused(
        dir,
        &[&classes[..], &head[..]].concat(),
        &["the labels are of 2 classes (different, same) and `model.classes` is 3"],
    );
    done(dir, &[&classes[..], &["model.head=classes", "model.classes=2"]].concat());
}

/// The recipes for conversations without any download: small, with random weights, on synthetic conversations.
#[test]
fn sft_recipes_train_without_a_download() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    for recipe in ["smollm2-135m-sft", "qwen3-0.6b-sft"] {
        let small =
            ["model.width=32", "model.layers=2", "model.head_size=8", "model.ffn=64", "model.vocab=512"];
        let brief =
            ["data.synthetic_rows=600", "train.batch=16", "train.epochs=2", "lr=1e-2", "every_epochs=1"];
        let words = [&["train", recipe, "--with", "small", "--run", recipe][..], &small, &brief].concat();
        let result = done(dir, &words);
        assert!(result.err.contains(&format!("flatout generate {recipe} --chat")), "{}", result.err);
        let log = fs::read_to_string(dir.join(recipe).join("events.jsonl")).expect("a log");
        let events: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let losses = |kind: &str| -> Vec<f64> {
            events
                .iter()
                .filter(|e| e["event"] == kind)
                .map(|e| e["loss"].as_f64().expect("a loss"))
                .collect()
        };
        let (first, last) = (losses("step")[0], *losses("eval").last().expect("an evaluation"));
        assert!(last < 0.5 * first, "{recipe}: from {first} to {last} on what was held out");
        let asked =
            done(dir, &["generate", recipe, "--chat", "--prompt", "How many words are these: lamp drum?"]);
        assert!(!asked.out.is_empty());
        let out = format!("{recipe}-out");
        done(dir, &["export", recipe, "--to", &out]);
        let template = fs::read_to_string(dir.join(out).join("chat_template.jinja")).expect("a template");
        assert!(template.contains("<|im_start|>"), "it goes along: {template}");
    }
}
