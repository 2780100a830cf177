//! Random erasing: replaces a rectangle of an image by one colour or by noise.

use flatout_settings::choice;

use super::normal;
use crate::images::CHANNELS;
use crate::random::Uniform;

choice! {
    /// The content of an erased rectangle.
    pub enum ErasedWith {
        /// The mean of the normalisation, which a model sees as 0.
        Mean = "mean",
        /// One normally distributed colour around that mean.
        Colour = "colour",
        /// A normally distributed colour around that mean for every pixel.
        Noise = "noise",
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Erasing {
    pub probability: f64,
    /// Least and largest share of the image's area.
    pub area: (f64, f64),
    /// Least and largest ratio of height to width; the logarithm is uniform.
    pub ratio: (f64, f64),
    pub with: ErasedWith,
    /// Mean and standard deviation of every channel, for values from 0 to 1.
    pub mean: [f64; CHANNELS],
    pub deviation: [f64; CHANNELS],
}

/// The erased rectangle, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rectangle {
    pub left: usize,
    pub top: usize,
    pub width: usize,
    pub height: usize,
}

/// Number of attempts to draw a rectangle that fits.
const TRIES: usize = 10;

impl Erasing {
    pub(super) fn apply(&self, pixels: &mut [u8], width: usize, drawn: u64) {
        let mut uniform = Uniform::new(drawn);
        if uniform.draw() >= self.probability {
            return;
        }
        let height = pixels.len() / (width * CHANNELS);
        let Some(rectangle) = self.rectangle(width, height, &mut || uniform.draw()) else { return };
        let mut colour = self.colour(&mut uniform);
        for row in pixels.chunks_exact_mut(width * CHANNELS).skip(rectangle.top).take(rectangle.height) {
            let row = &mut row[rectangle.left * CHANNELS..][..rectangle.width * CHANNELS];
            for pixel in row.chunks_exact_mut(CHANNELS) {
                pixel.copy_from_slice(&colour);
                if self.with == ErasedWith::Noise {
                    colour = self.colour(&mut uniform);
                }
            }
        }
    }

    /// Draws a rectangle; `None` where no attempt fits into the image.
    pub(super) fn rectangle(
        &self,
        width: usize,
        height: usize,
        draw: &mut dyn FnMut() -> f64,
    ) -> Option<Rectangle> {
        let between = |(low, high): (f64, f64), draw: f64| low + (high - low) * draw;
        for _ in 0..TRIES {
            let area = between(self.area, draw()) * (width * height) as f64;
            let ratio = between((self.ratio.0.ln(), self.ratio.1.ln()), draw()).exp();
            let sides = [area * ratio, area / ratio].map(|square| square.sqrt().round_ties_even() as usize);
            let [rows, columns] = sides;
            if rows < height && columns < width {
                let top = ((height - rows + 1) as f64 * draw()) as usize;
                let left = ((width - columns + 1) as f64 * draw()) as usize;
                return Some(Rectangle { left, top, width: columns, height: rows });
            }
        }
        None
    }

    /// The next colour. Values outside the range of a byte are clipped.
    fn colour(&self, uniform: &mut Uniform) -> [u8; CHANNELS] {
        std::array::from_fn(|channel| {
            let by = match self.with {
                ErasedWith::Mean => 0.0,
                ErasedWith::Colour | ErasedWith::Noise => normal(uniform) * self.deviation[channel],
            };
            (255.0 * (self.mean[channel] + by)).round() as u8
        })
    }
}
