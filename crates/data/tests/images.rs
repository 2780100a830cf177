//! Tests of images from files to pixels: the decoded values of every format, and the handling of every flaw.

use std::path::{Path, PathBuf};

use crate::archive::{archive, extra, header, member, padded, record};
use crate::scratch::Scratch;
use flatout_data::formats::{OnError, Reason};
use flatout_data::images::{
    Augment, Filter, ImageBatch, ImageLoader, ImageSet, ImageSets, ImageSource, ImageSpec, Scaled, View,
    inspect, open, ordered,
};
use flatout_data::{DataError, LoaderOptions, OpenEvent};

fn pictures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pictures")
}

fn picture(name: &str) -> Vec<u8> {
    std::fs::read(pictures().join(name)).unwrap()
}

fn spec(path: &str) -> ImageSpec {
    ImageSpec { path: vec![path.into()], held_out: 0.0, ..ImageSpec::default() }
}

fn opened(spec: &ImageSpec) -> ImageSets {
    open(spec, &mut |_| {}).unwrap()
}

fn refused(spec: &ImageSpec) -> String {
    let error = open(spec, &mut |_| {}).unwrap_err();
    assert!(error.is_input(), "{error}");
    error.sentence
}

/// All images at full size, where all have the same size.
fn seen(set: &ImageSet, width: usize, height: usize) -> Result<ImageBatch, DataError> {
    ordered(
        set,
        &View { width, height, augment: Augment::Centre { share: 1.0 }, filter: Filter::Bilinear },
        0..set.count(),
    )
}

#[test]
fn every_form_decodes_to_what_pillow_decodes() {
    let mut names: Vec<String> = std::fs::read_dir(pictures())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| [".jpg", ".png", ".webp"].iter().any(|ending| name.ends_with(ending)))
        .collect();
    names.sort();
    assert_eq!(names.len(), 29);
    let expected = picture("expected.bin");
    let mut rest = &expected[..];
    let mut wrong = Vec::new();
    for name in names {
        let size = |at: usize| usize::from(u16::from_le_bytes([rest[at], rest[at + 1]]));
        let (width, height) = (size(0), size(2));
        let (pixels, after) = rest[4..].split_at(width * height * 3);
        rest = after;
        let scratch = Scratch::new(&format!("form-{name}"));
        scratch.write(&format!("a/{name}"), &picture(&name));
        scratch.write("b/other.png", &picture("rgb.png"));
        let sets = opened(&spec(&scratch.at("")));
        let batch = seen(&sets.train, width, height).unwrap();
        let differences: Vec<u8> = batch.pixels.iter().zip(pixels).map(|(a, b)| a.abs_diff(*b)).collect();
        let most = differences.iter().max().unwrap();
        let mean = differences.iter().map(|one| f64::from(*one)).sum::<f64>() / differences.len() as f64;
        // JPEG decoders may differ in rounding coefficients and interpolating chroma; PNG and WebP are exact.
        let bound = if name.ends_with(".jpg") { (8, 0.5) } else { (0, 0.0) };
        if *most > bound.0 || mean > bound.1 {
            wrong.push(format!("{name}: a byte differs by {most}, the mean by {mean:.3}"));
        }
    }
    assert!(rest.is_empty() && wrong.is_empty(), "{wrong:#?}");
}

/// A folder with a good image of class `a` and invalid bytes of class `b`.
fn broken(scratch: &Scratch, bytes: &[u8]) -> ImageSpec {
    scratch.write("a/good.png", &picture("rgb.png"));
    scratch.write("b/broken.jpg", bytes);
    spec(&scratch.at(""))
}

fn huge_png() -> Vec<u8> {
    let mut bytes = picture("rgb.png");
    bytes[16..20].copy_from_slice(&100_000u32.to_be_bytes());
    bytes[20..24].copy_from_slice(&100_000u32.to_be_bytes());
    bytes
}

fn huge_jpeg() -> Vec<u8> {
    let mut bytes = picture("420.jpg");
    let frame = bytes.windows(2).position(|two| two == [0xff, 0xc0]).unwrap();
    bytes[frame + 5..frame + 9].fill(0xff);
    bytes
}

