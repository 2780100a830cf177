//! Tests of preferences about images: every form of rows, invalid rows, judged answers, and the generated sets.

use flatout_data::SourceKind;
use flatout_data::examples::{ExampleKind, ExampleSets, ExampleSpec, VisionSpec, open, shows_images};
use flatout_data::formats::OnError;

use crate::visual::{PATCHING, folder, text};

fn pairs(path: &str) -> ExampleSpec {
    ExampleSpec {
        task: ExampleKind::Pairs,
        path: vec![path.into()],
        vision: Some(VisionSpec { patching: PATCHING, ..VisionSpec::default() }),
        held_out: 0.0,
        vocab: 400,
        ..ExampleSpec::default()
    }
}

fn texts(sets: &ExampleSets) -> Vec<String> {
    sets.train.iter().map(|example| text(sets, example)).collect()
}

/// The conversation about a.png, whose image has six tokens, with an answer.
fn asked(answer: &str) -> String {
    format!("<|im_start|>user\n([6])What is it?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n")
}

/// The formats of TRL, ms-swift and LLaMA-Factory, and of published sets of questions with two answers.
#[test]
fn every_form_gives_the_same_pair() {
    let scratch = folder("visual-preference-forms");
    let said = |role: &str, text: &str| format!(r#"{{"role":"{role}","content":"{text}"}}"#);
    let in_parts =
        |text: &str| format!(r#"{{"role":"assistant","content":[{{"type":"text","text":"{text}"}}]}}"#);
    let question =
        r#"{"role":"user","content":[{"type":"image"},{"type":"text","text":"What is it?"}]}"#.to_string();
    let held = question.replace(r#""type":"image""#, r#""type":"image","image":"a.png""#);
    let marked = said("user", "<image>What is it?");
    let (cat, dog) = (said("assistant", "A cat"), said("assistant", "A dog"));
    let rows = [
        // TRL.
        format!(r#"{{"images":["a.png"],"prompt":[{question}],"chosen":[{cat}],"rejected":[{dog}]}}"#),
        format!(
            r#"{{"images":["a.png"],"prompt":[{question}],"chosen":[{}],"rejected":[{}]}}"#,
            in_parts("A cat"),
            in_parts("A dog")
        ),
        format!(r#"{{"images":["a.png"],"chosen":[{question},{cat}],"rejected":[{question},{dog}]}}"#),
        format!(r#"{{"prompt":[{held}],"chosen":[{cat}],"rejected":[{dog}]}}"#),
        // ms-swift.
        format!(r#"{{"messages":[{marked},{cat}],"rejected_response":"A dog","images":["a.png"]}}"#),
        format!(
            r#"{{"messages":[{marked},{cat}],"rejected_messages":[{marked},{dog}],"images":["a.png"],"rejected_images":null}}"#
        ),
        // LLaMA-Factory.
        r#"{"conversations":[{"from":"human","value":"<image>What is it?"}],"chosen":{"from":"gpt","value":"A cat"},"rejected":{"from":"gpt","value":"A dog"},"images":["a.png"]}"#.into(),
        r#"{"instruction":"<image>What is it?","input":"","chosen":"A cat","rejected":"A dog","images":["a.png"]}"#.into(),
        // Sets of questions.
        r#"{"image":"a.png","question":"What is it?","chosen":"A cat","rejected":"A dog"}"#.into(),
        r#"{"image_path":"a.png","prompt":"What is it?","chosen":"A cat","rejected":"A dog"}"#.into(),
        r#"{"images":"a.png","prompt":"<image>What is it?","chosen":"A cat","rejected":"A dog"}"#.into(),
    ];
    let mut wanted: Option<ExampleSets> = None;
    for (at, row) in rows.iter().enumerate() {
        let path = scratch.write(&format!("{at}.jsonl"), format!("{row}\n").as_bytes());
        let sets = open(&pairs(&path)).unwrap_or_else(|error| panic!("{row}: {error}"));
        assert_eq!(texts(&sets), [asked("A cat"), asked("A dog")], "{row}");
        assert!(shows_images(&pairs(&path)).unwrap(), "{row}");
        let (chosen, rejected) = (sets.train.get(0), sets.train.get(1));
        assert!(chosen.images == rejected.images && chosen.images.len() == 1, "{row}");
        assert_eq!((sets.train.together(), sets.images.count()), (2, 1), "{row}");
        match &wanted {
            None => wanted = Some(sets),
            Some(wanted) => assert_eq!((&sets.train, &sets.mark), (&wanted.train, &wanted.mark), "{row}"),
        }
    }
    // Rows without an image may be mixed with others, and their prompts are questions too.
    let mixed =
        format!("{}\n{}\n", rows[8], r#"{"image":null,"question":"Why?","chosen":"So","rejected":"No"}"#);
    let sets = open(&pairs(&scratch.write("mixed.jsonl", mixed.as_bytes()))).unwrap();
    assert_eq!(texts(&sets)[2], "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo<|im_end|>\n");
    let text = scratch.write("text.jsonl", br#"{"prompt":"a","chosen":"b","rejected":"c"}"#);
    assert!(!shows_images(&pairs(&text)).unwrap());
}

#[test]
fn wrong_pairs_are_named_by_their_line_or_counted() {
    let scratch = folder("visual-preference-wrong");
    scratch.write("broken.png", b"no image");
    let row = |rest: &str| format!(r#"{{"chosen":"A cat","rejected":"A dog",{rest}}}"#);
    let good = row(r#""image":"a.png","question":"What is it?""#);
    let answer = r#"{"role":"assistant","content":[{"type":"image"},{"type":"text","text":"A cat"}]}"#;
    let cases = [
        (row(r#""image":"gone.png","question":"What?""#), "gone.png"),
        (row(r#""image":"../a.png","question":"What?""#), "../a.png"),
        (row(r#""image":"broken.png","question":"What?""#), "broken.png"),
        (row(r#""image":"https://a.b/c.png","question":"What?""#), "is a URL"),
        (row(r#""images":["a.png","b.png"],"question":"<image>What?""#), "2 images in `images` and 1 place"),
        (row(r#""images":["a.png"],"question":"<image>or<image>?""#), "1 image in `images` and 2 places"),
        (
            row(r#""images":["a.png"],"messages":[{"role":"user","content":"What?"}]"#),
            "1 image in `images` and no place",
        ),
        (row(r#""image":"a.png","video":"a.mp4","question":"What?""#), "video is not read"),
        (
            r#"{"image":"a.png","question":"What?","chosen":"A cat","rejected":"A cat"}"#.into(),
            "both answers are equal",
        ),
        (r#"{"image":"a.png","question":"What?","chosen":"A cat","rejected":" "}"#.into(), "is empty"),
        (
            row(r#""images":["a.png"],"rejected_images":["b.png"],"question":"<image>What?""#),
            "about the same images",
        ),
        (
            format!(
                r#"{{"images":["a.png"],"prompt":[{{"role":"user","content":"What?"}}],"chosen":[{answer}],"rejected":[{}]}}"#,
                answer.replace("cat", "dog")
            ),
            "is an answer with an image",
        ),
    ];
    for (number, (bad, words)) in cases.iter().enumerate() {
        let path = scratch.write(&format!("{number}.jsonl"), format!("{good}\n{bad}\n{good}\n").as_bytes());
        // The file's first row determines the form, so these are tested separately.
        let alone = scratch.write(&format!("{number}-alone.jsonl"), format!("{bad}\n").as_bytes());
        let error = open(&pairs(&alone)).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("line 1"), "{bad}: {error}");
        let mut spec = pairs(&path);
        spec.read.on_error = OnError::Skip;
        let sets = open(&spec).unwrap();
        assert_eq!((sets.train.units(), sets.description.unusable.len()), (2, 1), "{bad}");
        assert!(sets.description.unusable[0].2.contains("line 2"), "{:?}", sets.description.unusable);
    }
}

/// Judged answers are read like questions with answers, also from parquet and CSV.
#[test]
fn judged_answers_have_images_too() {
    let scratch = folder("visual-judged");
    let path = scratch.write(
        "rows.csv",
        b"image,question,answer,label\na.png,What is it?,A cat,true\na.png,What is it?,A dog,false\n",
    );
    let sets = open(&ExampleSpec { task: ExampleKind::Judged, ..pairs(&path) }).unwrap();
    assert_eq!(texts(&sets), [asked("A cat"), asked("A dog")]);
    assert_eq!(sets.train.iter().map(|example| example.label).collect::<Vec<_>>(), [Some(1), Some(0)]);
    // Prompts keep their images when they get the answers of others.
    let mismatched = sets.train.mismatched(100);
    let shown: Vec<usize> = mismatched.iter().map(|example| example.images.len()).collect();
    assert_eq!(shown, [1, 1]);
    assert_eq!(text(&sets, mismatched.get(0)), asked("A dog"));
}

#[test]
fn the_drawn_sets_need_no_files() {
    for task in [ExampleKind::Pairs, ExampleKind::Judged] {
        let spec = ExampleSpec { task, path: vec![], source: SourceKind::Synthetic, rows: 80, ..pairs("") };
        let sets = open(&spec).unwrap();
        assert_eq!((sets.train.units(), sets.images.count()), (80, 20), "{task:?}");
        assert!(sets.train.iter().all(|example| example.images.len() == 1));
    }
}
