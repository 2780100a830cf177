//! `generate --image` and `--frames` through the program: answers, and errors about images before any work.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::fovea_folder;
use crate::program::{CommandOutput, execute};
use crate::vl_folder::{expected, picture, write};

const PLAIN: [&str; 5] = ["--temperature", "0", "--max-tokens", "14", "--json"];

fn refused(result: &CommandOutput, words: &str) {
    result.assert_refused(&[words]);
}

/// Questions about the same images are answered in one batch, each as transformers answers it alone.
#[test]
fn questions_about_images_are_answered() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    write(&dir.join("model"));
    let cases = expected();
    let (case, mut words) = (&cases[0], vec!["generate", "model"]);
    let text = |at: &Value| at.as_str().expect("a text").to_string();
    let images: Vec<String> = case["pictures"]
        .as_array()
        .expect("a list")
        .iter()
        .flat_map(|name| ["--image".into(), picture(name.as_str().expect("a name")).display().to_string()])
        .collect();
    let question = text(&case["question"]);
    let placed = format!("<image><image>{question}");
    words.extend(images.iter().map(String::as_str));
    words.extend(["--prompt", &question, "--prompt", &placed, "--prompt", &question]);
    words.extend(PLAIN);
    let result = execute(dir, &words);
    assert_eq!(result.code, Some(0), "{result:?}");
    let found: Value = serde_json::from_str(&result.out).expect("JSON");
    let names: Value =
        serde_json::from_slice(&fs::read(dir.join("model/tokenizer.json")).expect("a file")).expect("JSON");
    let spelled = |token: &Value| {
        let vocab = names["model"]["vocab"].as_object().expect("words");
        vocab.iter().find(|(_, id)| *id == token).expect("a word").0.clone()
    };
    let wanted: Vec<String> = case["new"].as_array().expect("a list").iter().map(spelled).collect();
    for text in found["texts"].as_array().expect("texts") {
        assert_eq!(text.as_str(), Some(wanted.join(" ").as_str()), "{found}");
    }
    let read = 3 * case["prompt"].as_array().expect("a list").len();
    assert_eq!(found["prompt_tokens"].as_u64(), Some(read as u64));
    assert_eq!(found["images"].as_array().map(Vec::len), Some(2), "{found}");
}

/// The same pixels in another format are the same image: `lossless.webp` and `rgb.png` have equal pixels.
#[test]
fn webp_is_answered_about_as_png_is() {
    let scratch = tempfile::tempdir().expect("a folder");
    write(&scratch.path().join("model"));
    let ask = |name: &str| {
        let image = picture(name).display().to_string();
        let words = [&["generate", "model", "--image", &image, "--prompt", "what"][..], &PLAIN].concat();
        let result = execute(scratch.path(), &words);
        assert_eq!(result.code, Some(0), "{result:?}");
        serde_json::from_str::<Value>(&result.out).expect("JSON")["texts"].clone()
    };
    assert_eq!(ask("lossless.webp"), ask("rgb.png"));
}

#[test]
fn wrong_images_are_refused_in_a_sentence() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    write(&dir.join("model"));
    fs::copy(picture("rgb.png"), dir.join("photo.png")).expect("a copy");
    let whole = fs::read(dir.join("photo.png")).expect("a file");
    fs::write(dir.join("cut.png"), &whole[..whole.len() / 2]).expect("a file");
    fs::write(dir.join("empty.png"), "").expect("a file");
    fs::write(dir.join("note.txt"), "no image").expect("a file");
    let ask = |images: &[&str], prompt: &str| {
        let mut words = vec!["generate", "model", "--chat", "--prompt", prompt];
        words.extend(images.iter().flat_map(|image| ["--image", image]));
        words.extend(PLAIN);
        execute(dir, &words)
    };
    refused(&ask(&["gone.png"], "what"), "there is no image gone.png");
    refused(&ask(&["model"], "what"), "model is not an image file");
    refused(&ask(&["photo.png", "cut.png"], "what"), "cut.png");
    refused(&ask(&["empty.png"], "what"), "empty.png: the image has no bytes");
    refused(&ask(&["note.txt"], "what"), "note.txt: its bytes are of no known kind of image");
    refused(
        &ask(&["photo.png"], "<image> and <image>"),
        "has 2 times <image>, and the number of images is 1",
    );
    refused(&ask(&[], "what is <image>"), "has 1 times <image>, and the number of images is 0");
    refused(&ask(&["photo.png"], "what <|image_pad|> is"), "has 2 places for images");
    let many = ["photo.png"; 12];
    refused(
        &ask(&many, "what"),
        "the model's context has 128: give a shorter one, or fewer or smaller images",
    );
    fs::write(dir.join("model/preprocessor_config.json"), r#"{"size": {"shortest_edge": 9}}"#)
        .expect("a file");
    refused(&ask(&["photo.png"], "what"), "it says one limit of an image's area, and wants both");
    fs::remove_file(dir.join("model/chat_template.jinja")).expect("a file");
    fs::remove_file(dir.join("model/preprocessor_config.json")).expect("a file");
    refused(&ask(&["photo.png"], "what"), "no chat template");
}

