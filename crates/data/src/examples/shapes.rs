//! Generated sets of questions about images of a shape: its colour, its kind, its position, and the number of dots beside it.
//! Each question comes with its answer, with a right and a wrong one, or with one to be judged.
//!
//! Every question has four answers, all equally likely whatever the question says, so only the image tells which is right: a
//! model that does not see it is right a quarter of the time.

use super::synthetic::{Draw, place};
use crate::formats::{Field, Fields, Record};
use crate::random::{Uniform, key};

/// Side of an image in pixels.
const SIDE: usize = 32;
/// The image has four squares, each of which holds the shape, a dot or nothing.
const QUARTER: usize = SIDE / 2;

const COLOURS: [(&str, [u8; 3]); 4] =
    [("red", [220, 40, 40]), ("green", [40, 190, 60]), ("blue", [50, 80, 230]), ("yellow", [230, 210, 40])];
const KINDS: [&str; 4] = ["circle", "square", "triangle", "cross"];
const PLACES: [&str; 4] = ["top left", "top right", "bottom left", "bottom right"];
const COUNTS: [&str; 4] = ["none", "one", "two", "three"];
const QUESTIONS: [&str; 4] =
    ["What colour is the shape?", "Which shape is it?", "Where is the shape?", "How many dots are there?"];

/// The content of an image: the numbers of its colour, kind, position and count.
struct Scene([usize; 4]);

impl Scene {
    fn drawn(draw: &mut Draw) -> Scene {
        Scene([0; 4].map(|_| draw.below(4)))
    }

    fn answer(&self, question: usize) -> &'static str {
        answers(question)[self.0[question]]
    }

    /// Its pixels, row by row: a dark background of some brightness, the shape slightly off the centre of its square, and dots
    /// in consecutive other squares, from a random one on.
    fn pixels(&self, draw: &mut Draw) -> Vec<u8> {
        let Scene([colour, kind, at, dots]) = *self;
        let ground = 10 + draw.below(40) as u8;
        let mut pixels = vec![ground; SIDE * SIDE * 3];
        let mut fill =
            |place: usize, colour: [u8; 3], [x, y]: [i32; 2], is_inside: &dyn Fn(i32, i32) -> bool| {
                let [left, top] = [place % 2 * QUARTER, place / 2 * QUARTER];
                for pixel in 0..QUARTER * QUARTER {
                    let [across, down] = [pixel % QUARTER, pixel / QUARTER];
                    if is_inside(across as i32 - x, down as i32 - y) {
                        let first = ((top + down) * SIDE + left + across) * 3;
                        pixels[first..first + 3].copy_from_slice(&colour);
                    }
                }
            };
        let mut middle = || [7 + draw.below(3) as i32, 7 + draw.below(3) as i32];
        let is_inside: &dyn Fn(i32, i32) -> bool = match kind {
            0 => &|x, y| x * x + y * y <= 30,
            1 => &|x, y| x.abs() <= 5 && y.abs() <= 5,
            2 => &|x, y| (-5..=5).contains(&y) && 2 * x.abs() <= y + 6,
            _ => &|x, y| x.abs().max(y.abs()) <= 5 && x.abs().min(y.abs()) <= 1,
        };
        fill(at, COLOURS[colour].1, middle(), is_inside);
        let others: Vec<usize> = (0..4).filter(|place| *place != at).collect();
        let middles: Vec<[i32; 2]> = (0..dots).map(|_| middle()).collect();
        let first = draw.below(others.len());
        for (dot, middle) in middles.into_iter().enumerate() {
            fill(others[(first + dot) % others.len()], [235; 3], middle, &|x, y| x * x + y * y <= 5);
        }
        pixels
    }
}

/// The possible answers to a question.
fn answers(question: usize) -> [&'static str; 4] {
    match question {
        0 => COLOURS.map(|(name, _)| name),
        1 => KINDS,
        2 => PLACES,
        _ => COUNTS,
    }
}

/// Row `row`: one of four questions about its image, which four rows share, and the answer.
pub(super) fn question(seed: u64, row: u64) -> Record {
    let (scene, asked, mut fields) = question_about(seed, row);
    fields.push(("answer".into(), scene.answer(asked).into()));
    Record { fields: Fields(fields), place: place(row) }
}

/// Row `row` of the preferences: the same question, the right answer, and a wrong one. Every answer is chosen as often as it is
/// rejected.
pub(super) fn preference(seed: u64, row: u64) -> Record {
    let (scene, asked, mut fields) = question_about(seed, row);
    fields.push(("chosen".into(), scene.answer(asked).into()));
    fields.push(("rejected".into(), wrong_answer(&scene, asked, seed, row).into()));
    Record { fields: Fields(fields), place: place(row) }
}

/// Row `row` of the judgements: the same question, and an answer that is wanted where it is right.
pub(super) fn judgement(seed: u64, row: u64) -> Record {
    let (scene, asked, mut fields) = question_about(seed, row);
    let is_wanted = Draw(Uniform::new(key(key(seed, 0x6a75_6467), row))).below(2) == 0;
    let answer = if is_wanted { scene.answer(asked) } else { wrong_answer(&scene, asked, seed, row) };
    fields.push(("answer".into(), answer.into()));
    fields.push(("label".into(), Field::Bool(is_wanted)));
    Record { fields: Fields(fields), place: place(row) }
}

