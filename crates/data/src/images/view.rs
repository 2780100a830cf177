//! The crop of an image, and its size.

use super::augment::Changes;
use super::filter::Filter;
use super::resample::Region;
use crate::random::Uniform;

/// Determines the pixels of an image: equal views, seeds and samples give equal bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct View {
    pub height: usize,
    pub width: usize,
    pub augment: Augment,
    /// The filter for resizing.
    pub filter: Filter,
}

/// The choice of the crop of an image, which is resized to the view without keeping its aspect ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Augment {
    /// A centre crop: of the largest part with the view's aspect ratio, this share of both sides. 0.875 corresponds to resizing
    /// the shorter side to 256 and cropping 224; with 1 only the aspect ratio is enforced.
    Centre { share: f64 },
    /// A centre crop as image processors of published models do it: the whole image is resized, and the view is cropped from
    /// the result at whole pixels.
    Resized(Scaled),
    /// A random crop for every sample: its area is uniform in `scale` (shares of the whole), the logarithm of its aspect ratio
    /// uniform in `ratio`, its position uniform. It is mirrored with probability `flip`, and then changed.
    Train { scale: (f64, f64), ratio: (f64, f64), flip: f64, changes: Changes },
}

/// The size that an image is resized to before the centre crop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scaled {
    /// The shorter side has this many pixels, and the other keeps the aspect ratio, rounded down.
    Shorter(usize),
    /// Both sides are given, whatever the aspect ratio was.
    Both { height: usize, width: usize },
}

/// A part of an image in whole pixels, not empty and inside the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Crop {
    pub left: usize,
    pub top: usize,
    pub width: usize,
    pub height: usize,
    pub is_flipped: bool,
}

/// Number of attempts to draw a crop that fits.
const TRIES: usize = 10;

impl View {
    /// The crop of an image of this size for the sample with this `key`.
    pub(crate) fn crop(&self, width: usize, height: usize, key: u64) -> Crop {
        match self.augment {
            Augment::Centre { share } => self.centre(width, height, share),
            Augment::Resized(to) => {
                let part = self.resized_region(width, height, to);
                middle(width, height, part.width, part.height)
            }
            Augment::Train { scale, ratio, flip, .. } => {
                let mut uniform = Uniform::new(key);
                let is_flipped = uniform.draw() < flip;
                let part = drawn(width, height, scale, ratio, &mut uniform);
                Crop { is_flipped, ..part.unwrap_or_else(|| widest(width, height, ratio)) }
            }
        }
    }

    /// The changes that are made after resizing.
    pub(super) fn changes(&self) -> Changes {
        match self.augment {
            Augment::Train { changes, .. } => changes,
            Augment::Centre { .. } | Augment::Resized(_) => Changes::NONE,
        }
    }

    /// The crop of an image that is resized as a whole, in pixels of the original image.
    pub(super) fn resized_region(&self, width: usize, height: usize, to: Scaled) -> Region {
        let (w, h) = match to {
            Scaled::Both { height, width } => (width, height),
            Scaled::Shorter(side) if width <= height => (side, side * height / width),
            Scaled::Shorter(side) => (side * width / height, side),
        };
        let across = width as f64 / w as f64;
        let down = height as f64 / h as f64;
        let before = |side: usize, seen: usize| (side.saturating_sub(seen) / 2) as f64;
        Region {
            left: before(w, self.width) * across,
            top: before(h, self.height) * down,
            width: self.width as f64 * across,
            height: self.height as f64 * down,
            is_flipped: false,
        }
    }

    fn centre(&self, width: usize, height: usize, share: f64) -> Crop {
        let ratio = self.width as f64 / self.height as f64;
        let (w, h) = (width as f64, height as f64);
        let (w, h) = if w > h * ratio { (h * ratio, h) } else { (w, w / ratio) };
        middle(width, height, w * share, h * share)
    }
}

/// A random crop; `None` where no attempt fits into the image.
fn drawn(
    width: usize,
    height: usize,
    scale: (f64, f64),
    ratio: (f64, f64),
    uniform: &mut Uniform,
) -> Option<Crop> {
    let area = width as f64 * height as f64;
    let between = |(low, high): (f64, f64), draw: f64| low + (high - low) * draw;
    for _ in 0..TRIES {
        let target = area * between(scale, uniform.draw());
        let aspect = between((ratio.0.ln(), ratio.1.ln()), uniform.draw()).exp();
        let (w, h) = ((target * aspect).sqrt().round(), (target / aspect).sqrt().round());
        if (1.0..=width as f64).contains(&w) && (1.0..=height as f64).contains(&h) {
            let (w, h) = (w as usize, h as usize);
            let place = |free: usize, draw: f64| (((free + 1) as f64 * draw) as usize).min(free);
            let left = place(width - w, uniform.draw());
            let top = place(height - h, uniform.draw());
            return Some(Crop { left, top, width: w, height: h, is_flipped: false });
        }
    }
    None
}

