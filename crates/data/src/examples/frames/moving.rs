//! A drawn set: one, two or four shapes that move, and a sentence that says where one of them went.
//!
//! The first frame has a bar at its top in the colour of the shape that the sentence is about. Shapes move from near the middle to
//! an edge, each to another one, so whoever looks at all frames alike has to keep all of them in mind, and whoever has seen the bar
//! can look for one. Samples with one or two shapes teach where things are before four have to be told apart. Every eighth sample
//! is a still image, and every eighth a text without frames.

pub(super) mod pairs;

use super::sample::{Content, SampleMetadata};
use super::shard::shown;
use crate::examples::Sighting;
use crate::examples::synthetic::Draw;
use crate::random::{Uniform, key};

const COLOURS: [(&str, [u8; 3]); 4] =
    [("red", [220, 40, 40]), ("green", [40, 190, 60]), ("blue", [50, 80, 230]), ("yellow", [230, 210, 40])];
const KINDS: [&str; 2] = ["square", "cross"];
const WAYS: [(&str, [f64; 2]); 4] =
    [("left", [-1.0, 0.0]), ("right", [1.0, 0.0]), ("up", [0.0, -1.0]), ("down", [0.0, 1.0])];
/// How far a shape is from the middle in the first frame and in the last, in shares of the side.
const FROM: f64 = 0.14;
const TO: f64 = 0.32;
/// Frames of a video, least and most.
const FRAMES: [usize; 2] = [4, 8];
/// Frame `number` of all is frame `number % A_SAMPLE` of sample `number / A_SAMPLE`.
pub(super) const A_SAMPLE: u32 = FRAMES[1] as u32;

/// The way of a sample's shape: a colour, a kind and a direction.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Shape {
    colour: usize,
    kind: usize,
    way: usize,
    /// How far it is beside its way, in shares of the side.
    aside: f64,
}

#[derive(Debug, Clone, PartialEq)]
struct Scene {
    /// The sentence is about the first.
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

/// The number of shapes in a sample.
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
    let said = SampleMetadata { content, source: "shapes".into(), frame_count: Some(scene.frames as u64) };
    (said, shown(&hashes, sample as u32 * A_SAMPLE, still_frames))
}

/// The pixels of a square frame, row by row.
pub(super) fn draw(seed: u64, number: u32, side: usize, out: &mut [u8]) {
    let (sample, frame) = (u64::from(number / A_SAMPLE), (number % A_SAMPLE) as usize);
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
        // The middle of what is below the bar.
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

    fn answer(said: &SampleMetadata) -> &str {
        match &said.content {
            Content::Answer { assistant, .. } => assistant,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn samples_are_the_same_every_time() {
        for number in 0..64 {
            assert_eq!(sample(3, number, 4), sample(3, number, 4));
            let (said, shown) = sample(3, number, 4);
            let frames = said.frame_count.unwrap();
            match number % 8 {
                6 => assert!(
                    frames == 1 && shown.len() == 4 && shown.iter().all(|s| s.image == shown[0].image)
                ),
                7 => assert!(frames == 0 && shown.is_empty()),
                _ => assert!((4..=8).contains(&frames) && shown.len() as u64 == frames),
            }
        }
        assert_ne!(sample(3, 0, 4), sample(4, 0, 4));
    }

    /// Whoever knows the colour of the bar and no more is right about kind and way an eighth of the time.
    #[test]
    fn answers_need_the_frames() {
        let mut answers: HashMap<&str, HashMap<String, usize>> = HashMap::new();
        for number in (0..4000).filter(|number| number % 8 < 6) {
            let (said, _) = sample(1, number, 4);
            let answer = answer(&said).to_string();
            let colour = COLOURS.iter().find(|(colour, _)| answer.contains(colour)).unwrap().0;
            *answers.entry(colour).or_default().entry(answer).or_default() += 1;
        }
        for (colour, counts) in &answers {
            let (all, most) = (counts.values().sum::<usize>(), *counts.values().max().unwrap());
            assert!(counts.len() == 8 && most * 5 < all, "{colour}: {counts:?}");
        }
    }

    /// In the pixels: the bar of the first frame has the colour of the shape whose middle moves as the sentence says.
    #[test]
    fn pixels_show_what_the_sentence_says() {
        const SIDE: usize = 48;
        for number in (0..200).filter(|number| number % 8 < 6) {
            let (said, frames) = sample(5, number, 4);
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
            assert!(answer(&said).contains(way), "{number}: {said:?} moved by {dx} {dy}");
            assert_ne!(draw(1)[..3], bar, "the bar is in the first frame alone");
        }
    }
}
