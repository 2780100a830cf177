//! Tests from rows with images to examples: every form, invalid rows, masks, lengths, splits, the generated set.

use std::collections::HashSet;

use crate::scratch::Scratch;
use flatout_data::examples::{
    ExampleKind, ExampleSets, ExampleSpec, TooLong, TrainOn, VisionSpec, open, open_reporting, spans,
};
use flatout_data::formats::OnError;
use flatout_data::vision::Patching;
use flatout_data::{Example, ExampleTable, OpenEvent, SourceKind, Vocabulary};

/// A PNG of this size; different shades give different images.
pub fn encoded_png(width: u32, height: u32, shade: u8) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Grayscale);
    let mut writer = encoder.write_header().unwrap();
    let pixels: Vec<u8> = (0..width * height).map(|at| shade.wrapping_add(at as u8)).collect();
    writer.write_image_data(&pixels).unwrap();
    writer.finish().unwrap();
    bytes
}

/// Patches of 4 pixels, blocks of 2 x 2, images of 4 to 64 tokens.
pub const PATCHING: Patching =
    Patching { patch: 4, merge: 2, least_pixels: 4 * 64, most_pixels: 64 * 64, shown_percent: 100 };

fn vision() -> VisionSpec {
    VisionSpec { patching: PATCHING, ..VisionSpec::default() }
}

fn visual(path: &str) -> ExampleSpec {
    ExampleSpec {
        task: ExampleKind::Visual,
        path: vec![path.into()],
        vision: Some(vision()),
        held_out: 0.0,
        vocab: 400,
        ..ExampleSpec::default()
    }
}

/// A folder with the images a.png (16 x 24, six tokens) and b.png (16 x 16, four tokens).
pub fn folder(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("a.png", &encoded_png(16, 24, 1));
    scratch.write("b.png", &encoded_png(16, 16, 2));
    scratch
}

/// The text of an example, with every image as its number of tokens in brackets.
pub fn text(sets: &ExampleSets, example: Example<'_>) -> String {
    let pad = "<|image_pad|>";
    let mut text = sets.vocabulary.spell_out(example.tokens);
    for sighting in example.images.iter().rev() {
        let tokens = sighting.tokens as usize;
        let at = text.rfind(&pad.repeat(tokens)).expect("the tokens of an image are consecutive");
        text.replace_range(at..at + pad.len() * tokens, &format!("[{tokens}]"));
    }
    text.replace("<|vision_start|>", "(").replace("<|vision_end|>", ")")
}

fn texts(sets: &ExampleSets) -> Vec<String> {
    sets.train.iter().map(|example| text(sets, example)).collect()
}

fn learned(sets: &ExampleSets, example: Example<'_>) -> String {
    let spans = spans(&sets.vocabulary, example).into_iter().filter(|span| span.is_trained);
    spans.map(|span| span.text).collect::<Vec<_>>().join("|")
}