/// An image with some of its bytes set to 0xff.
fn with_bytes(name: &str, at: usize, count: usize) -> Vec<u8> {
    let mut bytes = picture(name);
    bytes[at..at + count].fill(0xff);
    bytes
}

/// A WebP whose header states 45 x 30 pixels, and whose bitstream states 16383 x 16383.
fn inner_webp() -> Vec<u8> {
    let bytes = picture("turned.webp");
    let coded = bytes.windows(3).position(|three| three == [0x9d, 0x01, 0x2a]).unwrap();
    with_bytes("turned.webp", coded + 3, 4)
}

fn cut(name: &str, share: f64) -> Vec<u8> {
    let bytes = picture(name);
    bytes[..(bytes.len() as f64 * share) as usize].to_vec()
}

#[test]
fn broken_images_are_named_and_fatal_or_left_out() {
    let without_end = |name: &str, bytes: usize| picture(name)[..picture(name).len() - bytes].to_vec();
    for (at, (bytes, words, reason)) in [
        (vec![], "no bytes", Reason::BrokenImage),
        (vec![0; 5000], "nothing but zeros", Reason::BrokenImage),
        (b"GIF89a-and-more".to_vec(), "a GIF image", Reason::NotAnImage),
        (b"RIFF\0\0\0\0WEBPVP8 ".to_vec(), "cut short", Reason::BrokenImage),
        (cut("lossy.webp", 0.7), "cut short", Reason::BrokenImage),
        (cut("lossless.webp", 0.05), "cut short", Reason::BrokenImage),
        (cut("moving.webp", 0.5), "cut short", Reason::BrokenImage),
        (with_bytes("lossless.webp", 40, 40), "damaged", Reason::BrokenImage),
        (with_bytes("moving.webp", 24, 6), "16777216 x 16777216 pixels", Reason::TooManyPixels),
        (with_bytes("lossless.webp", 21, 4), "16384 x 16384 pixels", Reason::TooManyPixels),
        (with_bytes("lossy_alpha.webp", 24, 1), "states two sizes", Reason::BrokenImage),
        (inner_webp(), "states two sizes", Reason::BrokenImage),
        (b"<html>not found</html>".to_vec(), "no known kind", Reason::NotAnImage),
        (cut("420.jpg", 0.3), "cut short", Reason::BrokenImage),
        (cut("420.jpg", 0.8), "cut short", Reason::BrokenImage),
        (without_end("420.jpg", 2), "cut short", Reason::BrokenImage),
        (cut("progressive.jpg", 0.7), "cut short", Reason::BrokenImage),
        (cut("rgb.png", 0.5), "damaged", Reason::BrokenImage),
        (cut("rgb.png", 0.02), "damaged", Reason::BrokenImage),
        (huge_png(), "100000 x 100000 pixels", Reason::TooManyPixels),
        (huge_jpeg(), "65535 x 65535 pixels", Reason::TooManyPixels),
        (b"\xff\xd8\xff\xd9".to_vec(), "ends before its pixels", Reason::BrokenImage),
        (b"\xff\xd8\xff\xc3\x00\x0b\x08".repeat(4), "lossless", Reason::Unsupported),
    ]
    .into_iter()
    .enumerate()
    {
        let scratch = Scratch::new(&format!("broken-{at}"));
        let failing = broken(&scratch, &bytes);
        let error = seen(&opened(&failing).train, 45, 30).unwrap_err();
        assert!(error.is_input() && error.sentence.contains("broken.jpg"), "{error}");
        assert!(error.sentence.contains(words), "{words}: {error}");
        assert!(error.sentence.contains("data.on_error=skip"), "{error}");

        let skipping = ImageSpec { on_error: OnError::Skip, ..failing };
        let sets = opened(&skipping);
        let batch = seen(&sets.train, 45, 30).unwrap();
        assert_eq!(batch.labels, [0, -1]);
        assert!(batch.pixels[45 * 30 * 3..].iter().all(|byte| *byte == 128));
        assert!(
            batch.left_out.len() == 1 && batch.left_out[0].contains("broken.jpg"),
            "{:?}",
            batch.left_out
        );

        let view =
            View { width: 8, height: 8, augment: Augment::Centre { share: 1.0 }, filter: Filter::Bilinear };
        let cursor = ImageLoader::start(&sets.train, 1);
        let mut loader =
            ImageLoader::new(sets.train.clone(), view, 1, cursor, LoaderOptions::default()).unwrap();
        let batch = loader.next_images(6).unwrap();
        assert_eq!(batch.labels.iter().filter(|label| **label == -1).count(), 3);
        let counted: Vec<_> = loader.left_out().reasons().map(|(reason, count, _)| (reason, count)).collect();
        assert_eq!(counted, [(reason, 3)]);
        assert!(inspect(&sets, 3).unwrap().looked_at == 2);
    }
}