/// The largest centred crop with an allowed aspect ratio.
fn widest(width: usize, height: usize, ratio: (f64, f64)) -> Crop {
    let (w, h) = (width as f64, height as f64);
    let own = w / h;
    let (w, h) = if own < ratio.0 {
        (w, w / ratio.0)
    } else if own > ratio.1 {
        (h * ratio.1, h)
    } else {
        (w, h)
    };
    middle(width, height, w, h)
}

fn middle(width: usize, height: usize, w: f64, h: f64) -> Crop {
    let fitted = |wanted: f64, side: usize| (wanted.round() as usize).clamp(1, side);
    let (w, h) = (fitted(w, width), fitted(h, height));
    Crop { left: (width - w) / 2, top: (height - h) / 2, width: w, height: h, is_flipped: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRAIN: Augment =
        Augment::Train { scale: (0.08, 1.0), ratio: (0.75, 4.0 / 3.0), flip: 0.5, changes: Changes::NONE };

    fn view(width: usize, height: usize, augment: Augment) -> View {
        View { width, height, augment, filter: Filter::Bilinear }
    }

    #[test]
    fn a_crop_of_a_resized_image_aligns_with_its_pixels() {
        let region = |view: View, width, height, to| {
            let part = view.resized_region(width, height, to);
            [part.left, part.top, part.width, part.height]
        };
        let square = view(224, 224, Augment::Centre { share: 1.0 });
        // 341 x 256, with 58 columns cut off before the centre and 59 after it.
        let scale = 500.0 / 341.0;
        let wanted = [58.0 * scale, 16.0 * 375.0 / 256.0, 224.0 * scale, 224.0 * 375.0 / 256.0];
        assert_eq!(region(square, 500, 375, Scaled::Shorter(256)), wanted);
        assert_eq!(region(square, 50, 70, Scaled::Both { height: 224, width: 224 }), [0.0, 0.0, 50.0, 70.0]);
    }

    #[test]
    fn the_centre_crop_matches_resizing_and_cropping() {
        let square = |share| view(224, 224, Augment::Centre { share });
        let crop = |left, top, width, height| Crop { left, top, width, height, is_flipped: false };
        assert_eq!(square(1.0).crop(32, 32, 7), crop(0, 0, 32, 32));
        assert_eq!(square(1.0).crop(500, 375, 7), crop(62, 0, 375, 375));
        assert_eq!(square(0.875).crop(256, 512, 7), crop(16, 144, 224, 224));
        assert_eq!(view(64, 32, Augment::Centre { share: 1.0 }).crop(100, 100, 7), crop(0, 25, 100, 50));
        assert_eq!(square(0.5).crop(1, 90, 7), crop(0, 44, 1, 1));
    }

    #[test]
    fn drawn_parts_lie_inside_and_have_the_drawn_shares() {
        let (mut area, mut flips, mut left) = (0.0, 0, 0.0);
        for key in 0..4000 {
            let crop = view(224, 224, TRAIN).crop(400, 300, key);
            assert!(crop.left + crop.width <= 400 && crop.top + crop.height <= 300);
            let ratio = crop.width as f64 / crop.height as f64;
            assert!((0.74..1.35).contains(&ratio), "{crop:?}");
            let share = (crop.width * crop.height) as f64 / 120_000.0;
            assert!((0.078..1.0).contains(&share), "{crop:?}");
            area += share;
            flips += usize::from(crop.is_flipped);
            left += if crop.width < 400 { crop.left as f64 / (400 - crop.width) as f64 } else { 0.5 };
        }
        // Large areas of some ratios do not fit and are drawn again, so the mean is below the middle of the range.
        assert!((0.41..0.46).contains(&(area / 4000.0)), "{area}");
        assert!((1850..2150).contains(&flips) && (0.48..0.52).contains(&(left / 4000.0)), "{flips} {left}");
    }

    #[test]
    fn images_of_any_shape_have_a_part() {
        for (width, height) in [(1, 1), (1, 5000), (5000, 1), (2, 3), (65535, 7)] {
            for key in 0..50 {
                let crop = view(8, 8, TRAIN).crop(width, height, key);
                assert!(crop.width >= 1 && crop.height >= 1);
                assert!(crop.left + crop.width <= width && crop.top + crop.height <= height, "{crop:?}");
            }
        }
    }

    #[test]
    fn a_key_has_one_part() {
        let of = |key| view(8, 8, TRAIN).crop(77, 55, key);
        assert_eq!(of(5), of(5));
        assert!((0..20).any(|key| of(key) != of(5)));
    }
}
