//! Tests of samples with frames from tar shards: every form of JSON, the order of frames, still images, invalid samples and
//! shards, mixtures of sources, the cache between runs, layouts, pixels, and the generated set.

use std::sync::Arc;

use flatout_data::examples::{
    ExampleKind, ExampleSets, ExampleSpec, FrameSpec, TooLong, TrainOn, open, open_reporting,
};
use flatout_data::formats::{OnError, ReadOptions};
use flatout_data::vision::{ImageLoader, ImageRows};
use flatout_data::{
    Example, ImageRoom, Layout, MicroBatch, MixPart, OpenEvent, Shape, UpdateOptions, Updates, once,
};

use crate::archive::{archive, member};
use crate::scratch::Scratch;
use crate::visual::encoded_png;

/// Frames of 8 x 8 pixels, so that tests decode quickly.
const SIDE: usize = 8;

/// A member that is a frame of one shade.
fn frame(name: &str, shade: u8) -> Vec<u8> {
    member(name, &encoded_png(SIDE as u32, SIDE as u32, shade))
}

fn json(key: &str, text: &str) -> Vec<u8> {
    member(&format!("{key}.json"), text.as_bytes())
}

/// A sample of some frames and a question with its answer.
fn sample(key: &str, frames: usize, answer: &str) -> Vec<u8> {
    let shades = (0..frames).map(|at| frame(&format!("{key}.{at:03}.png"), at as u8));
    let text = json(key, &format!(r#"{{"user":"what?","assistant":"{answer}","frame_count":{frames}}}"#));
    [shades.collect::<Vec<_>>().concat(), text].concat()
}

fn frames() -> FrameSpec {
    FrameSpec {
        side: SIDE,
        still_frames: 4,
        system: "You see.".into(),
        prompts: vec![("web".into(), "A caption.".into()), ("webvid".into(), "A short one.".into())],
        ..FrameSpec::default()
    }
}

fn spec(paths: &[String]) -> ExampleSpec {
    ExampleSpec {
        task: ExampleKind::Frames,
        path: paths.to_vec(),
        frames: Some(frames()),
        held_out: 0.0,
        vocab: 300,
        ..ExampleSpec::default()
    }
}

/// Opens a shard of these samples, and returns its folder.
fn opened(name: &str, parts: &[Vec<u8>]) -> (ExampleSets, Scratch) {
    let scratch = Scratch::new(name);
    scratch.write("0.tar", &archive(parts));
    (open(&spec(&[scratch.at("0.tar")])).unwrap(), scratch)
}

/// The text after the frames of an example.
fn text(sets: &ExampleSets, example: Example<'_>) -> String {
    sets.vocabulary.spell_out(&example.tokens[example.images.len()..])
}

/// The learned text.
fn learned(sets: &ExampleSets, example: Example<'_>) -> String {
    let some = example.tokens.iter().zip(example.weights).filter(|(_, weight)| **weight > 0.0);
    sets.vocabulary.spell_out(&some.map(|(token, _)| *token).collect::<Vec<_>>())
}

/// The shade of every image that an example shows.
fn shades(sets: &ExampleSets, example: Example<'_>) -> Vec<u8> {
    let shade = |image: u32| {
        let mut pixels = vec![0; SIDE * SIDE * 3];
        sets.frames.pixels(image, &mut pixels).unwrap().unwrap();
        pixels[0]
    };
    example.images.iter().map(|sighting| shade(sighting.image)).collect()
}

#[test]
fn frames_come_in_the_order_of_their_numbers() {
    // Eleven frames out of order: 10 comes after 9, not after 1.
    let order = [3, 10, 0, 7, 1, 2, 9, 4, 8, 5, 6];
    let mut parts: Vec<Vec<u8>> =
        order.iter().map(|number| frame(&format!("a/b.{number:03}.png"), 10 * number)).collect();
    parts.insert(4, json("a/b", r#"{"user":"what?","assistant":"a thing","frame_count":11}"#));
    let (sets, _folder) = opened("frames-order", &parts);
    let example = sets.train.get(0);
    assert_eq!(shades(&sets, example), (0..11).map(|number| 10 * number).collect::<Vec<u8>>());
    let wanted = "<|im_start|>system\nYou see.<|im_end|>\n<|im_start|>user\nwhat?<|im_end|>\n\
                  <|im_start|>assistant\na thing<|im_end|>\n";
    assert_eq!(text(&sets, example), wanted);
    assert_eq!(learned(&sets, example), "a thing<|im_end|>");
    // Numbers without leading zeros; only the first 64 frames are read.
    let many: Vec<Vec<u8>> =
        (0..70u8).rev().map(|number| frame(&format!("k.{number}.png"), number)).collect();
    let (sets, _folder) = opened("frames-many", &[many.concat(), json("k", r#"{"assistant":"x"}"#)]);
    assert_eq!(shades(&sets, sets.train.get(0)), (0..64).collect::<Vec<u8>>());
}

#[test]
fn a_still_image_is_several_rows_of_one_image() {
    for name in ["s.png", "s.000.png"] {
        let (sets, _folder) =
            opened("frames-still", &[frame(name, 77), json("s", r#"{"assistant":"x","frame_count":1}"#)]);
        let example = sets.train.get(0);
        assert_eq!((example.images.len(), sets.frames.count()), (4, 1));
        assert!(
            example.images.iter().enumerate().all(|(at, seen)| seen.start as usize == at && seen.image == 0)
        );
        assert_eq!(shades(&sets, example), [77; 4]);
        let extent = sets.train.extent_of(0);
        assert_eq!((extent.images, extent.patches), (1, 4), "looked into once");
    }
}

#[test]
fn every_form_of_json_is_read() {
    let caption = |key: &str, source: &str| {
        let text = format!(r#"{{"caption":"a cat","source":"{source}"}}"#);
        [frame(&format!("{key}.png"), 1), json(key, &text)].concat()
    };
    let parts = [
        sample("a", 2, "two"),
        caption("b", "webvid-10m"),
        caption("c", "WebLi"),
        caption("d", "other"),
        [frame("e.000.png", 1), frame("e.001.png", 2), member("e.txt", b"a dog\n")].concat(),
        // An empty question means the prompt of the source; a text besides the JSON is not a caption.
        [
            frame("f.png", 1),
            json("f", r#"{"user":" ","assistant":"yes","source":"web"}"#),
            member("f.txt", b"no"),
        ]
        .concat(),
        json("g", r#"{"token_ids":[5,6,7,8],"loss_mask":[1,0,1,true],"frame_count":0}"#),
        json("h", r#"{"token_ids":[5,6,7],"loss_mask":null}"#),
        sample("i", 0, "text alone"),
        json("j", r#"{"user":"no frames said","assistant":"and none there"}"#),
    ];
    let (sets, _folder) = opened("frames-forms", &parts);
    let of = |at: usize| sets.train.get(at);
    let asked = |at: usize| {
        let text = text(&sets, of(at));
        text.split("user\n").nth(1).unwrap().split("<|im_end|>").next().unwrap().to_string()
    };
    assert_eq!(sets.train.count(), 10);
    assert_eq!(
        [1, 2, 3, 4, 5].map(asked),
        ["A short one.", "A caption.", "Describe this.", "Describe this.", "A caption."]
    );
    assert_eq!(learned(&sets, of(1)), "a cat<|im_end|>");
    assert_eq!(learned(&sets, of(4)).trim_end_matches("<|im_end|>").trim(), "a dog");
    assert_eq!(learned(&sets, of(5)), "yes<|im_end|>");
    // The first token is predicted from nothing.
    assert_eq!((of(6).tokens, of(6).weights), (&[5, 6, 7, 8][..], &[0.0, 0.0, 1.0, 1.0][..]));
    assert_eq!(of(7).weights, [0.0, 1.0, 1.0]);
    for at in [8, 9] {
        assert!(of(at).images.is_empty() && of(at).is_supervised(), "text without frames is trained on");
    }
    let images = sets.description.images.as_ref().unwrap();
    assert_eq!((images.images, images.examples, images.tokens), (8, 6, 2 + 3 * 4 + 2 + 4));
}

#[test]
fn train_on_all_learns_the_whole_text() {
    let scratch = Scratch::new("frames-all");
    scratch.write(
        "0.tar",
        &archive(&[sample("a", 2, "two"), json("g", r#"{"token_ids":[5,6,7],"loss_mask":[0,0,1]}"#)]),
    );
    let sets = open(&ExampleSpec { train_on: TrainOn::All, ..spec(&[scratch.at("0.tar")]) }).unwrap();
    let example = sets.train.get(0);
    let first = example.images.len();
    assert_eq!(example.weights[..first + 1], vec![0.0; first + 1], "neither frames nor the first token");
    assert!(example.weights[first + 1..].iter().all(|weight| *weight == 1.0));
    assert_eq!(sets.train.get(1).weights, [0.0, 1.0, 1.0]);
}

#[test]
fn pairs_are_two_examples_of_the_same_frames() {
    let scratch = Scratch::new("frames-pairs");
    let pair = |key: &str| {
        let text = r#"{"user":"which?","chosen_assistant":"the good","rejected_assistant":"the bad"}"#;
        [frame(&format!("{key}.png"), 9), json(key, text)].concat()
    };
    let pairs: Vec<Vec<u8>> = (0..40).map(|at| pair(&format!("k{at}"))).collect();
    scratch.write("0.tar", &archive(&pairs));
    let spec = ExampleSpec {
        frames: Some(FrameSpec { pairs: true, ..frames() }),
        held_out: 0.3,
        ..spec(&[scratch.at("0.tar")])
    };
    let sets = open(&spec).unwrap();
    for table in [&sets.train, &sets.held_out] {
        assert!(table.count() > 4 && table.count().is_multiple_of(2), "{}", table.count());
        for at in (0..table.count()).step_by(2) {
            let (chosen, rejected) = (table.get(at), table.get(at + 1));
            assert_eq!(learned(&sets, chosen), "the good<|im_end|>");
            assert_eq!(learned(&sets, rejected), "the bad<|im_end|>");
            assert_eq!(chosen.images, rejected.images);
        }
    }
    assert_eq!((sets.train.together(), sets.description.train as usize), (2, sets.train.count() / 2));
    let spec = ExampleSpec { frames: Some(frames()), ..spec };
    assert!(open(&spec).unwrap_err().to_string().contains("is a pair of answers"));
}

/// Invalid samples in a set of pairs, each with parts of the error and of the reason under which it is counted.
#[test]
fn bad_pairs_are_named_or_left_out() {
    let scratch = Scratch::new("frames-bad-pairs");
    let pair = |key: &str, text: &str| [frame(&format!("{key}.png"), 9), json(key, text)].concat();
    let good = r#"{"user":"which?","chosen_assistant":"the good","rejected_assistant":"the bad"}"#;
    for (bad, words, reason) in [
        (
            r#"{"chosen_assistant":"a","rejected_assistant":"a"}"#,
            "both answers of the sample x are equal",
            "answers that cannot be compared",
        ),
        (
            r#"{"chosen_assistant":"a","rejected_assistant":" "}"#,
            "rejected_assistant of the sample x is empty",
            "empty",
        ),
        (
            r#"{"user":"a","chosen_assistant":"b"}"#,
            "has one answer of a pair and no `rejected_assistant`",
            "field missing",
        ),
        (r#"{"user":"a","rejected_assistant":"b"}"#, "no `chosen_assistant`", "field missing"),
        (
            r#"{"user":"a","chosen_assistant":"b","rejected_assistant":null}"#,
            "no `rejected_assistant`",
            "field missing",
        ),
        (
            r#"{"user":"a","chosen_assistant":["b"],"rejected_assistant":"c"}"#,
            "`chosen_assistant` of the sample x is a list, not a string",
            "not a string",
        ),
        (
            r#"{"user":7,"chosen_assistant":"b","rejected_assistant":"c"}"#,
            "`user` of the sample x is a number",
            "not a string",
        ),
        (r#"{"user":"a","assistant":"b"}"#, "is no pair of answers", "answers that cannot be compared"),
        (r#"{"caption":"a"}"#, "is no pair of answers", "answers that cannot be compared"),
        (r#"{"token_ids":[1,2]}"#, "is no pair of answers", "answers that cannot be compared"),
        (
            r#"{"chosen_assistant":"b","rejected_assistant":"c","frame_count":0}"#,
            "says that it has no frames and has 1",
            "images and places",
        ),
    ] {
        scratch.write("0.tar", &archive(&[pair("a", good), pair("x", bad), pair("b", good)]));
        let failing = ExampleSpec {
            frames: Some(FrameSpec { pairs: true, ..frames() }),
            ..spec(&[scratch.at("0.tar")])
        };
        let error = open(&failing).err().unwrap_or_else(|| panic!("{bad} is taken"));
        let sentence = error.to_string();
        assert!(error.is_input() && sentence.contains(words), "{bad}: {sentence}");
        assert!(
            sentence.contains("0.tar, byte ") && sentence.contains("data.on_error=skip"),
            "{bad}: {sentence}"
        );
        let read = ReadOptions { on_error: OnError::Skip, ..ReadOptions::default() };
        let sets = open(&ExampleSpec { read, ..failing }).unwrap();
        assert_eq!((sets.train.units(), sets.train.count(), sets.description.rows), (2, 4, 3), "{bad}");
        let [(counted, 1, place)] = &sets.description.unusable[..] else {
            panic!("{bad}: {:?}", sets.description.unusable)
        };
        assert!(counted.contains(reason) && place.contains("0.tar"), "{bad}: {counted} {place}");
    }
    // Answers that differ only beyond the limit on tokens are too long, not equal.
    let words: String = (0..80).map(|i| format!("{} ", i * 7919 % 1000)).collect();
    let far = |end: &str| format!("{words}{end}");
    let text = format!(r#"{{"chosen_assistant":"{}","rejected_assistant":"{}"}}"#, far("one"), far("two"));
    scratch.write("0.tar", &archive(&[pair("a", good), pair("x", &text)]));
    let cut = ExampleSpec {
        frames: Some(FrameSpec { pairs: true, ..frames() }),
        max_tokens: 60,
        ..spec(&[scratch.at("0.tar")])
    };
    let sets = open(&cut).unwrap();
    assert_eq!((sets.train.units(), sets.description.too_long), (1, 1));
}

/// Shares of a mixture are shares of pairs, and both answers of a pair follow one another.
#[test]
fn pairs_of_several_sources_are_mixed() {
    let scratch = Scratch::new("frames-mixed-pairs");
    for (name, count) in [("a.tar", 12), ("b.tar", 5)] {
        let pair = |at: usize| {
            let text = format!(
                r#"{{"user":"{name}","chosen_assistant":"yes {at}","rejected_assistant":"no {at}"}}"#
            );
            [frame(&format!("k{at}.png"), at as u8), json(&format!("k{at}"), &text)].concat()
        };
        scratch.write(name, &archive(&(0..count).map(pair).collect::<Vec<_>>()));
    }
    let part = |name: &str, weight: f64| MixPart { path: vec![scratch.at(name)], weight };
    let mix = vec![part("a.tar", 0.75), part("b.tar", 0.25)];
    let spec =
        ExampleSpec { frames: Some(FrameSpec { pairs: true, mix, ..frames() }), path: vec![], ..spec(&[]) };
    let sets = open(&spec).unwrap();
    assert_eq!((sets.train.units(), sets.train.epoch_examples()), (17, 16));
    let table = Arc::new(sets.train.clone());
    let layout = Layout::new(vec![Shape::Packed { tokens: 2048, segments: 32 }])
        .with_images(Some(vec![ImageRoom { patches: 256, images: 64, largest: 4 }]))
        .comparing(2);
    let options = UpdateOptions { seed: 3, batch: 16, layout, is_sorted: false, class_weights: vec![] };
    let start = Updates::start(&table, 3);
    let mut updates = Updates::new(table.clone(), options, start).unwrap();
    let mut of_first = 0;
    for part in (0..4).flat_map(|_| updates.next_update().parts) {
        for pair in part.numbers.chunks(2) {
            assert!(pair[0] % 2 == 0 && pair[1] == pair[0] + 1, "{pair:?}");
            of_first += usize::from(text(&sets, table.get(pair[0])).contains("a.tar"));
        }
    }
    assert!((44..=52).contains(&of_first), "{of_first} of 64 are three quarters");
}

/// Invalid samples, each with parts of the error.
fn bad_samples() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let frame = || frame("x.png", 1);
    let with = |text: &str| [frame(), json("x", text)].concat();
    vec![
        ("no JSON", frame(), "has neither x.json nor x.txt"),
        (
            "no frames",
            json("x", r#"{"assistant":"a","frame_count":3}"#),
            "says that it has 3 frames and has none",
        ),
        ("a caption of nothing", json("x", r#"{"caption":"a"}"#), "a caption and no frame"),
        (
            "frames that it denies",
            with(r#"{"assistant":"a","frame_count":0}"#),
            "says that it has no frames and has 1",
        ),
        (
            "two stills",
            [frame(), member("x.jpg", b"?"), json("x", r#"{"assistant":"a"}"#)].concat(),
            "two still images",
        ),
        (
            "a still beside frames",
            [frame(), self::frame("x.000.png", 1), json("x", r#"{"assistant":"a"}"#)].concat(),
            "a still image, x.png, beside frames",
        ),
        (
            "a frame twice",
            [self::frame("x.1.png", 1), self::frame("x.001.png", 1), json("x", r#"{"assistant":"a"}"#)]
                .concat(),
            "are the same frame",
        ),
        (
            "an image without a number",
            [self::frame("x.left.png", 1), json("x", "{}")].concat(),
            "without a number",
        ),
        (
            "another kind of image",
            [member("x.gif", b"?"), json("x", "{}")].concat(),
            "another kind than JPEG, PNG and WebP",
        ),
        ("broken JSON", with(r#"{"assistant":"#), "is not an object"),
        ("a list", with("[1]"), "is not an object"),
        ("not UTF-8", [frame(), member("x.json", b"{\"a\":\"\xff\"}")].concat(), "not UTF-8"),
        ("no known field", with(r#"{"text":"a"}"#), "has the fields `text`"),
        ("an answer that is no text", with(r#"{"assistant":5}"#), "`assistant` of the sample x is a number"),
        ("an empty answer", with(r#"{"assistant":" "}"#), "assistant of the sample x is empty"),
        ("an empty caption", with(r#"{"caption":""}"#), "its caption of the sample x is empty"),
        (
            "a count that is none",
            with(r#"{"assistant":"a","frame_count":-1}"#),
            "`frame_count` of the sample x",
        ),
        ("ids that are no tokens", with(r#"{"token_ids":[1,-2]}"#), "a value that is not a token"),
        (
            "ids of another vocabulary",
            with(r#"{"token_ids":[1,2,100000]}"#),
            "has 100000, and the vocabulary has",
        ),
        ("no ids", with(r#"{"token_ids":[]}"#), "is empty"),
        ("ids that are no list", with(r#"{"token_ids":7}"#), "not a list of numbers"),
        (
            "a mask of another length",
            with(r#"{"token_ids":[1,2],"loss_mask":[1]}"#),
            "has 1 values and `token_ids` 2",
        ),
        ("a mask of other values", with(r#"{"token_ids":[1,2],"loss_mask":[1,2]}"#), "neither 0 nor 1"),
        (
            "nothing to learn",
            with(r#"{"token_ids":[1,2],"loss_mask":[1,0]}"#),
            "no token of the sample is learned",
        ),
        ("equal answers", with(r#"{"chosen_assistant":"a","rejected_assistant":"a"}"#), "nothing to prefer"),
        ("a pair", with(r#"{"chosen_assistant":"a","rejected_assistant":"b"}"#), "is a pair of answers"),
        (
            "a video",
            [member("x.mp4", b"?"), json("x", "{}")].concat(),
            "ffmpeg -i x.mp4 -vf \"fps=1,scale=8:8:",
        ),
    ]
}

/// Invalid samples are named where that ends the run, and otherwise skipped and counted, with all others still present.
#[test]
fn bad_samples_are_named_or_left_out() {
    let scratch = Scratch::new("frames-bad");
    for (what, bad, words) in bad_samples() {
        scratch.write("0.tar", &archive(&[sample("a", 1, "one"), bad, sample("b", 2, "two")]));
        let failing = spec(&[scratch.at("0.tar")]);
        let error = open(&failing).err().unwrap_or_else(|| panic!("{what} is taken"));
        let sentence = error.to_string();
        assert!(error.is_input() && sentence.contains(words), "{what}: {sentence}");
        assert!(
            sentence.contains("0.tar, byte ") && sentence.contains("data.on_error=skip"),
            "{what}: {sentence}"
        );
        let read = ReadOptions { on_error: OnError::Skip, ..ReadOptions::default() };
        let mut said = vec![];
        let sets = open_reporting(&ExampleSpec { read, ..failing }, &mut |event| said.push(event)).unwrap();
        assert_eq!((sets.train.count(), sets.description.rows), (2, 3), "{what}");
        let [(_, 1, place)] = &sets.description.unusable[..] else {
            panic!("{what}: {:?}", sets.description.unusable)
        };
        assert!(place.contains("0.tar"), "{place}");
        assert!(
            matches!(&said[..], [OpenEvent::LeftOut(words)] if words.starts_with("1 rows left out")),
            "{said:?}"
        );
    }
}

#[test]
fn bad_shards_are_named_or_left_out() {
    let scratch = Scratch::new("frames-bad-shards");
    let [first, second] = ["a", "b"].map(|key| sample(key, 3, "one"));
    let whole = archive(&[first.clone(), second.clone(), sample("c", 3, "two")]);
    let third = first.len() + second.len();
    let read = ReadOptions { on_error: OnError::Skip, ..ReadOptions::default() };
    // A sample in which or after which the shard is truncated may have lost frames, so it is skipped with the rest.
    let cuts = [(third + 100, 1), (third + 520, 1), (third + 1024 + 10, 2), (whole.len() - 1024, 2)];
    for (cut, left) in cuts {
        scratch.write("0.tar", &whole[..cut]);
        let failing = spec(&[scratch.at("0.tar")]);
        assert!(open(&failing).unwrap_err().to_string().contains("cut short"), "cut at {cut}");
        let sets = open(&ExampleSpec { read: read.clone(), ..failing }).unwrap();
        assert_eq!(sets.train.count(), left, "cut at {cut}");
        assert_eq!(sets.description.unusable[0].0, "damaged file");
    }
    // A repeated key, and a shard without a usable sample.
    scratch
        .write("0.tar", &archive(&[sample("a", 1, "one"), sample("b", 1, "two"), sample("a", 1, "three")]));
    assert!(open(&spec(&[scratch.at("0.tar")])).unwrap_err().to_string().contains("was there before"));
    scratch.write("0.tar", &archive(&[frame("x.png", 1)]));
    let nothing = ExampleSpec { read, ..spec(&[scratch.at("0.tar")]) };
    let sentence = open(&nothing).unwrap_err().to_string();
    assert!(sentence.contains("no sample to learn from") || sentence.contains("tokeniser"), "{sentence}");
    scratch.write("plain.jsonl", b"{}");
    assert!(
        open(&spec(&[scratch.at("plain.jsonl")])).unwrap_err().to_string().contains("is not a .tar file")
    );
}

#[test]
fn long_texts_are_cut_left_out_or_refused() {
    let scratch = Scratch::new("frames-long");
    let long = "word ".repeat(300);
    scratch.write("0.tar", &archive(&[sample("a", 2, "short"), sample("b", 2, &long)]));
    let of = |too_long| open(&ExampleSpec { max_tokens: 120, too_long, ..spec(&[scratch.at("0.tar")]) });
    let cut = of(TooLong::Cut).unwrap();
    assert_eq!((cut.train.count(), cut.description.cut), (2, 1));
    assert_eq!(cut.train.len_of(1), 120 + 2, "the limit is of the text, and frames come before it");
    let left_out = of(TooLong::Skip).unwrap();
    assert_eq!((left_out.train.count(), left_out.description.too_long), (1, 1));
    assert!(of(TooLong::Fail).unwrap_err().to_string().contains("data.max_tokens is 120"));
}

/// Shards of several folders, opened by one thread and by many.
#[test]
fn threads_change_nothing_and_sides_follow_names() {
    let scratch = Scratch::new("frames-threads");
    let names: Vec<String> = (0..7).map(|shard| format!("{shard:05}.tar")).collect();
    for (shard, name) in names.iter().enumerate() {
        let parts: Vec<Vec<u8>> = (0..20)
            .map(|at| sample(&format!("k{at}"), 1 + at % 3, &format!("answer {shard} {at}")))
            .collect();
        scratch.write(name, &archive(&parts));
    }
    let of =
        |workers| ExampleSpec { workers, held_out: 0.2, ..spec(&[scratch.path().display().to_string()]) };
    let [one, many] = [1, 8].map(|workers| open(&of(workers)).unwrap());
    assert!(one.train == many.train && one.held_out == many.held_out && one.mark == many.mark);
    assert_eq!(one.train.count() + one.held_out.count(), 140);
    assert!((10..50).contains(&one.held_out.count()), "{}", one.held_out.count());
    // Held-out files replace the share.
    let apart = ExampleSpec {
        path: names[1..].iter().map(|name| scratch.at(name)).collect(),
        held_out_path: vec![scratch.at(&names[0])],
        ..of(2)
    };
    let sets = open(&apart).unwrap();
    assert_eq!((sets.train.count(), sets.held_out.count()), (120, 20));
    let answer = learned(&sets, sets.held_out.get(3));
    assert_eq!(answer, "answer 0 3<|im_end|>");
    assert_eq!(shades(&sets, sets.held_out.get(1)), [0, 1], "frames of its own shard");
}

#[test]
fn examples_are_cached_per_shard_and_tokenisation() {
    let scratch = Scratch::new("frames-kept");
    let parts: Vec<Vec<u8>> =
        (0..30).map(|at| sample(&format!("k{at}"), at % 4, &format!("answer {at}"))).collect();
    scratch.write("0.tar", &archive(&parts));
    let cache = scratch.path().join("cache");
    let cached = |system: &str| ExampleSpec {
        frames: Some(FrameSpec { cache: Some(cache.clone()), system: system.into(), ..frames() }),
        ..spec(&[scratch.at("0.tar")])
    };
    let entries = || std::fs::read_dir(cache.join("samples")).map_or(0, |entries| entries.count());
    let first = open(&cached("You see.")).unwrap();
    assert_eq!(entries(), 1);
    let again = open(&cached("You see.")).unwrap();
    assert!(first.train == again.train && first.mark == again.mark && entries() == 1);
    let other = open(&cached("Otherwise.")).unwrap();
    assert!(other.train != first.train && entries() == 2, "another message is another writing");
    // A damaged entry is replaced, and nothing is read from it.
    for entry in std::fs::read_dir(cache.join("samples")).unwrap() {
        std::fs::write(entry.unwrap().path(), b"flatout samples 1\n").unwrap();
    }
    assert!(open(&cached("You see.")).unwrap().train == first.train);
    // An entry of a changed shard is replaced, too.
    scratch.write("0.tar", &archive(&parts[..20]));
    assert_eq!(open(&cached("You see.")).unwrap().train.count(), 20);
}

/// Two sources at three to one, by samples; the source follows from the position in the series.
#[test]
fn sources_are_mixed_by_shares_of_samples() {
    let scratch = Scratch::new("frames-mix");
    let long = "many words ".repeat(12);
    let videos: Vec<Vec<u8>> =
        (0..60).map(|at| sample(&format!("v{at}"), 2, &format!("{long}{at}"))).collect();
    let texts: Vec<Vec<u8>> = (0..10).map(|at| sample(&format!("t{at}"), 0, &format!("text {at}"))).collect();
    scratch.write("v.tar", &archive(&videos));
    scratch.write("t.tar", &archive(&texts));
    let part = |name: &str, weight| MixPart { path: vec![scratch.at(name)], weight };
    let mixed = ExampleSpec {
        frames: Some(FrameSpec { mix: vec![part("v.tar", 0.75), part("t.tar", 0.25)], ..frames() }),
        ..spec(&[])
    };
    let sets = open(&mixed).unwrap();
    assert_eq!(
        (sets.train.count(), sets.train.epoch_examples()),
        (70, 80),
        "an epoch is one of the first source"
    );
    let table = Arc::new(sets.train.clone());
    let layout = Layout::new(vec![Shape::Packed { tokens: 8192, segments: 16 }])
        .with_images(Some(vec![ImageRoom { patches: 64, images: 64, largest: 8 }]));
    let options = UpdateOptions { seed: 5, batch: 16, layout, is_sorted: false, class_weights: vec![] };
    let series = |from: u64, updates: usize| -> Vec<(u64, Vec<i32>)> {
        let mut cursor = Updates::start(&table, 5);
        cursor.sample = from;
        let mut source = Updates::new(table.clone(), options.clone(), cursor).unwrap();
        (0..updates)
            .flat_map(|_| source.next_update().parts)
            .flat_map(|part| {
                let rows = |at: usize| {
                    let segment = part.segments[at];
                    part.tokens[segment.start as usize..(segment.start + segment.len) as usize].to_vec()
                };
                let mut all: Vec<_> = part.samples.iter().enumerate().map(|(at, s)| (*s, rows(at))).collect();
                all.sort();
                all
            })
            .collect()
    };
    let whole = series(0, 60);
    let texts = whole.iter().filter(|(_, tokens)| tokens[0] >= 0).count();
    assert!((texts as f64 / whole.len() as f64 - 0.25).abs() < 0.04, "{texts} of {}", whole.len());
    assert_eq!(series(320, 40), whole[320..], "a resumed run draws the same");
    // An epoch contains every sample of the first source once.
    let mut first: Vec<&Vec<i32>> =
        whole.iter().map(|(_, t)| t).filter(|tokens| tokens[0] < 0).take(60).collect();
    first.sort();
    first.dedup();
    assert_eq!(first.len(), 60);
    // Other shares give another series, and refuse the cursor.
    let other = ExampleSpec {
        frames: Some(FrameSpec { mix: vec![part("v.tar", 0.5), part("t.tar", 0.5)], ..frames() }),
        ..spec(&[])
    };
    let other = Arc::new(open(&other).unwrap().train);
    assert!(Updates::new(other, options, Updates::start(&table, 5)).is_err());
}

/// The micro-batches of a set, with room for everything.
fn laid_out(sets: &ExampleSets) -> Vec<MicroBatch> {
    let layout = Layout::new(vec![Shape::Packed { tokens: 4096, segments: 16 }])
        .with_images(Some(vec![ImageRoom { patches: 40, images: 20, largest: 8 }]));
    once(&sets.train, 100, &layout, &[])
}

#[test]
fn layouts_have_frames_as_rows_and_each_image_once() {
    let still = [frame("s.png", 200), json("s", r#"{"assistant":"still"}"#)].concat();
    let (sets, _folder) = opened(
        "frames-layout",
        &[sample("a", 3, "one"), sample("t", 0, "text"), still, sample("b", 2, "two")],
    );
    let [batch] = &laid_out(&sets)[..] else { panic!("one micro-batch") };
    let (videos, shown) = batch.videos();
    assert_eq!(shown.len(), 3 + 1 + 2);
    let images: Vec<Vec<u32>> = videos.iter().map(|video| video.images.clone()).collect();
    assert_eq!(images, [vec![0, 1, 2], vec![3; 4], vec![4, 5]]);
    for video in &videos {
        let rows = video.row..video.row + video.images.len();
        assert!(batch.segments.iter().any(|segment| segment.start as usize == video.row));
        assert!(rows.clone().all(|row| batch.tokens[row] == -1 && batch.targets[row] == -1));
        // Positions are consecutive across frames and text.
        assert!(rows.clone().zip(0..).all(|(row, at)| batch.positions[row] == [at; 3]));
        assert_eq!(batch.positions[rows.end], [video.images.len() as i32; 3]);
    }
    let real: usize = (0..4).map(|at| sets.train.len_of(at)).sum();
    assert_eq!(batch.real_tokens(), real);
    // Decoded by threads, each image once, without padding.
    let rows = ImageRows::Frames(sets.frames.clone()).of(&mut batch.clone()).unwrap();
    assert_eq!(rows.len(), 20 * SIDE * SIDE * 3);
    let first: Vec<u8> = rows.chunks(SIDE * SIDE * 3).map(|pixels| pixels[0]).collect();
    assert_eq!(first[..6], [0, 1, 2, 200, 0, 1]);
    assert!(first[6..].iter().all(|pixel| *pixel == 0));
}

#[test]
fn frames_of_another_size_are_scaled_and_their_middle_cut_out() {
    let wide = member("w.png", &encoded_png(40, 20, 3));
    let (sets, _folder) = opened("frames-wide", &[wide, json("w", r#"{"assistant":"wide"}"#)]);
    let mut pixels = vec![0; SIDE * SIDE * 3];
    sets.frames.pixels(0, &mut pixels).unwrap().unwrap();
    // Grey stays grey, and the crop has the middle half of the columns.
    assert!(pixels.chunks(3).all(|rgb| rgb[0] == rgb[1] && rgb[1] == rgb[2]));
    let jpeg = include_bytes!("pictures/420.jpg");
    let (sets, _folder) =
        opened("frames-jpeg", &[member("j.jpg", jpeg), json("j", r#"{"assistant":"photo"}"#)]);
    sets.frames.pixels(0, &mut pixels).unwrap().unwrap();
    assert!(pixels.iter().any(|byte| *byte != pixels[0]));
}

/// An undecodable frame is found during decoding: it ends the run, or nothing is learned from its sample.
#[test]
fn a_broken_frame_ends_the_run_or_leaves_its_sample_out() {
    let scratch = Scratch::new("frames-broken");
    let broken = [
        frame("x.000.png", 1),
        member("x.001.png", b"no image"),
        json("x", r#"{"user":"q","assistant":"a"}"#),
    ];
    scratch.write("0.tar", &archive(&[sample("a", 2, "one"), broken.concat(), sample("b", 1, "two")]));
    let failing = spec(&[scratch.at("0.tar")]);
    let sets = open(&failing).unwrap();
    let [batch] = &laid_out(&sets)[..] else { panic!("one micro-batch") };
    let error = ImageRows::Frames(sets.frames.clone()).of(&mut batch.clone()).unwrap_err().to_string();
    assert!(error.contains("0.tar, byte ") && error.contains("data.on_error=skip"), "{error}");
    let read = ReadOptions { on_error: OnError::Skip, ..ReadOptions::default() };
    let sets = open(&ExampleSpec { read, ..failing }).unwrap();
    let mut left = batch.clone();
    ImageRows::Frames(sets.frames.clone()).of(&mut left).unwrap();
    assert_eq!(left.left_out.len(), 1);
    assert!(left.left_out[0].contains("0.tar, byte "), "{:?}", left.left_out);
    for (at, segment) in batch.segments.iter().enumerate() {
        let rows = segment.start as usize..(segment.start + segment.len) as usize;
        let weight = |batch: &MicroBatch| batch.weights[rows.clone()].iter().sum::<f32>();
        match batch.samples[at] {
            1 => {
                assert!(weight(&left) == 0.0 && left.targets[rows.clone()].iter().all(|target| *target == -1))
            }
            _ => assert_eq!(weight(&left), weight(batch)),
        }
    }
}

#[test]
fn threads_decode_the_same_updates() {
    let made = ExampleSpec { rows: 40, seed: 3, ..spec(&[]) };
    let sets = open(&made).unwrap();
    let table = Arc::new(sets.train.clone());
    let layout = Layout::new(vec![Shape::Packed { tokens: 1024, segments: 8 }])
        .with_images(Some(vec![ImageRoom { patches: 64, images: 64, largest: 8 }]));
    let updates = |from: u64| {
        let options = UpdateOptions {
            seed: 1,
            batch: 6,
            layout: layout.clone(),
            is_sorted: false,
            class_weights: vec![],
        };
        let mut cursor = Updates::start(&table, 1);
        cursor.sample = from;
        Updates::new(table.clone(), options, cursor).unwrap()
    };
    let read = |from: u64, threads: usize, count: usize| -> Vec<(Vec<MicroBatch>, Vec<Vec<u8>>)> {
        let rows = ImageRows::Frames(sets.frames.clone());
        let mut loader = ImageLoader::new(updates(from), rows, threads).unwrap();
        (0..count).map(|_| loader.next_update().unwrap()).map(|seen| (seen.update.parts, seen.rows)).collect()
    };
    let one = read(0, 1, 6);
    assert!(one == read(0, 4, 6));
    assert!(one[3..] == read(18, 2, 3));
}

#[test]
fn the_drawn_set_needs_no_files() {
    let made = ExampleSpec { rows: 400, seed: 7, held_out: 0.1, ..spec(&[]) };
    let sets = open(&made).unwrap();
    assert!(
        sets.train == open(&made).unwrap().train
            && sets.train != open(&ExampleSpec { seed: 8, ..made }).unwrap().train
    );
    assert_eq!(sets.description.rows, 400);
    let all = || sets.train.iter().chain(sets.held_out.iter());
    let of = |wanted: &dyn Fn(&Example<'_>) -> bool| all().filter(|example| wanted(example)).count();
    assert_eq!(of(&|example| example.images.is_empty()), 50, "texts without frames");
    assert_eq!(
        of(&|example| example.images.len() > 1 && example.images[0].image == example.images[1].image),
        50
    );
    assert!(all().all(|example| example.images.len() <= 8 && example.is_supervised()));
    let first = sets.train.get(0);
    assert!(text(&sets, first).contains("What moved?"), "{}", text(&sets, first));
    assert!(learned(&sets, first).starts_with("The "), "{}", learned(&sets, first));
}