#[test]
fn a_model_without_a_tower_sees_no_images() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/checkpoints/qwen3");
    let (image, model) = (picture("rgb.png").display().to_string(), golden.display().to_string());
    let result = execute(&golden, &["generate", &model, "--image", &image, "--prompt", "what"]);
    refused(&result, "has no tower and sees no images");
}

/// Frames of any size in the order of their names, before the question; several questions at once.
#[test]
fn questions_about_frames_are_answered() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    fovea_folder::write(&dir.join("model"));
    fs::create_dir(dir.join("clip")).expect("a folder");
    for (at, name) in ["rgb.png", "420.jpg", "lossy.webp", "grey.png"].into_iter().enumerate() {
        let ending = name.rsplit('.').next().expect("an ending");
        fs::copy(picture(name), dir.join(format!("clip/{at:03}.{ending}"))).expect("a copy");
    }
    let ask = |words: &[&str]| {
        let plain = if words.contains(&"--temperature") { &PLAIN[2..] } else { &PLAIN[..] };
        let result = execute(dir, &[&["generate", "model"], words, plain].concat());
        assert_eq!(result.code, Some(0), "{result:?}");
        serde_json::from_str::<Value>(&result.out).expect("JSON")
    };
    let alone = ask(&["--chat", "--prompt", "what"]);
    let about = ask(&["--frames", "clip", "--prompt", "what", "--prompt", "who is it"]);
    assert_eq!((about["frames"].as_u64(), alone["frames"].as_u64()), (Some(4), None), "{about}");
    let texts = about["texts"].as_array().expect("texts");
    assert_eq!(texts.len(), 2, "{about}");
    // The likeliest tokens of a model this small are the same with frames and without; sampled tokens are not.
    let drawn = |words: &[&str]| {
        ask(&[words, &["--prompt", "what", "--temperature", "2"]].concat())["texts"][0].clone()
    };
    assert_ne!(drawn(&["--frames", "clip"]), drawn(&["--chat"]));
    let once = ask(&["--frames", "clip", "--prompt", "what"]);
    assert_eq!(once["texts"][0], texts[0], "a question by itself");
    let read = |result: &Value| result["prompt_tokens"].as_u64().expect("a count");
    assert_eq!(read(&once), read(&alone) + 4, "a frame is a token");
    let still = ask(&["--frames", "clip/000.png", "--prompt", "what"]);
    assert_eq!(still["frames"].as_u64(), Some(1));
    ask(&["--frames", "clip", "--prompt", "what", "model.vision.mode=coarse"]);
}

#[test]
fn wrong_frames_are_refused_in_a_sentence() {
    let scratch = tempfile::tempdir().expect("a folder");
    let dir = scratch.path();
    fovea_folder::write(&dir.join("model"));
    write(&dir.join("other"));
    fs::create_dir(dir.join("clip")).expect("a folder");
    fs::create_dir(dir.join("none")).expect("a folder");
    fs::copy(picture("rgb.png"), dir.join("clip/000.png")).expect("a copy");
    let ask = |model: &str, words: &[&str]| {
        execute(dir, &[&["generate", model, "--prompt", "what"], words, &PLAIN[..]].concat())
    };
    refused(&ask("model", &["--frames", "gone"]), "gone");
    refused(&ask("model", &["--frames", "none"]), "none");
    refused(
        &ask("model", &["--image", "clip/000.png"]),
        "looks at frames, one token each: give them with --frames",
    );
    refused(
        &ask("other", &["--frames", "clip"]),
        "sees images of any size and no frames: give them with --image",
    );
    refused(
        &ask("model", &["--frames", "clip", "model.vision.width=3"]),
        "cannot change when a model is used",
    );
    let whole = fs::read(dir.join("clip/000.png")).expect("a file");
    fs::write(dir.join("clip/001.png"), &whole[..whole.len() / 2]).expect("a file");
    refused(&ask("model", &["--frames", "clip"]), "001.png");
    fs::remove_file(dir.join("clip/001.png")).expect("a file");
    for at in 1..70 {
        fs::write(dir.join(format!("clip/{at:03}.png")), &whole).expect("a file");
    }
    refused(
        &ask("model", &["--frames", "clip"]),
        "the model's context has 64: give a shorter one, or fewer frames",
    );
}