/// Base64 as other encoders write it.
pub fn base64(bytes: &[u8]) -> String {
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    bytes
        .chunks(3)
        .flat_map(|chunk| {
            let whole =
                chunk.iter().fold(0u32, |all, byte| all << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
            (0..4).map(move |at| match at <= chunk.len() {
                true => digits[(whole >> (18 - 6 * at)) as usize & 63] as char,
                false => '=',
            })
        })
        .collect()
}

const ASKED: &str = "<|im_start|>user\n([6])What is it?<|im_end|>\n<|im_start|>assistant\nA cat<|im_end|>\n";

#[test]
fn every_form_gives_the_same_example() {
    let scratch = folder("visual-forms");
    let url = format!("data:image/png;base64,{}", base64(&encoded_png(16, 24, 1)));
    let answer = r#"{"role":"assistant","content":"A cat"}"#;
    let parts = |part: &str| {
        format!(
            r#"{{"messages":[{{"role":"user","content":[{part},{{"type":"text","text":"What is it?"}}]}},{answer}]}}"#
        )
    };
    let column = |rest: &str| parts(r#"{"type":"image"}"#).replacen('{', &format!("{{{rest},"), 1);
    let marked = |rest: &str| {
        format!(
            r#"{{"conversations":[{{"from":"human","value":"<image>What is it?"}},{{"from":"gpt","value":"A cat"}}],{rest}}}"#
        )
    };
    let rows = [
        column(r#""images":["a.png"]"#),
        column(r#""image":"a.png""#),
        column(r#""images":[{"bytes":null,"path":"a.png"}]"#),
        column(&format!(r#""images":["{url}"]"#)),
        parts(r#"{"type":"image","image":"a.png"}"#),
        parts(r#"{"type":"image","path":"a.png"}"#),
        parts(r#"{"type":"image","url":"./a.png","text":null}"#),
        parts(r#"{"type":"image_url","image_url":{"url":"a.png","detail":"high"}}"#),
        parts(&format!(r#"{{"type":"image_url","image_url":{{"url":"{url}"}}}}"#)),
        parts(&format!(r#"{{"type":"image","image":"file://{}"}}"#, scratch.at("a.png"))),
        marked(r#""image":"a.png""#),
        marked(r#""images":["a.png"],"videos":[]"#),
        marked(r#""system":null,"images":"a.png""#),
        r#"{"image":"a.png","question":"What is it?","answer":"A cat"}"#.into(),
        r#"{"image_filename":"a.png","image":null,"instruction":"What is it?","answer":"A cat"}"#.into(),
        r#"{"image_id":"a.png","instruction":"What is it?","input":"","output":"A cat"}"#.into(),
        r#"{"images":["a.png"],"prompt":"<image>What is it?","completion":"A cat"}"#.into(),
        r#"{"images":["a.png"],"texts":[{"user":"What is it?","assistant":"A cat","source":"x"}]}"#.into(),
    ];
    let mut wanted: Option<ExampleSets> = None;
    for (at, row) in rows.iter().enumerate() {
        let path = scratch.write(&format!("{at}.jsonl"), format!("{row}\n").as_bytes());
        let sets = open(&visual(&path)).unwrap_or_else(|error| panic!("{row}: {error}"));
        assert_eq!(texts(&sets), [ASKED], "{row}");
        let example = sets.train.get(0);
        assert_eq!(learned(&sets, example), "A cat<|im_end|>", "{row}");
        let [sighting] = example.images else { panic!("{row}: {:?}", example.images) };
        assert!(sets.images.count() == 1 && sighting.image == 0 && sighting.tokens == 6, "{row}");
        assert_eq!((sighting.grid.rows, sighting.grid.columns), (6, 4), "{row}");
        let token = example.tokens[sighting.start as usize];
        assert!(example.tokens[sighting.start as usize..][..6].iter().all(|other| *other == token));
        let mut out = vec![0; 24 * 4 * 4 * 3];
        sets.images.patches(0, &mut out).unwrap();
        assert!(out.iter().any(|byte| *byte != out[0]), "its pixels are read");
        match &wanted {
            None => wanted = Some(sets),
            Some(wanted) => assert_eq!((&sets.train, &sets.mark), (&wanted.train, &wanted.mark), "{row}"),
        }
    }
    let csv = scratch.write(
        "rows.csv",
        b"image,question,answer\na.png,What is it?,A cat\n\"[\"\"a.png\"\",\"\"b.png\"\"]\",Which?,Both\n,Why?,Thus\n",
    );
    let sets = open(&visual(&csv)).unwrap();
    let written = texts(&sets);
    assert_eq!(written[0], ASKED);
    assert!(written[1].contains("([6])([4])Which?") && written[2].contains("user\nWhy?"), "{written:?}");
}

/// Several turns and images, adjacent images, and a repeated image.
#[test]
fn images_are_at_their_places() {
    let scratch = folder("visual-places");
    let rows = [
        r#"{"messages":[{"role":"system","content":"Look."},{"role":"user","content":"<image>\nThis or <image>?"},{"role":"assistant","content":"The first"},{"role":"user","content":"And <image>?"},{"role":"assistant","content":"Too"}],"images":["a.png","b.png","a.png"]}"#,
        r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":[{"type":"text","text":"Ho"}]}],"images":null}"#,
        r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Ho"}]}"#,
    ];
    let path = scratch.write("a.jsonl", rows.join("\n").as_bytes());
    let sets = open(&visual(&path)).unwrap();
    let written = texts(&sets);
    assert_eq!(
        written[0],
        "<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n([6])\nThis or ([4])?<|im_end|>\n<|im_start|>assistant\n\
         The first<|im_end|>\n<|im_start|>user\nAnd ([6])?<|im_end|>\n<|im_start|>assistant\nToo<|im_end|>\n"
    );
    assert_eq!(written[1], written[2], "a text in parts is a text");
    let first = sets.train.get(0);
    assert_eq!(first.images.iter().map(|sighting| sighting.image).collect::<Vec<_>>(), [0, 1, 0]);
    assert_eq!(learned(&sets, first), "The first<|im_end|>|Too<|im_end|>");
    assert!(sets.images.count() == 2 && sets.train.get(1).images.is_empty());
    let counts = sets.description.images.as_ref().unwrap();
    assert_eq!((counts.images, counts.examples, counts.tokens, counts.broken), (2, 1, 16, 0));
    assert!(sets.description.to_string().contains("2 images in 16 tokens"), "{}", sets.description);

    // Each answer ends an example of its own, which has the images before it.
    let each = open(&ExampleSpec { train_on: TrainOn::Each, ..visual(&path) }).unwrap();
    let images: Vec<usize> = each.train.iter().map(|example| example.images.len()).collect();
    assert_eq!(images, [2, 3, 0, 0]);
    assert_eq!(learned(&each, each.train.get(1)), "Too<|im_end|>");
    let all = open(&ExampleSpec { train_on: TrainOn::All, ..visual(&path) }).unwrap();
    let example = all.train.get(0);
    let unlearned = example.weights.iter().filter(|weight| **weight == 0.0).count();
    assert_eq!(unlearned, 1 + 16, "the first token, and those of the images");
}

/// Unusable rows, each with a part of the error.
fn bad_rows() -> Vec<(String, &'static str)> {
    let asked = |content: &str, rest: &str| {
        format!(
            r#"{{"messages":[{{"role":"user","content":{content}}},{{"role":"assistant","content":"A"}}]{rest}}}"#
        )
    };
    let image = |image: &str| format!(r#"{{"image":{image},"question":"Q","answer":"A"}}"#);
    let place = r#"[{"type":"image"},{"type":"text","text":"Q"}]"#;
    let held = r#"[{"type":"image","image":"a.png"}]"#;
    vec![
        (image(r#""none.png""#), "there is no image"),
        (image(r#""folder""#), "is not an image file"),
        (image(r#""../outside.png""#), "leads out of"),
        (image(r#""/etc/passwd""#), "leads out of"),
        (image(r#""link.png""#), "leads out of"),
        (image(r#""a\u0000.png""#), "has a control character"),
        (image(r#""https://example.org/a.png""#), "images are not downloaded"),
        (image(r#""s3://bucket/a.png""#), "images are not downloaded"),
        (image(&format!(r#""{}""#, "A".repeat(5000))), "neither a path nor a data URL"),
        (image(r#""data:image/png;base64,!!!""#), "a character that base64 does not"),
        (image(r#""data:image/png;base64,""#), "the image has no bytes"),
        (image(r#""empty.png""#), "the image has no bytes"),
        (image(r#""text.png""#), "of no known kind of image"),
        (image(r#""animation.gif""#), "it is a GIF image"),
        (image(r#""half.png""#), "half.png"),
        (image(r#""narrow.png""#), "no side may be more than 200 times the other"),
        (image(r#""large.png""#), "more than data.max_pixels=10000"),
        (image("7"), "the field `image` is a number"),
        (image(r#"[7]"#), "an image is a number"),
        (image(r#"{"name":"a.png"}"#), "give it `bytes`, a `path` or a `url`"),
        (r#"{"image":"a.png","images":["b.png"],"question":"Q","answer":"A"}"#.into(), "in `images` and in `image`"),
        (asked(place, ""), "no image in `images` and 1 place for one"),
        (asked(place, r#","images":["a.png","b.png"]"#), "2 images in `images` and 1 place for one"),
        (asked(r#""<image> Q""#, ""), "no image in `images` and 1 place for one"),
        (asked(r#""Q""#, r#","image":"a.png""#), "1 image in `image` and no place for one"),
        (asked(held, r#","images":["a.png"]"#), "gives images in its parts and in `images` too"),
        (asked(r#""<|image_pad|> Q""#, ""), "the text has 1 image tokens and the row has 0 images"),
        (
            asked(r#"[{"type":"image","image":"a.png"},{"type":"text","text":"<|image_pad|>"}]"#, ""),
            "the text has 2 image tokens and the row has 1 images",
        ),
        (asked(r#"[{"type":"video","video":"a.mp4"}]"#, ""), "video is not read"),
        (asked(r#""<video> Q""#, ""), "video is not read"),
        (asked(r#""Q""#, r#","videos":["a.mp4"]"#), "videos in `videos`"),
        (asked(r#"[{"type":"audio"}]"#, ""), "the type `audio`, and only `text` and `image`"),
        (
            r#"{"messages":[{"role":"system","content":[{"type":"image","image":"a.png"}]},{"role":"user","content":"Q"},{"role":"assistant","content":"A"}]}"#.into(),
            "System messages have no images",
        ),
        (r#"{"messages":[{"role":"user","content":"Q"}]}"#.into(), "no answer of the assistant"),
        (r#"{"image":"a.png","question":"Q","answer":" "}"#.into(), "nothing to learn"),
        (r#"{"images":["a.png"],"texts":[]}"#.into(), "`texts` is empty"),
        (r#"{"images":["a.png"],"texts":["Q"]}"#.into(), "text 1 of `texts` is a string"),
        (r#"{"images":["a.png"],"texts":[{"user":"Q"}]}"#.into(), "no field `assistant`"),
        (r#"{"images":["a.png"],"texts":"Q"}"#.into(), "the field `texts` is a string"),
        (r#"{"image":"a.png","caption":"A"}"#.into(), "rows with images are read from `messages`"),
    ]
}

/// ChatML that refuses images in a system message, as published templates do.
const STRICT: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}\
    {% else %}{% for part in m.content %}{% if part.type == 'image' %}{% if m.role == 'system' %}\
    {{ raise_exception('System messages have no images.') }}{% endif %}<|vision_start|><|image_pad|><|vision_end|>\
    {% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

#[test]
fn invalid_rows_are_named_by_their_line() {
    let outside = Scratch::new("visual-outside");
    let target = outside.write("outside.png", &encoded_png(16, 16, 3));
    let scratch = folder("visual-bad");
    std::fs::create_dir(scratch.at("folder")).unwrap();
    std::os::unix::fs::symlink(target, scratch.at("link.png")).unwrap();
    scratch.write("../outside.png", &encoded_png(8, 8, 1));
    scratch.write("empty.png", b"");
    scratch.write("text.png", b"no image at all");
    scratch.write("animation.gif", b"GIF89a......");
    scratch.write("half.png", &encoded_png(16, 16, 1)[..20]);
    scratch.write("narrow.png", &encoded_png(16, 3201, 1));
    scratch.write("large.png", &encoded_png(200, 100, 1));
    let good = r#"{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"A"}]}"#;
    let mut spec = visual("");
    spec.template = Some(STRICT.into());
    spec.vision = Some(VisionSpec { max_pixels: 10_000, ..vision() });
    // narrow.png exceeds that limit.
    let wide = ExampleSpec { vision: Some(vision()), ..spec.clone() };
    let all = bad_rows();
    for (row, why) in &all {
        let path = scratch.write("bad.jsonl", format!("\n{row}\n").as_bytes());
        let spec = if row.contains("narrow") { &wide } else { &spec };
        let error = open(&ExampleSpec { path: vec![path], ..spec.clone() }).expect_err(row);
        assert!(error.is_input() && error.sentence.contains(why), "{row}: {error}");
        assert!(error.sentence.contains("bad.jsonl, line 2: "), "{row}: {error}");
        assert!(error.sentence.ends_with("with data.on_error=skip."), "{row}: {error}");
        assert!(!error.sentence.contains('\n') && error.sentence.len() < 600, "{error}");
    }
    // With skipping, all of them are skipped, and the valid rows remain.
    let chats: Vec<&str> =
        all.iter().map(|(row, _)| row.as_str()).filter(|row| row.starts_with(r#"{"messages"#)).collect();
    let rows = format!("{good}\n{}\n{good}\n", chats.join("\n"));
    spec.path = vec![scratch.write("mixed.jsonl", rows.as_bytes())];
    spec.read.on_error = OnError::Skip;
    let sets = open(&spec).unwrap();
    assert_eq!(sets.train.count(), 2);
    let left_out: u64 = sets.description.unusable.iter().map(|(_, count, _)| count).sum();
    assert_eq!(left_out, chats.len() as u64);
    let questions: Vec<&str> =
        all.iter().map(|(row, _)| row.as_str()).filter(|row| row.starts_with(r#"{"image":"#)).collect();
    let rows = format!("{}\n{}\n", r#"{"image":"a.png","question":"Q","answer":"A"}"#, questions.join("\n"));
    spec.path = vec![scratch.write("questions.jsonl", rows.as_bytes())];
    let sets = open(&spec).unwrap();
    assert_eq!(sets.train.count(), 1);
    let counts = sets.description.images.as_ref().unwrap();
    assert!(counts.images == 1 && counts.broken >= 18, "{counts:?} {:?}", sets.description.unusable);
    std::fs::remove_file(scratch.path().parent().unwrap().join("outside.png")).unwrap();
}

#[test]
fn only_what_lies_between_the_marks_is_learned() {
    let scratch = folder("visual-marks");
    let row = |answer: &str| {
        format!("{{\"image\":\"a.png\",\"question\":\"Q <ANS>x</ANS>\",\"answer\":\"{answer}\"}}\n")
    };
    let marks = Some(["<ANS>".to_string(), "</ANS>".to_string()]);
    let spec = |answer: &str| ExampleSpec {
        vision: Some(VisionSpec { answer_marks: marks.clone(), ..vision() }),
        template: Some(STRICT.into()),
        ..visual(&scratch.write("a.jsonl", (row(answer) + &row(answer)).as_bytes()))
    };
    // Every byte is a token: nothing is merged.
    let bytes = |answer: &str| open(&ExampleSpec { vocab: 264, ..spec(answer) });
    let sets = bytes("I think <ANS>four</ANS>, or <ANS>5</ANS>").unwrap();
    assert_eq!(learned(&sets, sets.train.get(0)), "four|5");
    assert!(text(&sets, sets.train.get(0)).contains("I think <ANS>four</ANS>, or <ANS>5</ANS><|im_end|>"));
    let merged = open(&spec("<ANS>four</ANS>")).unwrap();
    assert!(learned(&merged, merged.train.get(0)).contains("four"));
    for (answer, why) in [
        ("four", "nothing of the row's answers lies between `<ANS>` and `</ANS>`"),
        ("<ANS>four", "no `</ANS>` after it"),
    ] {
        let error = bytes(answer).unwrap_err();
        assert!(error.sentence.contains(why) && error.sentence.contains("line 1"), "{error}");
    }
}

#[test]
fn no_image_is_cut() {
    let scratch = folder("visual-long");
    let rows = [
        r#"{"messages":[{"role":"user","content":"<image>"},{"role":"assistant","content":"A long answer to cut"}],"image":"a.png"}"#,
        r#"{"messages":[{"role":"user","content":"<image>"},{"role":"assistant","content":"A"},{"role":"user","content":"<image>"},{"role":"assistant","content":"B"}],"images":["a.png","b.png"]}"#,
    ];
    let path = scratch.write("a.jsonl", rows.join("\n").as_bytes());
    let spec = ExampleSpec { template: Some(STRICT.into()), vocab: 264, ..visual(&path) };
    let whole = open(&spec).unwrap();
    let second = whole.train.get(1);
    let Some(last) = second.images.get(1) else { panic!("{:?}", second.images) };
    let answer = second.weights.iter().position(|weight| *weight > 0.0).unwrap();
    assert!(answer < last.start as usize, "something is learned before the second image");
    let first_len = whole.train.len_of(0);
    // Inside the second image, before it, and right after it.
    for (most, count) in [(last.start + 2, 1), (last.start - 1, 1), (last.start + 4, 2)] {
        let most = most as usize;
        let sets = open(&ExampleSpec { max_tokens: most, ..spec.clone() }).unwrap();
        assert_eq!(sets.train.count(), count, "{most}");
        let described = &sets.description;
        assert_eq!(described.too_long, 2 - count as u64);
        assert_eq!(described.cut, u64::from(first_len > most) + (count as u64 - 1));
        for example in sets.train.iter() {
            assert!(example.images.iter().all(|s| (s.start + s.tokens) as usize <= example.tokens.len()));
        }
    }
    let error = open(&ExampleSpec { max_tokens: 20, too_long: TooLong::Fail, ..spec.clone() }).unwrap_err();
    assert!(error.sentence.contains("data.max_tokens is 20"), "{error}");
    let error = open(&ExampleSpec { max_tokens: 8, ..spec }).unwrap_err();
    assert!(error.sentence.contains("(2 are longer than data.max_tokens=8)"), "{error}");
}

/// The images of a side, as numbers in the store that both sides share.
fn shown(table: &ExampleTable) -> HashSet<u32> {
    table.iter().flat_map(|example| example.images.iter().map(|sighting| sighting.image)).collect()
}

#[test]
fn rows_that_share_an_image_are_on_the_same_side() {
    let scratch = Scratch::new("visual-sides");
    let mut rows = Vec::new();
    for image in 0..60u8 {
        scratch.write(&format!("{image}.png"), &encoded_png(16, 16, image));
        // Equal bytes under another name are the same image.
        scratch.write(&format!("copy-{image}.png"), &encoded_png(16, 16, image));
        for asked in 0..3 {
            let copy = if asked == 1 { "copy-" } else { "" };
            rows.push(format!(
                r#"{{"images":["{copy}{image}.png"],"question":"Q{asked}","answer":"A{image}","group":{}}}"#,
                image % 7
            ));
        }
        // Chains of three: 0 1 2, 3 4 5, ...
        if image % 3 > 0 {
            rows.push(format!(
                r#"{{"images":["{}.png","{image}.png"],"question":"Which?","answer":"Both","group":1}}"#,
                image - 1
            ));
        }
        rows.push(format!(r#"{{"question":"Text {image}?","answer":"A{image}","group":{image}}}"#));
    }
    let held = |rows: &[String], group: Option<String>| {
        let path = scratch.write("rows.jsonl", rows.join("\n").as_bytes());
        let sets = open(&ExampleSpec { held_out: 0.3, group, ..visual(&path) }).unwrap();
        let mut held: Vec<String> = sets.held_out.iter().map(|example| text(&sets, example)).collect();
        held.sort();
        (sets, held)
    };
    let (sets, texts) = held(&rows, None);
    let (train, held_out) = (shown(&sets.train), shown(&sets.held_out));
    assert!(train.is_disjoint(&held_out), "{train:?} {held_out:?}");
    assert_eq!(train.len() + held_out.len(), 60);
    assert!(held_out.len() >= 6 && held_out.len().is_multiple_of(3), "whole chains: {held_out:?}");
    assert!(
        sets.held_out.iter().any(|example| example.images.is_empty()),
        "texts are held out by themselves"
    );
    // The split does not depend on the order of rows.
    let backwards: Vec<String> = rows.iter().rev().cloned().collect();
    assert_eq!(held(&backwards, None).1, texts);
    let grouped = held(&rows, Some("group".into())).0;
    assert!(
        !shown(&grouped.train).is_disjoint(&shown(&grouped.held_out)),
        "groups come first where they are given"
    );

    // Held-out files are used as they are, and images shown on both sides are reported.
    let path = |name: &str, rows: &[String]| scratch.write(name, rows.join("\n").as_bytes());
    let (one, other) = (path("one.jsonl", &rows[..10]), path("other.jsonl", &rows[1..3]));
    let mut said = Vec::new();
    let spec = ExampleSpec { held_out_path: vec![other], ..visual(&one) };
    open_reporting(&spec, &mut |event| match event {
        OpenEvent::Note(note) | OpenEvent::LeftOut(note) => said.push(note),
    })
    .unwrap();
    assert!(said.iter().any(|note| note.contains("2 of 2") && note.contains("show an image")), "{said:?}");
}

/// A template that omits parts that are no text.
const SILENT: &str = "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% endif %};\
    {% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

#[test]
fn the_token_of_images_must_be_a_special_one() {
    let scratch = folder("visual-token");
    let path = scratch.write("a.jsonl", br#"{"image":"a.png","question":"Q","answer":"A"}"#);
    let with =
        |image_token| ExampleSpec { vision: Some(VisionSpec { image_token, ..vision() }), ..visual(&path) };
    assert!(open(&with(Some(6))).is_ok());
    let error = open(&with(Some(300))).unwrap_err();
    assert!(error.sentence.contains("has <|image_pad|> as token 6"), "{error}");
    let tokenizer = scratch.at("tokenizer.json");
    Vocabulary::train(["plain"].into_iter(), 270).unwrap().save(tokenizer.as_ref()).unwrap();
    let given = |image_token| {
        let template = Some("chatml".to_string());
        open(&ExampleSpec { tokenizer: Some(tokenizer.clone().into()), template, ..with(image_token) })
            .unwrap_err()
    };
    assert!(given(None).sentence.contains("has no token <|image_pad|>"), "{}", given(None));
    assert!(given(Some(70)).sentence.contains("and does not treat as special"), "{}", given(Some(70)));
    assert!(
        given(Some(5000)).sentence.contains("which the tokeniser does not have"),
        "{}",
        given(Some(5000))
    );
    // A template that omits images is an error at the first row.
    let silent = ExampleSpec { template: Some(SILENT.into()), ..with(None) };
    let error = open(&silent).unwrap_err();
    assert!(error.sentence.contains("has 0 image tokens and the row has 1 images"), "{error}");
}

#[test]
fn the_drawn_set_is_read_like_any_other() {
    let spec = ExampleSpec {
        source: SourceKind::Synthetic,
        path: vec![],
        held_out: 0.2,
        rows: 400,
        seed: 3,
        ..visual("")
    };
    let sets = open(&spec).unwrap();
    assert_eq!(sets.train.count() + sets.held_out.count(), 400);
    assert!(sets.train.iter().chain(sets.held_out.iter()).all(|example| {
        matches!(example.images, [sighting] if sighting.tokens == 16) && example.is_supervised()
    }));
    assert!(shown(&sets.train).is_disjoint(&shown(&sets.held_out)));
    assert!((40..=100).contains(&sets.held_out.count()), "{}", sets.held_out.count());
    let again = open(&ExampleSpec { workers: 3, ..spec.clone() }).unwrap();
    assert_eq!((again.mark, &again.train, &again.images), (sets.mark.clone(), &sets.train, &sets.images));
    assert_ne!(open(&ExampleSpec { seed: 4, ..spec }).unwrap().mark, sets.mark);
}

fn sighted(name: &str) -> String {
    format!("{}/tests/sighted/{name}.parquet", env!("CARGO_MANIFEST_DIR"))
}

/// Parquet files that pyarrow wrote (`sighted/make.py`): in every form of images, examples are those of paths in JSONL.
#[test]
fn parquet_holds_images_in_every_form() {
    let scratch = Scratch::new("visual-parquet");
    let root = Some(format!("{}/tests/pictures", env!("CARGO_MANIFEST_DIR")).into());
    let opened = |path: &str| {
        let vision = Some(VisionSpec { root: root.clone(), ..vision() });
        open(&ExampleSpec { vision, ..visual(path) }).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let row = |image: &str, asked: &str, answer: &str| {
        format!("{{\"image\":{image},\"question\":\"{asked}\",\"answer\":\"{answer}\"}}\n")
    };
    let rows = [
        row("\"grey.jpg\"", "What is it?", "A scene"),
        row("\"grey.png\"", "And this?", "The same"),
        row("null", "Why?", "Thus"),
    ];
    let wanted = opened(&scratch.write("rows.jsonl", rows.concat().as_bytes()));
    assert!(wanted.images.count() == 2 && wanted.train.count() == 3);
    for name in ["bytes", "stored", "paths", "names", "lists", "column", "parts"] {
        let sets = opened(&sighted(name));
        assert_eq!(texts(&sets), texts(&wanted), "{name}");
        assert_eq!((&sets.train, &sets.mark), (&wanted.train, &wanted.mark), "{name}");
        let mut out = [0u8, 0].map(|_| vec![0; sets.images.get(1).grid.patches() * 4 * 4 * 3]);
        sets.images.patches(1, &mut out[0]).unwrap();
        wanted.images.patches(1, &mut out[1]).unwrap();
        assert_eq!(out[0], out[1], "{name}");
    }
    let turns = opened(&sighted("turns"));
    let written = texts(&turns);
    assert!(
        written.len() == 4 && written[0].contains(")What is it?") && written[1].contains(")Why?"),
        "{written:?}"
    );
    assert_eq!(turns.train.get(0).images[0].image, turns.train.get(1).images[0].image);
    assert_eq!(turns.description.schema, ["`images` and `texts` (user, assistant)"]);
}

#[test]
fn broken_images_in_parquet_are_named_by_their_row() {
    let error = open(&visual(&sighted("broken"))).unwrap_err();
    assert!(error.sentence.contains("broken.parquet, row 1: the image has no bytes"), "{error}");
    let mut spec = visual(&sighted("broken"));
    spec.read.on_error = OnError::Skip;
    let sets = open(&spec).unwrap();
    let unusable = &sets.description.unusable;
    assert!(sets.train.count() == 1 && unusable.len() == 1 && unusable[0].1 == 2, "{unusable:?}");
    // Other tasks do not read byte columns.
    let error = open(&ExampleSpec { task: ExampleKind::Chat, ..visual(&sighted("bytes")) }).unwrap_err();
    assert!(error.sentence.contains("row 1: a text of the row is not UTF-8"), "{error}");
}
