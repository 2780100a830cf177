//! Tests of every operation against timm's (`tests/augment/make.py`), and of the random choices.

use serde_json::Value;

use super::canvas::Canvas;
use super::erasing::Rectangle;
use super::rand_augment::TABLE;
use super::*;
use crate::images::CHANNELS;

struct Golden {
    expected: Value,
    bytes: Vec<u8>,
    width: usize,
    height: usize,
}

impl Golden {
    fn read() -> Self {
        let read = |name: &str| {
            std::fs::read(format!("{}/tests/augment/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
        };
        let expected: Value = serde_json::from_slice(&read("expected.json")).unwrap();
        let side = |name: &str| expected[name].as_u64().unwrap() as usize;
        let (width, height) = (side("width"), side("height"));
        Self { bytes: read("expected.bin"), width, height, expected }
    }

    /// The pixels of a stored image: number 0 is the input, and the others are results.
    fn pixels(&self, number: usize) -> &[u8] {
        let image = self.width * self.height * CHANNELS;
        &self.bytes[number * image..][..image]
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

#[test]
fn operations_are_those_of_timm() {
    let golden = Golden::read();
    let fill = [0, 1, 2].map(|channel| golden.expected["fill"][channel].as_u64().unwrap() as u8);
    let mut seen = std::collections::BTreeSet::new();
    for (at, case) in golden.expected["results"].as_array().unwrap().iter().enumerate() {
        let place = case["operation"].as_u64().unwrap() as usize;
        let operation = &TABLE[place];
        seen.insert(place);
        let argument = (operation.argument)(number(&case["level"]) / 10.0, number(&case["sign"]));
        assert!((argument - number(&case["argument"])).abs() < 1e-12, "{case}: {argument}");
        let mut pixels = golden.pixels(0).to_vec();
        let filter = case["filter"].as_str().unwrap().parse().unwrap();
        let mut canvas =
            Canvas { width: golden.width, pixels: &mut pixels, spare: &mut vec![7; 5], filter, fill };
        (operation.apply)(&mut canvas, argument);
        let wanted = golden.pixels(at + 1);
        let most = pixels.iter().zip(wanted).map(|(one, other)| one.abs_diff(*other)).max().unwrap();
        assert_eq!(most, 0, "{case}");
        assert!(pixels != golden.pixels(0), "{case}: nothing changed");
    }
    assert_eq!(seen.len(), TABLE.len());
}

#[test]
fn rectangles_are_those_of_timm() {
    let golden = Golden::read();
    for case in golden.expected["rectangles"].as_array().unwrap() {
        let pair = |name: &str| (number(&case[name][0]), number(&case[name][1]));
        let erasing = Erasing { area: pair("area"), ratio: pair("ratio"), ..ERASING };
        let mut drawn = case["drawn"].as_array().unwrap().iter().map(number);
        let found = erasing.rectangle(golden.width, golden.height, &mut || drawn.next().unwrap());
        let wanted = case["rectangle"].as_array().map(|sides| {
            let side = |at: usize| sides[at].as_u64().unwrap() as usize;
            Rectangle { left: side(0), top: side(1), width: side(2), height: side(3) }
        });
        assert_eq!(found, wanted, "{case}");
    }
}

const RAND_AUGMENT: RandAugment =
    RandAugment { operations: 2, probability: 0.5, magnitude: 9.0, noise: 0.5, fill: [124, 116, 104] };

const ERASING: Erasing = Erasing {
    probability: 0.25,
    area: (0.02, 1.0 / 3.0),
    ratio: (0.3, 1.0 / 0.3),
    with: ErasedWith::Mean,
    mean: [0.485, 0.456, 0.406],
    deviation: [0.229, 0.224, 0.225],
};

fn changed(changes: Changes, sample: u64, golden: &Golden) -> Vec<u8> {
    let mut pixels = golden.pixels(0).to_vec();
    changes.apply(sample, Filter::Bilinear, golden.width, &mut pixels, &mut Vec::new());
    pixels
}

#[test]
fn a_sample_has_one_change_and_others_have_others() {
    let golden = Golden::read();
    let changes = Changes { rand_augment: Some(RAND_AUGMENT), erasing: Some(ERASING) };
    let all: Vec<Vec<u8>> = (0..400).map(|sample| changed(changes, sample, &golden)).collect();
    assert!((0..400).all(|sample| changed(changes, sample, &golden) == all[sample as usize]));
    // An image stays unchanged where neither operation is applied and nothing is erased: with probability 0.5 * 0.5 * 0.75.
    let same = all.iter().filter(|pixels| pixels.as_slice() == golden.pixels(0)).count();
    assert!((50..100).contains(&same), "{same} of 400 are as they were");
    let distinct: std::collections::BTreeSet<&Vec<u8>> = all.iter().collect();
    assert!(distinct.len() > 200, "{}", distinct.len());
    assert_eq!(changed(Changes::NONE, 3, &golden), golden.pixels(0));
}

/// Changes of one kind do not affect the random numbers of the other.
#[test]
fn erasing_is_drawn_apart_from_operations() {
    let golden = Golden::read();
    let erasing = Erasing { probability: 1.0, ..ERASING };
    let none = RandAugment { probability: 0.0, ..RAND_AUGMENT };
    for sample in 0..50 {
        let alone = changed(Changes { rand_augment: None, erasing: Some(erasing) }, sample, &golden);
        let beside = changed(Changes { rand_augment: Some(none), erasing: Some(erasing) }, sample, &golden);
        assert!(alone == beside);
    }
}

#[test]
fn operations_are_uniform_with_the_requested_magnitude() {
    let mut counts = [0; TABLE.len()];
    let mut levels = Vec::new();
    for sample in 0..6000 {
        let mut uniform = Uniform::new(key(key(sample, OPERATIONS), 0));
        counts[(uniform.draw() * TABLE.len() as f64) as usize] += 1;
        // The draws for whether it is applied, and for its sign.
        let _ = [uniform.draw(), uniform.draw()];
        levels.push(9.0 + 0.5 * normal(&mut uniform));
    }
    assert!(counts.iter().all(|count| (320..480).contains(count)), "{counts:?}");
    let mean = levels.iter().sum::<f64>() / 6000.0;
    let spread = (levels.iter().map(|level| (level - mean).powi(2)).sum::<f64>() / 6000.0).sqrt();
    assert!((mean - 9.0).abs() < 0.03 && (spread - 0.5).abs() < 0.03, "{mean} {spread}");
}

#[test]
fn erased_pixels_are_the_mean_or_lie_around_it() {
    let (width, height) = (64, 64);
    let erased = |with: ErasedWith, sample: u64| {
        // A value that noise does not produce.
        let mut pixels = vec![1; width * height * CHANNELS];
        let area = (0.5, 0.5);
        let erasing = Erasing { probability: 1.0, area, ratio: (1.0, 1.0), with, ..ERASING };
        erasing.apply(&mut pixels, width, sample);
        pixels.chunks(CHANNELS).filter(|pixel| *pixel != [1; 3]).map(<[u8]>::to_vec).collect::<Vec<_>>()
    };
    let mean = erased(ErasedWith::Mean, 5);
    assert_eq!(mean.len(), 45 * 45);
    assert!(mean.iter().all(|pixel| pixel[..] == [124, 116, 104]));
    let colour = erased(ErasedWith::Colour, 5);
    assert!(colour.iter().all(|pixel| *pixel == colour[0]) && colour[0] != mean[0]);
    let noise = erased(ErasedWith::Noise, 5);
    let red = noise.iter().map(|pixel| f64::from(pixel[0])).sum::<f64>() / noise.len() as f64;
    assert!((red - 124.0).abs() < 5.0, "{red}");
    assert!(noise.iter().any(|pixel| *pixel != noise[0]));
}

#[test]
fn images_of_any_size_can_be_changed() {
    for (width, height) in [(1, 1), (1, 9), (9, 1), (2, 2), (3, 3)] {
        for operation in &TABLE {
            for filter in Filter::ALL {
                let mut pixels: Vec<u8> = (0..width * height * CHANNELS).map(|at| (at * 11) as u8).collect();
                let spare = &mut Vec::new();
                let mut canvas =
                    Canvas { width, pixels: &mut pixels, spare, filter: *filter, fill: [9; CHANNELS] };
                (operation.apply)(&mut canvas, (operation.argument)(1.0, -1.0));
                assert_eq!(pixels.len(), width * height * CHANNELS);
            }
        }
        let mut pixels = vec![3; width * height * CHANNELS];
        Erasing { probability: 1.0, area: (1.0, 1.0), ..ERASING }.apply(&mut pixels, width, 1);
    }
}
