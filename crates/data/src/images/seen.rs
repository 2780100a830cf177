//! An image as a view sees it, whatever it is stored as.

use super::decode::{Jpeg, decode};
use super::flaw::Flaw;
use super::resample::{Region, Scaling, resample, resample_planes};
use super::stored::{Picture, Stored};
use super::view::{Augment, Crop, View};

/// Fills `out` with what a view sees of an image; `key` decides what is left to chance. `pixels` is worked in.
pub(crate) fn seen(
    stored: Stored<'_>,
    view: &View,
    key: u64,
    max_pixels: u64,
    pixels: &mut Vec<u8>,
    out: &mut [u8],
) -> Result<(), Flaw> {
    cut(stored, view, key, max_pixels, pixels, out)?;
    view.changes().apply(key, view.filter, view.width, out, pixels);
    Ok(())
}

/// The part that a view sees, at its size.
fn cut(
    stored: Stored<'_>,
    view: &View,
    key: u64,
    max_pixels: u64,
    pixels: &mut Vec<u8>,
    out: &mut [u8],
) -> Result<(), Flaw> {
    let (filter, size) = (view.filter, (view.width, view.height));
    let is_whole = matches!(view.augment, Augment::Resized(_));
    let picture = match stored {
        Stored::Pixels(picture) => picture,
        Stored::Encoded(bytes) => {
            // A picture that is scaled as a whole is decoded as a whole, at its own scale.
            if !is_whole && let Some(jpeg) = Jpeg::of(bytes, max_pixels)? {
                let crop = view.crop(jpeg.width, jpeg.height, key);
                resample_planes(&jpeg.planes(crop, view.width, view.height)?, filter, size, out);
                return Ok(());
            }
            let (width, height) = decode(bytes, max_pixels, pixels)?;
            Picture { width, height, rgb: pixels }
        }
    };
    let region = match view.augment {
        Augment::Resized(to) => view.left_of(picture.width, picture.height, to),
        _ => part(view.crop(picture.width, picture.height, key)),
    };
    resample(picture, region, Scaling { filter, whole: is_whole }, size, out);
    Ok(())
}

fn part(crop: Crop) -> Region {
    let [left, top, width, height] = [crop.left, crop.top, crop.width, crop.height].map(|side| side as f64);
    Region { left, top, width, height, is_flipped: crop.is_flipped }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::augment::Changes;
    use crate::images::filter::Filter;

    fn picture(name: &str) -> Vec<u8> {
        std::fs::read(format!("{}/tests/pictures/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    }

    /// A view of which only the needed part is decoded, against the same part of the whole picture: the largest
    /// difference of a byte and the mean one.
    fn difference(name: &str, view: &View, key: u64) -> (u8, f64) {
        let bytes = picture(name);
        let mut out = [vec![0; view.width * view.height * 3], vec![0; view.width * view.height * 3]];
        let (mut whole, mut spare) = (Vec::new(), Vec::new());
        let (width, height) = decode(&bytes, 1 << 20, &mut whole).unwrap();
        assert!(Jpeg::of(&bytes, 1 << 20).unwrap().is_some(), "{name} is decoded in part");
        seen(Stored::Encoded(&bytes), view, key, 1 << 20, &mut spare, &mut out[0]).unwrap();
        let picture = Picture { width, height, rgb: &whole };
        seen(Stored::Pixels(picture), view, key, 1 << 20, &mut spare, &mut out[1]).unwrap();
        let differences = out[0].iter().zip(&out[1]).map(|(one, other)| one.abs_diff(*other));
        let sum: f64 = differences.clone().map(f64::from).sum();
        (differences.max().unwrap(), sum / out[0].len() as f64)
    }

    /// Where colours are as fine as luminance only what is out of range in between makes a difference. Coarser colours
    /// are interpolated once instead of twice, so the edge of a disc of pure blue, which these pictures have, is sharper.
    fn bounds(name: &str) -> (u8, f64) {
        if ["444.jpg", "grey.jpg"].contains(&name) { (20, 1.6) } else { (90, 5.0) }
    }

    #[test]
    fn parts_decoded_by_themselves_are_those_of_the_whole() {
        let changes = Changes::NONE;
        let augment = Augment::Train { scale: (0.1, 1.0), ratio: (0.75, 4.0 / 3.0), flip: 0.5, changes };
        for name in ["420.jpg", "422.jpg", "444.jpg", "grey.jpg", "progressive.jpg"] {
            // Larger than the part, about as large, and smaller.
            for (width, height) in [(61, 50), (20, 20), (12, 9)] {
                for key in 0..40 {
                    let (most, mean) =
                        difference(name, &View { width, height, augment, filter: Filter::Bilinear }, key);
                    let bounds = bounds(name);
                    assert!(
                        most <= bounds.0 && mean < bounds.1,
                        "{name} {width} x {height}: {most}, mean {mean}"
                    );
                }
            }
        }
    }

    #[test]
    fn reduced_scales_see_the_same() {
        let augment = Augment::Centre { share: 1.0 };
        for name in ["420.jpg", "422.jpg", "444.jpg", "grey.jpg", "progressive.jpg"] {
            for (width, height) in [(11, 7), (5, 3), (2, 2)] {
                let (most, mean) =
                    difference(name, &View { width, height, augment, filter: Filter::Bilinear }, 1);
                let bounds = (20, 8.0);
                assert!(
                    most <= bounds.0 && mean < bounds.1,
                    "{name} {width} x {height}: {most}, mean {mean}"
                );
            }
        }
    }

    #[test]
    fn other_kinds_are_decoded_whole() {
        for name in ["cmyk.jpg", "turned6.jpg", "rgb.png"] {
            assert!(Jpeg::of(&picture(name), 1 << 20).unwrap().is_none(), "{name}");
        }
    }

    /// The same coefficients in another order are the same bytes.
    #[test]
    fn progressive_ones_are_those_of_one_scan() {
        let [one, many] = ["420.jpg", "progressive.jpg"].map(|name| {
            let mut pixels = Vec::new();
            decode(&picture(name), 1 << 20, &mut pixels).unwrap();
            pixels
        });
        assert!(one == many && !one.is_empty());
    }
}
