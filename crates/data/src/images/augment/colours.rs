//! Colour operations of RandAugment, with Pillow's arithmetic (`ImageOps` and `ImageEnhance`).

use super::canvas::Canvas;
use crate::images::CHANNELS;

/// Stretches every channel so that its smallest byte becomes 0 and its largest 255.
pub(super) fn auto_contrast(canvas: &mut Canvas<'_>, _: f64) {
    let tables = canvas.histograms().map(|counts| {
        let least = counts.iter().position(|count| *count > 0).unwrap_or(0);
        let most = counts.iter().rposition(|count| *count > 0).unwrap_or(0);
        if most <= least {
            return std::array::from_fn(|byte| byte as u8);
        }
        let scale = 255.0 / (most - least) as f64;
        let offset = -(least as f64) * scale;
        // The conversion saturates and truncates.
        std::array::from_fn(|byte| (byte as f64 * scale + offset) as u8)
    });
    canvas.map_channels(tables);
}

/// Equalises the histogram of every channel.
pub(super) fn equalize(canvas: &mut Canvas<'_>, _: f64) {
    let tables = canvas.histograms().map(|counts| {
        let all: usize = counts.iter().sum();
        let last = counts.iter().rev().find(|count| **count > 0).copied().unwrap_or(0);
        let step = (all - last) / 255;
        if step == 0 {
            return std::array::from_fn(|byte| byte as u8);
        }
        let mut before = step / 2;
        counts.map(|count| {
            let byte = (before / step).min(255) as u8;
            before += count;
            byte
        })
    });
    canvas.map_channels(tables);
}

pub(super) fn invert(canvas: &mut Canvas<'_>, _: f64) {
    canvas.map(|byte| 255 - byte);
}

/// Keeps the upper `bits` of every byte.
pub(super) fn posterize(canvas: &mut Canvas<'_>, bits: f64) {
    let mask = !(0xff_u32 >> (bits as u32).min(8)) as u8;
    canvas.map(|byte| byte & mask);
}

/// Inverts bytes that are at least the threshold.
pub(super) fn solarize(canvas: &mut Canvas<'_>, threshold: f64) {
    canvas.map(|byte| if f64::from(byte) < threshold { byte } else { 255 - byte });
}

/// Adds to the bytes of the darker half.
pub(super) fn solarize_add(canvas: &mut Canvas<'_>, added: f64) {
    canvas.map(|byte| if byte < 128 { byte.saturating_add(added as u8) } else { byte });
}

/// Scales the distance of every pixel from its luminance.
pub(super) fn colour(canvas: &mut Canvas<'_>, factor: f64) {
    for pixel in canvas.pixels.chunks_exact_mut(CHANNELS) {
        let grey = grey(pixel);
        pixel.iter_mut().for_each(|byte| *byte = blend(grey, *byte, factor));
    }
}

/// Scales the distance of every byte from the mean luminance of the image.
pub(super) fn contrast(canvas: &mut Canvas<'_>, factor: f64) {
    let greys = canvas.pixels.chunks_exact(CHANNELS).map(|pixel| u64::from(grey(pixel)));
    let count = (canvas.pixels.len() / CHANNELS) as f64;
    let mean = (greys.sum::<u64>() as f64 / count + 0.5) as u8;
    canvas.map(|byte| blend(mean, byte, factor));
}

pub(super) fn brightness(canvas: &mut Canvas<'_>, factor: f64) {
    canvas.map(|byte| blend(0, byte, factor));
}

/// Scales the distance of every pixel from a smoothed image, in which the pixel itself has weight five. Border pixels stay.
pub(super) fn sharpness(canvas: &mut Canvas<'_>, factor: f64) {
    const OTHER: f32 = 1.0 / 13.0;
    const OWN: f32 = 5.0 / 13.0;
    let (row, height) = (canvas.width * CHANNELS, canvas.height());
    canvas.spare.clear();
    canvas.spare.extend_from_slice(canvas.pixels);
    for y in 1..height.max(1) - 1 {
        let rows: [&[u8]; 3] = std::array::from_fn(|at| &canvas.spare[(y + 1 - at) * row..][..row]);
        let out = &mut canvas.pixels[y * row..][..row];
        for at in CHANNELS..row.max(2 * CHANNELS) - CHANNELS {
            let three = |row: &[u8], own: f32| {
                let [left, middle, right] = [row[at - CHANNELS], row[at], row[at + CHANNELS]].map(f32::from);
                left * OTHER + middle * own + right * OTHER
            };
            let smooth = 0.5 + three(rows[0], OTHER) + three(rows[1], OWN) + three(rows[2], OTHER);
            out[at] = blend(smooth as u8, out[at], factor);
        }
    }
}

/// Luminance with the weights of ITU-R 601.
fn grey(pixel: &[u8]) -> u8 {
    let [red, green, blue] = [pixel[0], pixel[1], pixel[2]].map(u32::from);
    ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16) as u8
}

/// Interpolates between two bytes, or extrapolates beyond the second.
fn blend(from: u8, to: u8, factor: f64) -> u8 {
    // The conversion saturates and truncates.
    (f32::from(from) + factor as f32 * (f32::from(to) - f32::from(from))) as u8
}