/// The image of a row, the question about it, and the fields of both.
fn question_about(seed: u64, row: u64) -> (Scene, usize, Vec<(String, Field)>) {
    let (image, asked) = (row / QUESTIONS.len() as u64, (row % QUESTIONS.len() as u64) as usize);
    let mut draw = Draw(Uniform::new(key(key(seed, 0x7368_6170), image)));
    let scene = Scene::drawn(&mut draw);
    let fields = vec![
        ("image".into(), Field::Bytes(encoded(&scene.pixels(&mut draw)).into())),
        ("question".into(), QUESTIONS[asked].into()),
    ];
    (scene, asked, fields)
}

/// A wrong answer to a question.
fn wrong_answer(scene: &Scene, asked: usize, seed: u64, row: u64) -> &'static str {
    let mut draw = Draw(Uniform::new(key(key(seed, 0x7072_6566), row)));
    answers(asked)[(scene.0[asked] + 1 + draw.below(3)) % 4]
}

fn encoded(pixels: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, SIDE as u32, SIDE as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().expect("memory takes a header");
    writer.write_image_data(pixels).expect("memory takes pixels");
    writer.finish().expect("memory takes the end");
    bytes
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    fn rows(count: u64) -> Vec<(Field, String, String)> {
        let row = |row: u64| {
            let Record { fields, .. } = question(5, row);
            let text = |name| fields.get(name).and_then(Field::text).unwrap().to_string();
            (fields.get("image").unwrap().clone(), text("question"), text("answer"))
        };
        (0..count).map(row).collect()
    }

    #[test]
    fn rows_are_the_same_every_time_and_images_differ() {
        let made = rows(400);
        assert_eq!(made, rows(400));
        let images: HashSet<Vec<u8>> = made
            .iter()
            .map(|(image, ..)| match image {
                Field::Bytes(bytes) => bytes.to_vec(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert!((95..=100).contains(&images.len()), "{} images of 400 rows", images.len());
        assert_ne!(question(5, 0), question(6, 0));
    }

    /// A guess that uses the questions and answers but not the images is right a quarter of the time, and the image of another
    /// row does not help.
    #[test]
    fn answers_need_the_image() {
        let made = rows(2000);
        let mut answers: HashMap<&str, HashMap<&str, usize>> = HashMap::new();
        for (_, asked, answer) in &made {
            *answers.entry(asked).or_default().entry(answer).or_default() += 1;
        }
        assert_eq!(answers.len(), QUESTIONS.len());
        for (asked, counts) in &answers {
            let most = *counts.values().max().unwrap() as f64 / 500.0;
            assert!(counts.len() == 4 && most < 0.4, "{asked}: {counts:?}");
        }
        let shuffled = made.iter().zip(made.iter().cycle().skip(4 * 7));
        let right = shuffled.filter(|((_, _, answer), (_, _, other))| answer == other).count();
        assert!((right as f64 / 2000.0) < 0.4, "{right} of 2000 answers fit another image");
    }

    /// In pairs too, each answer is chosen about as often as it is rejected, so that no text tells which is right.
    #[test]
    fn preferences_need_the_image() {
        let mut lead: HashMap<(String, String), i64> = HashMap::new();
        for row in 0..4000 {
            let [asked, chosen, rejected] = ["question", "chosen", "rejected"]
                .map(|name| preference(5, row).fields.get(name).and_then(Field::text).unwrap().to_string());
            assert_ne!(chosen, rejected);
            *lead.entry((asked.clone(), chosen)).or_default() += 1;
            *lead.entry((asked, rejected)).or_default() -= 1;
        }
        // Each is drawn about 500 times; the standard deviation of its lead is about 22.
        assert!(lead.len() == 16 && lead.values().all(|lead| lead.abs() < 110), "{lead:?}");
        let right = (0..400).filter(|row| {
            let of = |record: Record, name| record.fields.get(name).cloned();
            let is_wanted = of(judgement(5, *row), "label") == Some(Field::Bool(true));
            let is_right = of(judgement(5, *row), "answer") == of(question(5, *row), "answer");
            assert_eq!(is_wanted, is_right);
            is_right
        });
        assert!((150..250).contains(&right.count()));
    }

    #[test]
    fn pixels_show_the_scene() {
        for number in 0..256 {
            let scene = Scene([number % 4, number / 4 % 4, number / 16 % 4, number / 64]);
            let pixels = scene.pixels(&mut Draw(Uniform::new(number as u64)));
            let of = |colour: [u8; 3]| pixels.chunks(3).filter(|pixel| **pixel == colour).count();
            let area = of(COLOURS[scene.0[0]].1);
            assert!((40..=121).contains(&area), "{:?}: {area} pixels", scene.0);
            assert_eq!(of([235; 3]), scene.0[3] * 21, "{:?}", scene.0);
            let corner = [scene.0[2] / 2, scene.0[2] % 2].map(|half| half * QUARTER + 8);
            let middle = (corner[0] * SIDE + corner[1]) * 3;
            assert_eq!(pixels[middle..middle + 3], COLOURS[scene.0[0]].1, "{:?}", scene.0);
        }
    }
}