#[test]
fn a_set_of_broken_images_alone_is_an_error_even_where_they_are_left_out() {
    let scratch = Scratch::new("all-broken");
    for class in ["a", "b"] {
        (0..5).for_each(|at| drop(scratch.write(&format!("{class}/{at}.jpg"), b"nothing")));
    }
    let sets = opened(&ImageSpec { on_error: OnError::Skip, ..spec(&scratch.at("")) });
    let view =
        View { width: 8, height: 8, augment: Augment::Centre { share: 1.0 }, filter: Filter::Bilinear };
    let cursor = ImageLoader::start(&sets.train, 1);
    let mut loader = ImageLoader::new(sets.train.clone(), view, 1, cursor, LoaderOptions::default()).unwrap();
    let error = loader.next_images(20).unwrap_err();
    assert!(error.sentence.contains("last 10 images could not be decoded"), "{error}");
}

#[test]
fn pixels_are_limited_as_configured() {
    let scratch = Scratch::new("limit");
    let few = ImageSpec { max_pixels: 45 * 30 - 1, ..broken(&scratch, &picture("420.jpg")) };
    let error = seen(&opened(&few).train, 45, 30).unwrap_err();
    assert!(error.sentence.contains("more than data.max_pixels=1349"), "{error}");
    let enough = ImageSpec { max_pixels: 45 * 30, ..few };
    assert!(seen(&opened(&enough).train, 45, 30).is_ok());
}

#[test]
fn folders_are_classes() {
    let scratch = Scratch::new("folder");
    for name in
        ["cat/1.jpg", "cat/deep/2.JPG", "dog/1.png", "dog/3.jpeg", "dog/notes.txt", "ant/1.png", ".git/x.jpg"]
    {
        scratch.write(name, &picture("rgb.png"));
    }
    std::fs::create_dir(scratch.path().join("empty")).unwrap();
    let mut said = Vec::new();
    let sets = open(&spec(&scratch.at("")), &mut |line| said.push(line)).unwrap();
    assert_eq!(sets.classes, ["ant", "cat", "dog"]);
    assert_eq!((sets.train.balance(3), sets.description.kind), (vec![1, 2, 2], "folder"));
    assert_eq!(said, [OpenEvent::Note("folders without images are not classes: empty".into())]);
    assert_eq!(seen(&sets.train, 45, 30).unwrap().labels, [0, 1, 1, 2, 2]);
    // The order of classes may be given, but all of them must be named.
    let given =
        ImageSpec { classes: ["dog", "cat", "ant"].map(String::from).into(), ..spec(&scratch.at("")) };
    assert_eq!(opened(&given).train.balance(3), [2, 2, 1]);
    let few = ImageSpec { classes: ["dog", "cat"].map(String::from).into(), ..given };
    assert!(refused(&few).contains("`ant` is none of the classes"));
}

