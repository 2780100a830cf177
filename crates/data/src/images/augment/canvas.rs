//! The pixel buffer that operations of RandAugment work on.

use crate::images::CHANNELS;
use crate::images::filter::Filter;

pub(super) struct Canvas<'a> {
    pub width: usize,
    /// Rows from the top, three bytes (red, green, blue) per pixel.
    pub pixels: &'a mut [u8],
    /// Scratch memory for operations that read more than the pixel they write.
    pub spare: &'a mut Vec<u8>,
    pub filter: Filter,
    /// Colour of pixels outside the image.
    pub fill: [u8; CHANNELS],
}

impl Canvas<'_> {
    pub fn height(&self) -> usize {
        self.pixels.len() / (self.width * CHANNELS)
    }

    /// Replaces every byte by its entry in a table.
    pub fn map(&mut self, table: impl Fn(u8) -> u8) {
        let table: [u8; 256] = std::array::from_fn(|byte| table(byte as u8));
        self.pixels.iter_mut().for_each(|byte| *byte = table[usize::from(*byte)]);
    }

    /// Replaces every byte of a channel by its entry in the channel's table.
    pub fn map_channels(&mut self, tables: [[u8; 256]; CHANNELS]) {
        for pixel in self.pixels.chunks_exact_mut(CHANNELS) {
            pixel.iter_mut().zip(&tables).for_each(|(byte, table)| *byte = table[usize::from(*byte)]);
        }
    }

    /// The histogram of every channel.
    pub fn histograms(&self) -> [[usize; 256]; CHANNELS] {
        let mut counts = [[0; 256]; CHANNELS];
        for pixel in self.pixels.chunks_exact(CHANNELS) {
            pixel.iter().zip(&mut counts).for_each(|(byte, counts)| counts[usize::from(*byte)] += 1);
        }
        counts
    }
}
