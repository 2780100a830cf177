//! Frames of videos and still images, by number: the places of their bytes, and their pixels at the model's image size.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rayon::prelude::*;

use crate::error::DataError;
use crate::examples::layout::MicroBatch;
use crate::formats::{OnError, Reason, SourceLocation, unreadable};
use crate::images::{Augment, CHANNELS, Filter, Flaw, Member, OpenArchive, Stored, View, apply_view};

/// The source of frames.
pub(crate) enum FrameBytes {
    /// Encoded members of archives.
    Archives { archives: Vec<OpenArchive>, members: Vec<Member> },
    /// Generated on demand: `draw` writes the frame of a number at this side length.
    Drawn { count: u32, draw: fn(u64, u32, usize, &mut [u8]), seed: u64 },
}

/// Numbered frames of a set.
pub struct FrameStore {
    bytes: FrameBytes,
    side: usize,
    /// Images with more pixels than this are not decoded.
    max_pixels: u64,
    on_error: OnError,
}

impl Default for FrameStore {
    fn default() -> Self {
        let bytes = FrameBytes::Archives { archives: vec![], members: vec![] };
        FrameStore { bytes, side: 0, max_pixels: 0, on_error: OnError::Fail }
    }
}

impl fmt::Debug for FrameStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} frames of {} pixels a side", self.count(), self.side)
    }
}

/// Limit on the size of an encoded frame: that of a raw image with the most pixels, plus room for headers.
fn most_bytes(max_pixels: u64) -> u64 {
    max_pixels.saturating_mul(CHANNELS as u64).saturating_add(1 << 16)
}

impl FrameStore {
    pub(crate) fn new(bytes: FrameBytes, side: usize, max_pixels: u64, on_error: OnError) -> FrameStore {
        FrameStore { bytes, side, max_pixels, on_error }
    }

    pub fn count(&self) -> usize {
        match &self.bytes {
            FrameBytes::Archives { members, .. } => members.len(),
            FrameBytes::Drawn { count, .. } => *count as usize,
        }
    }

    /// Height and width of a frame as plans take it.
    pub fn side(&self) -> usize {
        self.side
    }

    pub fn place(&self, number: u32) -> SourceLocation {
        match &self.bytes {
            FrameBytes::Archives { archives, members } => {
                let Member { archive, offset, .. } = members[number as usize];
                let file = archives[archive as usize].path.clone();
                SourceLocation { file, line: None, row: None, offset }
            }
            FrameBytes::Drawn { .. } => {
                let file = Arc::new(PathBuf::from("the synthetic set"));
                SourceLocation { file, line: None, row: Some(u64::from(number) + 1), offset: 0 }
            }
        }
    }

    /// The pixels of a frame, [side, side, 3]: resized by the shorter side and cropped at the centre, as in the evaluation of
    /// images. The inner error is a flaw of the frame; the outer one is an I/O error or a changed archive.
    pub fn pixels(&self, number: u32, out: &mut [u8]) -> Result<Result<(), Flaw>, DataError> {
        let (archives, members) = match &self.bytes {
            FrameBytes::Archives { archives, members } => (archives, members),
            FrameBytes::Drawn { draw, seed, .. } => {
                draw(*seed, number, self.side, out);
                return Ok(Ok(()));
            }
        };
        let Member { archive, offset, bytes } = members[number as usize];
        if bytes > most_bytes(self.max_pixels) {
            let said = format!("the frame has {bytes} bytes, more than one of data.max_pixels can have");
            return Ok(Err(Flaw::new(Reason::TooManyPixels, said)));
        }
        let archive = &archives[archive as usize];
        let mut encoded = vec![0; bytes as usize];
        archive.read(&mut encoded, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => DataError::input(format!(
                "{} is shorter than it was when it was opened: it must not change while it is read.",
                archive.path.display()
            )),
            _ => unreadable(&archive.path, &error),
        })?;
        let augment = Augment::Centre { share: 1.0 };
        let view = View { height: self.side, width: self.side, augment, filter: Filter::Bilinear };
        Ok(apply_view(Stored::Encoded(&encoded), &view, 0, self.max_pixels, &mut Vec::new(), out))
    }

    /// The pixels of the images that a micro-batch shows, each once, padded to the room there is. Where undecodable frames are
    /// allowed, such a frame is grey, and nothing is learned from its example.
    pub fn rows(&self, batch: &mut MicroBatch) -> Result<Vec<u8>, DataError> {
        let bytes = self.side * self.side * CHANNELS;
        let (videos, shown) = batch.videos();
        let mut out = vec![0; batch.image_room.images * bytes];
        let parts: Vec<(&u32, &mut [u8])> = shown.iter().zip(out.chunks_mut(bytes)).collect();
        let decoded = |(number, out): (&u32, &mut [u8])| {
            let flaw = self.pixels(*number, out)?.err();
            if flaw.is_some() {
                out.fill(128);
            }
            Ok(flaw)
        };
        let flaws: Vec<Option<Flaw>> =
            parts.into_par_iter().map(decoded).collect::<Result<_, DataError>>()?;
        for (image, flaw) in flaws.into_iter().enumerate().filter_map(|(image, flaw)| Some((image, flaw?))) {
            let place = self.place(shown[image]);
            if self.on_error == OnError::Fail {
                return Err(flaw.error(&place));
            }
            let shows = |video: &&crate::examples::layout::VideoRows| video.images.contains(&(image as u32));
            let row = videos.iter().find(shows).expect("an image is shown by a video").row;
            batch.leave_out(row, format!("{place}: {}", flaw.sentence()));
        }
        Ok(out)
    }
}