#[test]
fn folders_of_splits_are_no_classes() {
    let scratch = Scratch::new("parts");
    for name in ["train/a/1.png", "train/b/1.png", "val/a/1.png"] {
        scratch.write(name, &picture("rgb.png"));
    }
    let error = refused(&spec(&scratch.at("")));
    assert!(error.contains("/train and data.held_out_path="), "{error}");
    let both = ImageSpec { held_out_path: vec![scratch.at("val")], ..spec(&scratch.at("train")) };
    let sets = opened(&both);
    assert_eq!((sets.train.count(), sets.held_out.balance(2)), (2, vec![1, 0]));
    scratch.write("val/c/1.png", &picture("rgb.png"));
    assert!(refused(&both).contains("`c` is none of the classes"));
    assert!(refused(&spec(&scratch.at("val/a"))).contains("has no folders"));
}

#[test]
fn other_kinds_in_a_folder_are_named() {
    let scratch = Scratch::new("kinds");
    for name in ["a/1.png", "b/1.png", "b/2.tiff", "b/3.gif"] {
        scratch.write(name, &picture("rgb.png"));
    }
    std::os::unix::fs::symlink("/nowhere/x.jpg", scratch.path().join("b/4.jpg")).unwrap();
    assert!(refused(&spec(&scratch.at(""))).contains("2.tiff"));
    let mut said = Vec::new();
    let skip = ImageSpec { on_error: OnError::Skip, ..spec(&scratch.at("")) };
    let sets = open(&skip, &mut |line| said.push(line)).unwrap();
    assert_eq!(sets.train.count(), 2);
    assert_eq!(sets.description.unusable.iter().map(|(_, count, _)| count).sum::<u64>(), 3);
    assert!(
        matches!(&said[..], [OpenEvent::LeftOut(said)] if said.contains("2 neither JPEG, PNG nor WebP")),
        "{said:?}"
    );
}

#[test]
fn rows_of_tables_name_images() {
    let scratch = Scratch::new("table");
    scratch.write("images/1.png", &picture("rgb.png"));
    scratch.write("images/2.jpg", &picture("420.jpg"));
    let rows = "{\"image\": \"images/1.png\", \"label\": \"cat\"}\n{\"image\": \"images/2.jpg\", \"label\": \"ant\"}\n";
    let table = scratch.write("set.jsonl", rows.as_bytes());
    let sets = opened(&spec(&table));
    assert_eq!(
        (sets.classes.clone(), sets.description.kind),
        (vec!["ant".to_string(), "cat".into()], "table")
    );
    assert_eq!(seen(&sets.train, 45, 30).unwrap().labels, [1, 0]);
    // Other column names, another root, numeric labels, another format.
    let table = scratch.write("other.csv", b"photo,kind\n1.png,7\n2.jpg,3\n1.png,11\n");
    let other = ImageSpec {
        image: Some("photo".into()),
        label: Some("kind".into()),
        root: Some(scratch.path().join("images")),
        ..spec(&table)
    };
    assert_eq!(opened(&other).classes, ["3", "7", "11"]);
    // Each fault is reported with its line.
    for (row, words) in [
        ("{\"image\": \"images/9.png\", \"label\": \"cat\"}", "there is no image"),
        ("{\"image\": 5, \"label\": \"cat\"}", "holds no path"),
        ("{\"image\": \"images/1.png\"}", "known to hold a label"),
        ("{\"label\": \"cat\"}", "known to hold an image"),
        ("{\"image\": \"images/1.png\", \"label\": null}", "is null"),
        ("{\"image\": ", "JSON"),
    ] {
        let table = scratch.write("wrong.jsonl", format!("{rows}{row}\n").as_bytes());
        let error = refused(&spec(&table));
        assert!(error.contains("wrong.jsonl, line 3") && error.contains(words), "{words}: {error}");
        let sets = opened(&ImageSpec { on_error: OnError::Skip, ..spec(&table) });
        assert_eq!(sets.train.count(), 2);
        assert_eq!(sets.description.unusable[0].1, 1);
    }
}

/// Two samples of two classes, the second with two images.
fn samples() -> Vec<Vec<u8>> {
    vec![
        member("one.jpg", &picture("420.jpg")),
        member("one.cls", b"0\n"),
        member("two.000.png", &picture("rgb.png")),
        member("two.001.png", &picture("grey.png")),
        member("two.json", b"{\"label\": 1, \"caption\": \"x\"}"),
    ]
}

