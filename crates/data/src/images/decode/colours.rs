//! Converts the planes of a JPEG to RGB at the full size of the image.
//!
//! Subsampled chroma is interpolated with the usual triangle filter: three parts of the nearest sample and one of the next, in
//! each direction. Then R = Y + 1.402 (Cr - 128), G = Y - 0.344136 (Cb - 128) - 0.714136 (Cr - 128), B = Y + 1.772 (Cb - 128),
//! in 16-bit fixed point with four fractional bits. Rows are processed one by one, in loops that vectorise.

use pulp::{Arch, Simd, WithSimd};

use super::baseline::Plane;
use crate::images::CHANNELS;

/// Pixels per vectorised step.
const RUN: usize = 32;

/// Fills `out`, with `width` pixels per row, from one plane or three, of which chroma may be subsampled.
pub(super) fn colours(planes: &[Plane], width: usize, out: &mut [u8]) {
    // Integer arithmetic throughout, so the result does not depend on the width of vectors.
    Arch::new().dispatch(Colours { planes, width, out });
}

struct Colours<'a> {
    planes: &'a [Plane],
    width: usize,
    out: &'a mut [u8],
}

impl WithSimd for Colours<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { planes, width, out } = self;
        match planes {
            [grey] => {
                for (y, line) in out.chunks_exact_mut(width * CHANNELS).enumerate() {
                    let pixels = line.chunks_exact_mut(CHANNELS).zip(row(grey, y));
                    pixels.for_each(|(pixel, grey)| pixel.fill(*grey));
                }
            }
            [light, blue, red] => three(light, [blue, red], width, out),
            _ => unreachable!("a JPEG of planes has one or three"),
        }
    }
}

#[inline(always)]
fn row(plane: &Plane, y: usize) -> &[u8] {
    &plane.bytes[y * plane.stride..][..plane.width]
}

#[inline(always)]
fn three(light: &Plane, colours: [&Plane; 2], width: usize, out: &mut [u8]) {
    // Whether chroma is subsampled horizontally and vertically.
    let [coarse] = [colours[0]].map(|colour| (colour.width < light.width, colour.height < light.height));
    let mut sums = vec![0u16; colours[0].width + 2];
    let mut fine = [(); 2].map(|()| vec![0u8; 2 * colours[0].width]);
    for (y, line) in out.chunks_exact_mut(width * CHANNELS).enumerate() {
        let light = row(light, y);
        if coarse == (false, false) {
            convert(light, row(colours[0], y), row(colours[1], y), line);
            continue;
        }
        for (colour, fine) in colours.iter().zip(&mut fine) {
            interpolated(colour, y, coarse, &mut sums, fine);
        }
        convert(light, &fine[0][..width], &fine[1][..width], line);
    }
}

/// Interpolates row `y` of a plane that is subsampled horizontally or vertically.
#[inline(always)]
fn interpolated(plane: &Plane, y: usize, (across, down): (bool, bool), sums: &mut [u16], fine: &mut [u8]) {
    let count = plane.width;
    let (near, far) = match down {
        false => (y, y),
        true if y.is_multiple_of(2) => (y / 2, (y / 2).saturating_sub(1)),
        true => (y / 2, (y / 2 + 1).min(plane.height - 1)),
    };
    let inner = &mut sums[1..=count];
    for ((sum, near), far) in inner.iter_mut().zip(row(plane, near)).zip(row(plane, far)) {
        *sum = 3 * u16::from(*near) + u16::from(*far);
    }
    if !across {
        fine.iter_mut().zip(inner).for_each(|(fine, sum)| *fine = ((*sum + 2) >> 2) as u8);
        return;
    }
    (sums[0], sums[count + 1]) = (sums[1], sums[count]);
    let (before, here, after) = (&sums[..count], &sums[1..=count], &sums[2..count + 2]);
    // Alternates rounding up and down, so that the mean has no bias. As in other decoders, the left pixel rounds up where rows
    // are interpolated as well, otherwise the right one.
    let halves = if down { [8, 7] } else { [7, 8] };
    let pairs = fine.as_chunks_mut::<2>().0.iter_mut().zip(before).zip(here).zip(after);
    for (((pair, before), here), after) in pairs {
        let (left, right) = ((3 * here + before + halves[0]) >> 4, (3 * here + after + halves[1]) >> 4);
        *pair = (left | right << 8).to_le_bytes();
    }
}

