//! A generated set of videos: one, two or four moving shapes, and a sentence that says where one of them went.
//!
//! The bar at the top of the first frame has the colour of the shape that the sentence is about. Shapes move from near the
//! middle to different edges. A model that reads all frames alike has to remember every shape; one that has seen the bar can
//! look for a single one. Samples with one or two shapes teach directions before four shapes have to be told apart. Every
//! eighth sample is a still image, and every eighth a text without frames.

pub(super) mod pairs;

use super::sample::{Content, SampleMetadata};
use super::shard::frame_rows;
use crate::examples::Sighting;
use crate::examples::synthetic::Draw;
use crate::random::{Uniform, key};

const COLOURS: [(&str, [u8; 3]); 4] =
    [("red", [220, 40, 40]), ("green", [40, 190, 60]), ("blue", [50, 80, 230]), ("yellow", [230, 210, 40])];
const KINDS: [&str; 2] = ["square", "cross"];
const WAYS: [(&str, [f64; 2]); 4] =
    [("left", [-1.0, 0.0]), ("right", [1.0, 0.0]), ("up", [0.0, -1.0]), ("down", [0.0, 1.0])];
/// Distance of a shape from the middle in the first and in the last frame, relative to the side.
const FROM: f64 = 0.14;
const TO: f64 = 0.32;
/// Least and most frames of a video.
const FRAMES: [usize; 2] = [4, 8];
/// Frame numbers of a sample are `sample * FRAMES_PER_SAMPLE` and those after it.
pub(super) const FRAMES_PER_SAMPLE: u32 = FRAMES[1] as u32;

/// A shape: its colour, kind and direction.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Shape {
    colour: usize,
    kind: usize,
    way: usize,
    /// Distance across its direction, relative to the side.
    aside: f64,
}

#[derive(Debug, Clone, PartialEq)]
struct Scene {
    /// The sentence is about the first shape.
    shapes: Vec<Shape>,
    ground: u8,
    frames: usize,
}

/// The kinds of samples in the set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SampleKind {
    Video,
    Still,
    Text,
}

fn kind(sample: u64) -> SampleKind {
    match sample % 8 {
        6 => SampleKind::Still,
        7 => SampleKind::Text,
        _ => SampleKind::Video,
    }
}

/// Number of shapes in a sample.
fn shapes(sample: u64) -> usize {
    match sample % 8 {
        0 | 1 => 1,
        2 | 3 => 2,
        _ => 4,
    }
}

impl Scene {
    fn drawn(seed: u64, sample: u64) -> Scene {
        let mut draw = Draw(Uniform::new(key(key(seed, 0x6d6f_7665), sample)));
        let [colours, ways] = [COLOURS.len(), WAYS.len()].map(|count| draw.permutation(count));
        let mut shape = |(colour, way)| {
            let (kind, aside) = (draw.below(KINDS.len()), 0.04 * draw.below(3) as f64 - 0.04);
            Shape { colour, kind, way, aside }
        };
        let shapes = colours.into_iter().zip(ways).take(shapes(sample)).map(&mut shape).collect();
        let ground = 100 + draw.below(40) as u8;
        let frames = match kind(sample) {
            SampleKind::Video => FRAMES[0] + draw.below(FRAMES[1] - FRAMES[0] + 1),
            SampleKind::Still => 1,
            SampleKind::Text => 0,
        };
        Scene { shapes, ground, frames }
    }

    fn named(&self) -> String {
        let Shape { colour, kind, .. } = self.shapes[0];
        format!("{} {}", COLOURS[colour].0, KINDS[kind])
    }
}

/// The text of a sample, and its frames.
pub(super) fn sample(seed: u64, sample: u64, still_frames: usize) -> (SampleMetadata, Vec<Sighting>) {
    let scene = Scene::drawn(seed, sample);
    let (user, assistant) = match kind(sample) {
        SampleKind::Video => {
            ("What moved?", format!("The {} moved {}.", scene.named(), WAYS[scene.shapes[0].way].0))
        }
        SampleKind::Still => ("What is this?", format!("A {}.", scene.named())),
        SampleKind::Text => ("Say it again.", format!("The {}.", scene.named())),
    };
    let user = match kind(sample) {
        SampleKind::Text => format!("{user} The {}.", scene.named()),
        _ => user.to_string(),
    };
    let hashes: Vec<u64> = (0..scene.frames as u64).map(|frame| key(key(seed, sample), frame)).collect();
    let content = Content::Answer { user, assistant };
    let metadata =
        SampleMetadata { content, source: "shapes".into(), frame_count: Some(scene.frames as u64) };
    (metadata, frame_rows(&hashes, sample as u32 * FRAMES_PER_SAMPLE, still_frames))
}

