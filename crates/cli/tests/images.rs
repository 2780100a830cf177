//! `data inspect` of images: with the real program.

mod program;

use std::fs;
use std::path::Path;

use program::say;
use serde_json::Value;

fn pictures() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/pictures")
}

#[test]
fn the_drawn_set_is_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = say(folder.path(), &["data", "inspect", "--task", "images", "--samples", "2"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    for part in [
        "20000 images of 10 classes to train on, 2000 held out (synthetic)",
        "looked at 1,000: 1,000 pixels",
        "32 to 32 pixels wide",
        "triangle",
        "2,000 to train on, 200 held out",
    ] {
        assert!(said.out.contains(part), "{part:?} is not in {}", said.out);
    }
}

#[test]
fn the_images_of_a_recipe_are_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let said =
        say(folder.path(), &["data", "inspect", "vision-tiny", "data.synthetic_rows=100", "--samples", "1"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.out.starts_with("100 images of 10 classes to train on"), "{}", said.out);
}

#[test]
fn folders_are_shown_with_what_is_broken() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, picture) in [("a/1.jpg", "420.jpg"), ("a/2.png", "rgb16.png"), ("b/3.jpg", "cmyk.jpg")] {
        let path = folder.path().join("set").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(pictures().join(picture), path).unwrap();
    }
    fs::write(folder.path().join("set/b/4.jpg"), b"GIF89a").unwrap();
    let words = ["data", "inspect", "--task", "images", "set", "--time", "0.02", "--json"];
    let said = say(folder.path(), &words);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let object: Value = serde_json::from_str(&said.out).expect("one object");
    assert_eq!(object["images"]["sets"]["kind"], "folder");
    assert_eq!(object["images"]["kinds"], serde_json::json!([["JPEG", 2], ["PNG", 1]]));
    assert_eq!(object["images"]["unusable"][0][0], "neither JPEG nor PNG");
    assert!(object["speed"]["fed"].as_f64().unwrap() > 0.0);
}

#[test]
fn what_is_no_set_of_images_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("notes.txt"), "text").unwrap();
    for (words, part) in [
        (&["data", "inspect", "--task", "images", "notes.txt"][..], "no known source of images"),
        (&["data", "inspect", "--task", "images", "nowhere.tar"], "There is no file or folder nowhere.tar"),
        (&["data", "inspect", "--task", "images", "."], "has no folders"),
    ] {
        let said = say(folder.path(), words);
        assert_eq!(said.code, Some(2), "{words:?}: {}", said.err);
        assert!(said.err.contains(part) && said.err.lines().count() == 1, "{words:?}: {}", said.err);
    }
}