/// Converts a row of pixels. All slices have the same number of pixels.
#[inline(always)]
fn convert(light: &[u8], blue: &[u8], red: &[u8], line: &mut [u8]) {
    let (runs, rest) = line.as_chunks_mut::<{ RUN * CHANNELS }>();
    let (lights, light) = light.as_chunks::<RUN>();
    let (blues, blue) = blue.as_chunks::<RUN>();
    let (reds, red) = red.as_chunks::<RUN>();
    for (((run, light), blue), red) in runs.iter_mut().zip(lights).zip(blues).zip(reds) {
        *run = of_run(light, blue, red);
    }
    if !rest.is_empty() {
        let padded = |some: &[u8]| {
            let mut all = [0; RUN];
            all[..some.len()].copy_from_slice(some);
            all
        };
        let run = of_run(&padded(light), &padded(blue), &padded(red));
        rest.copy_from_slice(&run[..rest.len()]);
    }
}

#[inline(always)]
fn of_run(light: &[u8; RUN], blue: &[u8; RUN], red: &[u8; RUN]) -> [u8; RUN * CHANNELS] {
    // The upper half of a 16-bit product is a single instruction.
    let part =
        |colour: u8, factor: i16| ((((i32::from(colour) - 128) << 7) * i32::from(factor)) >> 16) as i16;
    let byte = |value: i16| ((value + 8) >> 4).clamp(0, 255) as u8;
    let mut bytes = [[0u8; RUN]; CHANNELS];
    for at in 0..RUN {
        let (light, blue, red) = (i16::from(light[at]) << 4, blue[at], red[at]);
        // 1.402, 0.344136, 0.714136 and 1.772, times 2^13.
        bytes[0][at] = byte(light + part(red, 11_485));
        bytes[1][at] = byte(light - part(blue, 2_819) - part(red, 5_850));
        bytes[2][at] = byte(light + part(blue, 14_516));
    }
    let mut run = [0; RUN * CHANNELS];
    for at in 0..RUN {
        run[3 * at] = bytes[0][at];
        run[3 * at + 1] = bytes[1][at];
        run[3 * at + 2] = bytes[2][at];
    }
    run
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::resample::Region;
    use crate::random::Uniform;

    fn plane(width: usize, height: usize, uniform: &mut Uniform) -> Plane {
        // A stride and a number of rows larger than the plane.
        let (stride, rows) = (width + 5, height + 3);
        let bytes = (0..stride * rows).map(|_| (uniform.draw() * 256.0) as u8).collect();
        let part =
            Region { left: 0.0, top: 0.0, width: width as f64, height: height as f64, is_flipped: false };
        Plane { width, height, stride, bytes, part }
    }

    /// A sample at a pixel of the image, by the definition.
    fn at(plane: &Plane, x: usize, y: usize, (across, down): (usize, usize)) -> f64 {
        let along = |place: usize, factor: usize, there: usize| {
            if factor == 1 {
                return [(place, 1.0), (place, 0.0)];
            }
            let near = place / 2;
            let far =
                if place.is_multiple_of(2) { near.saturating_sub(1) } else { (near + 1).min(there - 1) };
            [(near, 0.75), (far, 0.25)]
        };
        let mut sum = 0.0;
        for (row, down) in along(y, down, plane.height) {
            for (column, across) in along(x, across, plane.width) {
                sum += down * across * f64::from(plane.bytes[row * plane.stride + column]);
            }
        }
        sum
    }

    #[test]
    fn colours_are_those_of_the_definition() {
        let mut uniform = Uniform::new(2);
        for (width, height) in [(1, 1), (2, 3), (31, 8), (32, 5), (33, 9), (100, 7)] {
            for (across, down) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
                let light = plane(width, height, &mut uniform);
                let coarse = (width.div_ceil(across), height.div_ceil(down));
                let [blue, red] = [(); 2].map(|()| plane(coarse.0, coarse.1, &mut uniform));
                let mut out = vec![0; width * height * CHANNELS];
                let planes = [light, blue, red];
                colours(&planes, width, &mut out);
                for (place, pixel) in out.chunks_exact(CHANNELS).enumerate() {
                    let (x, y) = (place % width, place / width);
                    let light = at(&planes[0], x, y, (1, 1));
                    let [blue, red] = [1, 2].map(|i| at(&planes[i], x, y, (across, down)) - 128.0);
                    let wanted = [
                        light + 1.402 * red,
                        light - 0.344_136 * blue - 0.714_136 * red,
                        light + 1.772 * blue,
                    ];
                    for (byte, wanted) in pixel.iter().zip(wanted) {
                        // 0.5 for rounding, and as much again for each chroma sample, which was rounded before.
                        let away = (f64::from(*byte) - wanted.clamp(0.0, 255.0)).abs();
                        assert!(away < 1.6, "{byte} of {wanted} at {x}, {y} of {width} x {height}");
                    }
                }
            }
        }
        let grey = plane(3, 2, &mut uniform);
        let mut out = vec![0; 18];
        colours(std::slice::from_ref(&grey), 3, &mut out);
        assert_eq!(out[9..12], [grey.bytes[8]; 3]);
    }
}
