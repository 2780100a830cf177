//! Applies a view to an image in any stored form.

use super::decode::{Jpeg, decode};
use super::flaw::Flaw;
use super::resample::{Region, Scaling, resample, resample_planes};
use super::stored::{Picture, Stored};
use super::view::{Augment, Crop, View};

/// Fills `out` with the view of an image; `key` seeds random choices, and `pixels` is scratch memory.
pub(crate) fn apply_view(
    stored: Stored<'_>,
    view: &View,
    key: u64,
    max_pixels: u64,
    pixels: &mut Vec<u8>,
    out: &mut [u8],
) -> Result<(), Flaw> {
    crop_and_resize(stored, view, key, max_pixels, pixels, out)?;
    view.changes().apply(key, view.filter, view.width, out, pixels);
    Ok(())
}

/// Crops and resizes an image.
fn crop_and_resize(
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
            // An image that is scaled as a whole is decoded completely at full scale.
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
        Augment::Resized(to) => view.resized_region(picture.width, picture.height, to),
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

    /// Compares a partially decoded image with the same part of the completely decoded one: the largest and the mean difference
    /// of bytes.
    fn difference(name: &str, view: &View, key: u64) -> (u8, f64) {
        let bytes = picture(name);
        let mut out = [vec![0; view.width * view.height * 3], vec![0; view.width * view.height * 3]];
        let (mut whole, mut spare) = (Vec::new(), Vec::new());
        let (width, height) = decode(&bytes, 1 << 20, &mut whole).unwrap();
        assert!(Jpeg::of(&bytes, 1 << 20).unwrap().is_some(), "{name} is decoded in part");
        apply_view(Stored::Encoded(&bytes), view, key, 1 << 20, &mut spare, &mut out[0]).unwrap();
        let picture = Picture { width, height, rgb: &whole };
        apply_view(Stored::Pixels(picture), view, key, 1 << 20, &mut spare, &mut out[1]).unwrap();
        let differences = out[0].iter().zip(&out[1]).map(|(one, other)| one.abs_diff(*other));
        let sum: f64 = differences.clone().map(f64::from).sum();
        (differences.max().unwrap(), sum / out[0].len() as f64)
    }

    /// With full-resolution chroma, only clipping makes a difference. Subsampled chroma is interpolated once instead of twice,
    /// so the edge of a disc of pure blue in these images is sharper.
    fn bounds(name: &str) -> (u8, f64) {
        if ["444.jpg", "grey.jpg"].contains(&name) { (20, 1.6) } else { (90, 5.0) }
    }

    #[test]
    fn parts_decoded_by_themselves_are_those_of_the_whole() {
        let changes = Changes::NONE;
        let augment = Augment::Train { scale: (0.1, 1.0), ratio: (0.75, 4.0 / 3.0), flip: 0.5, changes };
        for name in ["420.jpg", "422.jpg", "444.jpg", "grey.jpg", "progressive.jpg"] {
            // Larger than the crop, about as large, and smaller.
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

    /// The same coefficients in another order give the same bytes.
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