#[test]
fn archives_hold_samples() {
    let scratch = Scratch::new("tar");
    let first = scratch.write("s-000.tar", &archive(&samples()));
    scratch.write("s-001.tar", &archive(&samples()));
    let sets = opened(&spec(&first));
    assert_eq!(
        (sets.classes.clone(), sets.description.kind),
        (vec!["0".to_string(), "1".into()], "WebDataset")
    );
    let batch = seen(&sets.train, 45, 30).unwrap();
    assert_eq!(batch.labels, [0, 1, 1]);
    let apart = Scratch::new("tar-file");
    let files = opened(&broken(&apart, &picture("420.jpg")));
    assert_eq!(batch.pixels[..4050], seen(&files.train, 45, 30).unwrap().pixels[4050..]);
    for word in [scratch.at(""), scratch.at("s-{000..001}.tar"), scratch.at("s-*.tar")] {
        let source = if word.contains('*') { ImageSource::Tar } else { ImageSource::Auto };
        assert_eq!(opened(&ImageSpec { source, ..spec(&word) }).train.count(), 6);
    }
    // Images of one sample are on one side.
    let many: Vec<Vec<u8>> = (0..40)
        .flat_map(|at| {
            let image = picture("grey.png");
            [
                member(&format!("d/{at}.a.png"), &image),
                member(&format!("d/{at}.b.png"), &image),
                member(&format!("d/{at}.cls"), if at % 2 == 0 { b"even" } else { b"odd" }),
            ]
        })
        .collect();
    let many = scratch.write("many.tar", &archive(&many));
    let sets = opened(&ImageSpec { held_out: 0.3, ..spec(&many) });
    assert_eq!((sets.train.count(), sets.held_out.count()), (56, 24));
    assert!(sets.held_out.balance(2).iter().all(|count| count % 2 == 0));
}

/// Changes bytes of a file without changing its size and time.
fn changed_in_secret(path: &str, change: impl Fn(&mut Vec<u8>)) {
    let modified = std::fs::metadata(path).unwrap().modified().unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
    std::fs::File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
}

/// An unchanged archive is not scanned again, and the cache is not used for anything else.
#[test]
fn indices_of_archives_are_cached() {
    let scratch = Scratch::new("tar-kept");
    let path = scratch.write("s.tar", &archive(&samples()));
    let cache = scratch.path().join("cache");
    let plain = spec(&path);
    let kept = ImageSpec { cache: Some(cache.clone()), ..plain.clone() };
    let (without, made) = (opened(&plain), opened(&kept));
    let kept_file = std::fs::read_dir(cache.join("archives")).unwrap().next().unwrap().unwrap().path();
    changed_in_secret(&path, |bytes| bytes[0] ^= 1);
    assert!(refused(&plain).contains("a header is missing"));
    let again = opened(&kept);
    for sets in [&made, &again] {
        assert_eq!(sets.classes, without.classes);
        assert_eq!(sets.train.count(), without.train.count());
        let places =
            |sets: &ImageSets| (0..sets.train.count()).map(|at| sets.train.place(at)).collect::<Vec<_>>();
        assert_eq!(places(sets), places(&without));
        let cursor = |sets: &ImageSets| ImageLoader::start(&sets.train, 1);
        assert_eq!(cursor(sets), cursor(&without));
    }
    // The cached index is damaged, so the archive is scanned, and it is damaged too.
    let text = std::fs::read(&kept_file).unwrap();
    std::fs::write(&kept_file, &text[..text.len() - 3]).unwrap();
    assert!(refused(&kept).contains("a header is missing"));
    changed_in_secret(&path, |bytes| bytes[0] ^= 1);
    assert_eq!(opened(&kept).train.count(), without.train.count());
    assert_eq!(std::fs::read(&kept_file).unwrap(), text);
    // A newer archive is scanned, whatever is cached of the older one.
    scratch.write("s.tar", &archive(&[samples(), vec![member("/etc/x.jpg", b"x")]].concat()));
    assert!(refused(&kept).contains("leads out"));
    // Errors of writing to the cache are ignored.
    let nowhere = ImageSpec { cache: Some(kept_file), ..spec(&scratch.write("t.tar", &archive(&samples()))) };
    assert_eq!(opened(&nowhere).train.count(), without.train.count());
}

