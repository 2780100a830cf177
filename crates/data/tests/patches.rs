//! Compares patches of images with those of the transformers library's processor for Qwen3-VL (`patches/make.py`).

use std::io::Read;
use std::path::Path;

use flatout_data::images::MAX_PIXELS;
use flatout_data::vision::{Given, ImageReader, ImageStore, Patching};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128;

const PATCH: usize = 16;
const BYTES: usize = PATCH * PATCH * 3;

/// Differences of bytes of sampled patches from the library's.
#[derive(Default)]
struct Apart {
    bytes: usize,
    /// Counts by size of the difference, from 1 on.
    by: Vec<usize>,
}

impl Apart {
    fn add(&mut self, ours: &[u8], theirs: &[u8]) {
        assert_eq!(ours.len(), theirs.len());
        self.bytes += ours.len();
        for by in ours.iter().zip(theirs).map(|(a, b)| usize::from(a.abs_diff(*b))).filter(|by| *by > 0) {
            if self.by.len() < by {
                self.by.resize(by, 0);
            }
            self.by[by - 1] += 1;
        }
    }

    fn share_beyond(&self, by: usize) -> f64 {
        self.by.iter().skip(by).sum::<usize>() as f64 / self.bytes as f64
    }
}

/// PNG must match to the byte, which tests resizing and cutting. JPEG decoders differ in rounding: one byte in twenty differs
/// by 1, and one in five hundred by more.
#[test]
fn patches_are_those_of_the_library() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let read = |name: &str| std::fs::read(tests.join("patches").join(name)).unwrap();
    let cases: Value = serde_json::from_slice(&read("expected.json")).unwrap();
    let mut expected = vec![];
    flate2::read::ZlibDecoder::new(&read("expected.bin.z")[..]).read_to_end(&mut expected).unwrap();
    let mut rest = &expected[..];
    let whole = |value: &Value| value.as_u64().unwrap() as usize;
    let mut wrong = vec![];
    let (mut png, mut jpeg) = (Apart::default(), Apart::default());
    for case in cases.as_array().unwrap() {
        let patching = Patching {
            patch: PATCH,
            merge: 2,
            least_pixels: case["least"].as_u64().unwrap(),
            most_pixels: case["most"].as_u64().unwrap(),
            ..Patching::default()
        };
        let name = case["image"].as_str().unwrap();
        let reader = ImageReader::new(patching, MAX_PIXELS, 1 << 20);
        let image = reader.read(Given::Path(name), &tests.join(case["folder"].as_str().unwrap())).unwrap();
        let grid = image.grid;
        assert_eq!([grid.rows, grid.columns], [0, 1].map(|at| whole(&case["grid"][at])), "{name}");
        let mut store = ImageStore::new(patching, MAX_PIXELS);
        let number = store.number(&image);
        let mut patches = vec![0; grid.patches() * BYTES];
        store.patches(number, &mut patches).unwrap();
        let mut here = Apart::default();
        for sample in case["samples"].as_array().unwrap() {
            let (theirs, after) = rest.split_at(BYTES);
            rest = after;
            here.add(&patches[whole(sample) * BYTES..][..BYTES], theirs);
            let all = if name.ends_with(".png") { &mut png } else { &mut jpeg };
            all.add(&patches[whole(sample) * BYTES..][..BYTES], theirs);
        }
        let is_equal = format!("{:032x}", xxh3_128(&patches)) == case["hash"].as_str().unwrap();
        println!(
            "{name}: equal {is_equal}, of {} sampled bytes {:?} differ by 1, 2, ...",
            here.bytes, here.by
        );
        let is_near =
            here.share_beyond(0) < 0.2 && here.share_beyond(1) < 0.02 && here.share_beyond(2) < 0.002;
        if name.ends_with(".png") && !is_equal || !is_near {
            wrong.push(format!("{name}: {:?} of {}", here.by, here.bytes));
        }
    }
    println!("PNG {:?} of {}, JPEG {:?} of {}", png.by, png.bytes, jpeg.by, jpeg.bytes);
    assert!(rest.is_empty() && wrong.is_empty(), "{wrong:#?}");
    assert!(png.by.is_empty(), "PNG differs in no byte");
    let shares = [0, 1].map(|by| jpeg.share_beyond(by));
    assert!(shares[0] < 0.07 && shares[1] < 0.004, "of JPEG {shares:?} differ at all and by more than 1");
}