/// Draws the pixels of a square frame, row by row.
pub(super) fn draw(seed: u64, number: u32, side: usize, out: &mut [u8]) {
    let (sample, frame) = (u64::from(number / FRAMES_PER_SAMPLE), (number % FRAMES_PER_SAMPLE) as usize);
    let scene = Scene::drawn(seed, sample);
    out.fill(scene.ground);
    let mut fill = |colour: [u8; 3], is_inside: &dyn Fn(f64, f64) -> bool| {
        for (pixel, rgb) in out.chunks_exact_mut(3).enumerate() {
            let [x, y] = [pixel % side, pixel / side].map(|at| (at as f64 + 0.5) / side as f64);
            if is_inside(x, y) {
                rgb.copy_from_slice(&colour);
            }
        }
    };
    if frame == 0 {
        fill(COLOURS[scene.shapes[0].colour].1, &|_, y| y < 0.08);
    }
    let gone = frame as f64 / (scene.frames.max(2) - 1) as f64;
    for &Shape { colour, kind, way, aside } in &scene.shapes {
        let [along_x, along_y] = WAYS[way].1;
        let far = FROM + (TO - FROM) * gone;
        // The centre of the area below the bar.
        let (x, y) = (0.5 + far * along_x + aside * along_y, 0.54 + far * along_y + aside * along_x);
        let size = 0.16;
        fill(COLOURS[colour].1, &|px, py| {
            let (dx, dy) = ((px - x) / size, (py - y) / size);
            match kind {
                0 => dx.abs().max(dy.abs()) <= 0.9,
                _ => dx.abs().max(dy.abs()) <= 1.0 && dx.abs().min(dy.abs()) <= 0.2,
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn answer(metadata: &SampleMetadata) -> &str {
        match &metadata.content {
            Content::Answer { assistant, .. } => assistant,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn samples_are_the_same_every_time() {
        for number in 0..64 {
            assert_eq!(sample(3, number, 4), sample(3, number, 4));
            let (metadata, frame_rows) = sample(3, number, 4);
            let frames = metadata.frame_count.unwrap();
            match number % 8 {
                6 => assert!(
                    frames == 1
                        && frame_rows.len() == 4
                        && frame_rows.iter().all(|s| s.image == frame_rows[0].image)
                ),
                7 => assert!(frames == 0 && frame_rows.is_empty()),
                _ => assert!((4..=8).contains(&frames) && frame_rows.len() as u64 == frames),
            }
        }
        assert_ne!(sample(3, 0, 4), sample(4, 0, 4));
    }

    /// A guess that uses only the colour of the bar is right about kind and direction an eighth of the time.
    #[test]
    fn answers_need_the_frames() {
        let mut answers: HashMap<&str, HashMap<String, usize>> = HashMap::new();
        for number in (0..4000).filter(|number| number % 8 < 6) {
            let (metadata, _) = sample(1, number, 4);
            let answer = answer(&metadata).to_string();
            let colour = COLOURS.iter().find(|(colour, _)| answer.contains(colour)).unwrap().0;
            *answers.entry(colour).or_default().entry(answer).or_default() += 1;
        }
        for (colour, counts) in &answers {
            let (all, most) = (counts.values().sum::<usize>(), *counts.values().max().unwrap());
            assert!(counts.len() == 8 && most * 5 < all, "{colour}: {counts:?}");
        }
    }

    /// Checks the pixels: the bar of the first frame has the colour of the shape whose centre moves as the sentence says.
    #[test]
    fn pixels_show_what_the_sentence_says() {
        const SIDE: usize = 48;
        for number in (0..200).filter(|number| number % 8 < 6) {
            let (metadata, frames) = sample(5, number, 4);
            let draw = |frame: usize| {
                let mut out = vec![0; SIDE * SIDE * 3];
                draw(5, frames[frame].image, SIDE, &mut out);
                out
            };
            let bar: [u8; 3] = draw(0)[..3].try_into().unwrap();
            let middle = |pixels: &[u8]| {
                let below_bar = |(at, rgb): (usize, &[u8])| {
                    (rgb == bar && at / SIDE > SIDE / 12).then_some([at % SIDE, at / SIDE])
                };
                let inside: Vec<[usize; 2]> = pixels.chunks(3).enumerate().filter_map(below_bar).collect();
                assert!(inside.len() > 20, "{number}: {} pixels", inside.len());
                [0, 1]
                    .map(|axis| inside.iter().map(|at| at[axis]).sum::<usize>() as f64 / inside.len() as f64)
            };
            let (first, last) = (middle(&draw(0)), middle(&draw(frames.len() - 1)));
            let (dx, dy) = (last[0] - first[0], last[1] - first[1]);
            let way = match dx.abs() > dy.abs() {
                true => {
                    if dx < 0.0 {
                        "left"
                    } else {
                        "right"
                    }
                }
                false => {
                    if dy < 0.0 {
                        "up"
                    } else {
                        "down"
                    }
                }
            };
            assert!(answer(&metadata).contains(way), "{number}: {metadata:?} moved by {dx} {dy}");
            assert_ne!(draw(1)[..3], bar, "the bar is in the first frame alone");
        }
    }
}
