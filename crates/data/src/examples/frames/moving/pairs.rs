//! Pairs of answers about a still image of the generated set: its first frame, whose bar has the colour of one shape.
//!
//! Both answers name the same kind and the same two colours, so they are equally long; the chosen one has the colours the right
//! way round. Every answer is chosen as often as it is rejected, and all pairs have the same question, so a model that does not
//! see the image is right half of the time.

use super::{COLOURS, FRAMES_PER_SAMPLE, KINDS, Scene};
use crate::examples::Sighting;
use crate::examples::frames::sample::{Content, SampleMetadata};
use crate::examples::frames::shard::frame_rows;
use crate::examples::synthetic::Draw;
use crate::random::{Uniform, key};

const QUESTION: &str = "What is this?";

/// The question of a sample with its two answers, and the still image as frames.
pub(in crate::examples::frames) fn pair(
    seed: u64,
    sample: u64,
    still_frames: usize,
) -> (SampleMetadata, Vec<Sighting>) {
    let shape = Scene::drawn(seed, sample).shapes[0];
    let mut draw = Draw(Uniform::new(key(key(seed, 0x7061_6972), sample)));
    let other = (shape.colour + 1 + draw.below(COLOURS.len() - 1)) % COLOURS.len();
    let answer = |is: usize, is_not: usize| {
        format!("A {} {}, not a {} one.", COLOURS[is].0, KINDS[shape.kind], COLOURS[is_not].0)
    };
    let answers = [answer(shape.colour, other), answer(other, shape.colour)];
    let content = Content::Pair { user: QUESTION.into(), answers };
    let metadata = SampleMetadata { content, source: "shapes".into(), frame_count: Some(1) };
    (metadata, frame_rows(&[key(key(seed, sample), 0)], sample as u32 * FRAMES_PER_SAMPLE, still_frames))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::draw;
    use super::*;

    fn answers(seed: u64, sample: u64) -> [String; 2] {
        match pair(seed, sample, 4).0.content {
            Content::Pair { user, answers } if user == QUESTION => answers,
            other => panic!("{other:?}"),
        }
    }

    /// The text alone tells nothing: answers are equally long, and each is chosen as often as it is rejected.
    #[test]
    fn a_guess_without_the_image_is_right_half_of_the_time() {
        let mut chosen: HashMap<String, i64> = HashMap::new();
        const PAIRS: u64 = 8000;
        for sample in 0..PAIRS {
            let [right, wrong] = answers(1, sample);
            assert!(right.len() == wrong.len() && right != wrong, "{right} {wrong}");
            *chosen.entry(right).or_default() += 1;
            *chosen.entry(wrong).or_default() -= 1;
        }
        assert_eq!(chosen.len(), 24, "two kinds, and two of four colours in order");
        // Standard deviation 26 for about 670 draws.
        assert!(chosen.values().all(|lead| lead.abs() < 130), "{chosen:?}");
    }

    #[test]
    fn the_bar_has_the_colour_of_the_chosen_answer() {
        const SIDE: usize = 24;
        for sample in 0..100 {
            let (_, frames) = pair(3, sample, 4);
            assert!(frames.len() == 4 && frames.iter().all(|frame| frame.image == frames[0].image));
            let mut pixels = vec![0; SIDE * SIDE * 3];
            draw(3, frames[0].image, SIDE, &mut pixels);
            let bar = COLOURS.iter().find(|(_, colour)| pixels[..3] == *colour).expect("a colour").0;
            let [right, wrong] = answers(3, sample);
            assert!(right.starts_with(&format!("A {bar} ")) && !wrong.starts_with(&format!("A {bar} ")));
        }
    }
}