#[test]
fn a_label_is_a_class_file_a_field_or_a_text() {
    let scratch = Scratch::new("tar-labels");
    let image = || member("k.jpg", &picture("420.jpg"));
    let json = || member("k.json", b"{\"label\": \"from json\", \"species\": \"named\"}");
    let class = || member("k.cls", b"from cls");
    let text = || member("k.txt", b" from txt\n");
    let other =
        [member("z.jpg", &picture("420.jpg")), member("z.json", b"{\"label\": \"zz\", \"species\": \"zz\"}")]
            .concat();
    for (members, label, expected) in [
        (vec![image(), class(), json(), text()], None, "from cls"),
        (vec![json(), image(), text()], None, "from json"),
        (vec![text(), image()], None, "from txt"),
        (vec![image(), class(), json()], Some("species"), "named"),
    ] {
        let path = scratch.write("l.tar", &archive(&[members.concat(), other.clone()]));
        let sets = opened(&ImageSpec { label: label.map(String::from), ..spec(&path) });
        assert_eq!(sets.classes, [expected, "zz"]);
    }
}

#[test]
fn flaws_of_archives_are_named_and_fatal_or_left_out() {
    let sparse = [extra(b'x', &record("GNU.sparse.major", "1")), member("s.jpg", b"x")].concat();
    let whole = archive(&samples());
    for (at, (bytes, words, reason)) in [
        (archive(&[samples(), vec![member("/etc/x.jpg", b"x")]].concat()), "leads out", Reason::MemberPath),
        (
            archive(&[samples(), vec![member("a/../../x.jpg", b"x")]].concat()),
            "leads out",
            Reason::MemberPath,
        ),
        (archive(&[samples(), vec![header("x.jpg", 0, b'2')]].concat()), "is a link", Reason::MemberKind),
        (archive(&[samples(), vec![header("x.jpg", 0, b'1')]].concat()), "is a link", Reason::MemberKind),
        (archive(&[samples(), vec![header("x.jpg", 0, b'3')]].concat()), "device", Reason::MemberKind),
        (
            archive(&[samples(), vec![[header("x.jpg", 3, b'S'), padded(b"abc")].concat()]].concat()),
            "sparse",
            Reason::MemberKind,
        ),
        (archive(&[samples(), vec![sparse]].concat()), "sparse", Reason::MemberKind),
        (whole[..whole.len() - 1024].to_vec(), "cut short", Reason::Damaged),
        (
            [&whole[..whole.len() - 1024], &header("x.jpg", 9000, b'0'), &[7; 100]].concat(),
            "cut short",
            Reason::Damaged,
        ),
        (
            archive(&[samples(), vec![member("three.jpg", &picture("420.jpg"))]].concat()),
            "neither a .cls nor a .json",
            Reason::NoLabel,
        ),
        (archive(&[samples(), vec![member("three.cls", b"1")]].concat()), "has no image", Reason::NoImage),
        (archive(&[samples(), samples()[..2].to_vec()].concat()), "was there before", Reason::KeyTwice),
        (
            archive(&[samples(), vec![member("two.001.png", &picture("grey.png"))]].concat()),
            "occurs twice",
            Reason::KeyTwice,
        ),
        (
            archive(&[samples(), vec![member("x.jpg", b"?"), member("x.json", b"{\"label\":")]].concat()),
            "not a JSON object",
            Reason::BrokenJson,
        ),
        (
            archive(&[samples(), vec![member("x.jpg", b"?"), member("x.json", b"{\"label\":[]}")]].concat()),
            "not a name or a number",
            Reason::Label,
        ),
        (
            archive(
                &[samples(), vec![member("x.gif", b"?"), member("x.png", b"?"), member("x.cls", b"")]]
                    .concat(),
            ),
            "another kind",
            Reason::NotAnImage,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let scratch = Scratch::new(&format!("tar-flaw-{at}"));
        let path = scratch.write("shard.tar", &bytes);
        let error = refused(&spec(&path));
        assert!(error.contains("shard.tar, byte") && error.contains(words), "{words}: {error}");
        let sets = opened(&ImageSpec { on_error: OnError::Skip, ..spec(&path) });
        assert_eq!(sets.train.count(), 3, "{words}");
        let unusable = &sets.description.unusable;
        assert!(
            unusable.iter().any(|(found, count, _)| found == reason.words() && *count == 1),
            "{words}: {unusable:?}"
        );
        assert_eq!(seen(&sets.train, 45, 30).unwrap().labels, [0, 1, 1]);
    }
}

#[test]
fn packed_and_empty_archives_are_refused() {
    let scratch = Scratch::new("tar-refused");
    let packed = scratch.write("a.tar.gz", b"x");
    assert!(refused(&ImageSpec { source: ImageSource::Tar, ..spec(&packed) }).contains("decompress it"));
    let empty = scratch.write("empty.tar", &archive(&[]));
    assert!(refused(&spec(&empty)).contains("no image with a label"));
    let nothing = scratch.write("nothing.tar", b"");
    assert!(refused(&spec(&nothing)).contains("cut short"));
    let other = scratch.write("file.xyz", b"");
    assert!(refused(&spec(&other)).contains("not a known source of images"));
}

#[test]
fn an_archive_that_changes_is_noticed() {
    let scratch = Scratch::new("tar-changed");
    let path = scratch.write("s.tar", &archive(&samples()));
    let sets = opened(&ImageSpec { on_error: OnError::Skip, ..spec(&path) });
    scratch.write("s.tar", &archive(&samples())[..700]);
    let error = seen(&sets.train, 45, 30).unwrap_err();
    assert!(error.sentence.contains("shorter than it was"), "{error}");
}

#[test]
fn inspection_reports_sizes_and_formats() {
    let scratch = Scratch::new("look");
    scratch.write("a/1.jpg", &picture("turned6.jpg"));
    scratch.write("a/2.png", &picture("rgb16.png"));
    scratch.write("b/3.jpg", &picture("cmyk.jpg"));
    scratch.write("b/4.jpg", &huge_jpeg());
    let sets = opened(&ImageSpec { held_out: 0.25, ..spec(&scratch.at("")) });
    let found = inspect(&sets, 10).unwrap();
    assert_eq!((found.looked_at, &found.kinds[..]), (4, &[("JPEG", 2), ("PNG", 1)][..]));
    assert_eq!((found.widths.least, found.widths.most, found.heights.most), (30, 45, 45));
    assert_eq!(found.unusable[0].0, Reason::TooManyPixels.words());
    assert_eq!(found.samples.len(), 3);
}

#[test]
fn images_are_classified_without_labels() {
    let scratch = Scratch::new("asked");
    let words = |path: &str| ImageSpec { path: vec![scratch.at(path)], ..ImageSpec::default() };
    scratch.write("f/a/1.png", &picture("rgb.png"));
    scratch.write("f/0.jpg", &picture("420.jpg"));
    let asked = flatout_data::images::open_unlabelled(&words("f")).unwrap();
    assert_eq!(asked.names, [scratch.at("f/0.jpg"), scratch.at("f/a/1.png")]);
    assert_eq!((asked.set.count(), asked.left_out), (2, None));
    // A sample without a label, and one with several images.
    let members = [("k.jpg", "420.jpg"), ("k.left.png", "rgb.png"), ("z.jpg", "420.jpg")]
        .map(|(name, of)| member(name, &picture(of)));
    scratch.write("s.tar", &archive(&members));
    let asked = flatout_data::images::open_unlabelled(&words("s.tar")).unwrap();
    assert_eq!(
        asked.names,
        ["k.jpg", "k.left.png", "z.jpg"].map(|name| format!("{}/{name}", scratch.at("s.tar")))
    );
    assert_eq!(seen(&asked.set, 8, 8).unwrap().labels, [0, 0, 0]);
    let refused = |path: &str| {
        flatout_data::images::open_unlabelled(&words(path)).err().expect("it is refused").sentence
    };
    scratch.write("empty/x.txt", b"text");
    assert!(refused("empty").contains("There is no .jpg"), "{}", refused("empty"));
    assert!(refused("empty/x.txt").contains("holds no images"), "{}", refused("empty/x.txt"));
    scratch.write("g/x.gif", b"GIF89a");
    assert!(refused("g").contains("x.gif"), "{}", refused("g"));
}

/// A file that is rewritten between two epochs is noticed when it is read again, and its new time when a run opens it.
#[test]
fn images_that_change_are_noticed() {
    let scratch = Scratch::new("changed-images");
    scratch.write("set/a/1.jpg", &picture("420.jpg"));
    scratch.write("set/b/2.png", &picture("rgb.png"));
    let spec = spec(scratch.path().join("set").to_str().unwrap());
    let sets = opened(&spec);
    let (first, version) = (seen(&sets.train, 16, 16).unwrap(), sets.train.version());
    assert_eq!(seen(&sets.train, 16, 16).unwrap().pixels, first.pixels);
    assert_eq!(opened(&spec).train.version(), version, "it is the same from one opening to the next");
    scratch.write("set/a/1.jpg", &picture("422.jpg"));
    let error = seen(&sets.train, 16, 16).unwrap_err();
    assert!(error.sentence.contains("1.jpg") && error.sentence.contains("has other bytes than"), "{error}");
    assert_ne!(opened(&spec).train.version(), version);
    assert_ne!(seen(&opened(&spec).train, 16, 16).unwrap().pixels, first.pixels);
}

/// Images as the processors of published models produce them (`processed/make.py`), with a mean difference below one grey
/// level.
#[test]
fn images_are_scaled_and_cut_as_published_processors_do_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/processed");
    let cases: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let expected = std::fs::read(folder.join("expected.bin")).unwrap();
    let mut rest = &expected[..];
    let whole = |value: &serde_json::Value| value.as_u64().unwrap() as usize;
    let mut wrong = Vec::new();
    for case in cases.as_array().unwrap() {
        let (side, name) = (whole(&case["side"]), case["picture"].as_str().unwrap());
        let (pixels, after) = rest.split_at(side * side * 3);
        rest = after;
        let scratch = Scratch::new(&format!("processed-{name}"));
        scratch.write(&format!("a/{name}"), &picture(name));
        scratch.write("b/other.png", &picture("rgb.png"));
        let to = match case["resize"].as_array().unwrap().as_slice() {
            [shorter] => Scaled::Shorter(whole(shorter)),
            [height, width] => Scaled::Both { height: whole(height), width: whole(width) },
            other => panic!("{other:?}"),
        };
        let view = View {
            width: side,
            height: side,
            augment: Augment::Resized(to),
            filter: case["filter"].as_str().unwrap().parse().unwrap(),
        };
        let set = opened(&spec(scratch.path().to_str().unwrap())).train;
        let made = ordered(&set, &view, 0..1).unwrap().pixels;
        let apart = made.iter().zip(pixels).map(|(a, b)| a.abs_diff(*b));
        let mean = apart.clone().map(f64::from).sum::<f64>() / pixels.len() as f64;
        println!("{case}: {mean:.3} in the mean, {} at most", apart.clone().max().unwrap());
        // Filters that overshoot clip after each of two passes there.
        let is_exact = name == "rgb.png" && view.filter == Filter::Bilinear;
        if mean >= 1.0 || (is_exact && apart.max().unwrap() > 1) {
            wrong.push(format!("{case}: {mean:.3}"));
        }
    }
    assert!(rest.is_empty() && wrong.is_empty(), "{wrong:#?}");
}
