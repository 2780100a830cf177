//! The inputs of a tower for frames, derived from the image of every frame.

use std::collections::BTreeMap;

/// The number of frames that a plan has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FrameRoom {
    /// Distinct images.
    pub images: usize,
    pub frames: usize,
    /// Samples that have frames.
    pub videos: usize,
}

/// The frames of a sample, which are the first rows of its part of the text.
#[derive(Debug, Clone, Copy)]
pub struct Video<'a> {
    /// The row of the text of its first frame.
    pub row: usize,
    /// The number of each frame's image.
    pub images: &'a [u32],
}

/// The look whose token stands for a frame in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookRead {
    /// The first (coarse) look, which is the same for all frames of an image.
    Coarse,
    /// The second (fine) look, with a query of the frame's own.
    Fine,
}

/// The layout of frames. Coarse looks have one row per image. The text model reads them by sample; fine looks are grouped by
/// image, so that those of the same image are contiguous.
#[derive(Debug, Clone, PartialEq)]
pub struct FrameInputs {
    /// The images to encode, by number, each once, in the order of their rows.
    pub images: Vec<u32>,
    /// The image row of every frame, by sample; -1 for no frame.
    pub frame_images: Vec<i32>,
    /// The position of every frame in its sample, by sample.
    pub frame_positions: Vec<i32>,
    /// Start and number of the frames of every sample.
    pub video_start: Vec<i32>,
    pub video_len: Vec<i32>,
    /// Start and number of the fine looks at every image.
    pub look_start: Vec<i32>,
    pub look_len: Vec<i32>,
    /// For each fine look, the index by sample of the previous frame, from which its query is computed. The number of frames
    /// there is room for means the query of a first frame; -1 means no look.
    pub previous: Vec<i32>,
    /// The look of every row of the text, or -1.
    pub seen: Vec<i32>,
}

impl FrameInputs {
    /// Lays out samples for a plan whose text has `rows` rows. Panics where they do not fit.
    pub fn new(videos: &[Video<'_>], room: FrameRoom, rows: usize, read: LookRead) -> FrameInputs {
        let videos: Vec<&Video<'_>> = videos.iter().filter(|video| !video.images.is_empty()).collect();
        let mut made = FrameInputs {
            images: vec![],
            frame_images: vec![-1; room.frames],
            frame_positions: vec![0; room.frames],
            video_start: vec![0; room.videos],
            video_len: vec![0; room.videos],
            look_start: vec![0; room.images],
            look_len: vec![0; room.images],
            previous: vec![-1; room.frames],
            seen: vec![-1; rows],
        };
        // By image: index of the frame by sample, its position in its sample, and its row of the text.
        let mut looks: Vec<Vec<(usize, usize, usize)>> = vec![];
        let mut rows_of_images: BTreeMap<u32, usize> = BTreeMap::new();
        let mut frame = 0;
        for (number, video) in videos.into_iter().enumerate() {
            (made.video_start[number], made.video_len[number]) = (frame as i32, video.images.len() as i32);
            for (place, image) in video.images.iter().enumerate() {
                let image = *rows_of_images.entry(*image).or_insert_with(|| {
                    made.images.push(*image);
                    looks.push(vec![]);
                    looks.len() - 1
                });
                made.frame_images[frame] = image as i32;
                made.frame_positions[frame] = place as i32;
                looks[image].push((frame, place, video.row + place));
                frame += 1;
            }
        }
        let mut look = 0;
        for (image, looks) in looks.into_iter().enumerate() {
            (made.look_start[image], made.look_len[image]) = (look as i32, looks.len() as i32);
            for (frame, place, row) in looks {
                made.previous[look] = if place == 0 { room.frames as i32 } else { frame as i32 - 1 };
                made.seen[row] = match read {
                    LookRead::Coarse => image as i32,
                    LookRead::Fine => look as i32,
                };
                look += 1;
            }
        }
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two frames, a still image as three, a sample without frames, and one with the frames of the first in reverse order.
    #[test]
    fn looks_are_ordered_by_image_and_frames_by_sample() {
        let videos = [
            Video { row: 1, images: &[7, 4] },
            Video { row: 5, images: &[9, 9, 9] },
            Video { row: 8, images: &[] },
            Video { row: 10, images: &[4, 7] },
        ];
        let room = FrameRoom { images: 4, frames: 8, videos: 4 };
        let made = FrameInputs::new(&videos, room, 13, LookRead::Fine);
        assert_eq!(made.images, [7, 4, 9], "each once");
        assert_eq!(made.frame_images, [0, 1, 2, 2, 2, 1, 0, -1]);
        assert_eq!(made.frame_positions, [0, 1, 0, 1, 2, 0, 1, 0]);
        assert_eq!((&made.video_start[..], &made.video_len[..]), (&[0, 2, 5, 0][..], &[2, 3, 2, 0][..]));
        assert_eq!((&made.look_start[..], &made.look_len[..]), (&[0, 2, 4, 0][..], &[2, 2, 3, 0][..]));
        // Image 7: the first sample's first frame and the last sample's second. Image 4: the first's second, the last's first.
        assert_eq!(made.previous, [8, 5, 0, 8, 8, 2, 3, -1]);
        assert_eq!(made.seen, [-1, 0, 2, -1, -1, 4, 5, 6, -1, -1, 3, 1, -1]);
        let coarse = FrameInputs::new(&videos, room, 13, LookRead::Coarse);
        assert_eq!(coarse.seen, [-1, 0, 1, -1, -1, 2, 2, 2, -1, -1, 1, 0, -1]);
        assert_eq!(coarse.images, made.images);
    }

    #[test]
    fn without_frames_there_are_no_looks() {
        let room = FrameRoom { images: 1, frames: 1, videos: 1 };
        let made = FrameInputs::new(&[], room, 3, LookRead::Fine);
        assert!(made.images.is_empty());
        assert_eq!((made.look_len, made.video_len), (vec![0], vec![0]));
        assert_eq!((made.previous, made.frame_images), (vec![-1], vec![-1]));
        assert_eq!(made.seen, [-1; 3]);
    }
}
