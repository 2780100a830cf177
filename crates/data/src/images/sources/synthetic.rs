//! Ten classes of generated images, determined by a seed and an index.
//!
//! Five classes are textures and five are shapes. Colours, the choice of the figure's colour, position, size, phase and a
//! little noise are random for every image, so the mean image of a class is grey and a linear model cannot separate classes:
//! only relations between neighbouring pixels do. Any size can be generated. Every operation is exact or correctly rounded (no
//! sines), so an image is the same on every machine.

use std::path::PathBuf;
use std::sync::Arc;

use crate::formats::SourceLocation;
use crate::images::stored::{ImageError, Images, Picture, Stored};
use crate::random::{Uniform, key};

pub(in crate::images) const CLASSES: [&str; 10] =
    ["rows", "columns", "diagonals", "checks", "dots", "disc", "ring", "square", "cross", "triangle"];

pub(in crate::images) struct Synthetic {
    pub count: u64,
    pub width: usize,
    pub height: usize,
    /// Determines all images.
    pub seed: u64,
}

impl Images for Synthetic {
    fn count(&self) -> u64 {
        self.count
    }

    fn class(&self, index: u64) -> Option<u32> {
        Some((index % CLASSES.len() as u64) as u32)
    }

    fn stored<'a>(&'a self, index: u64, buffer: &'a mut Vec<u8>) -> Result<Stored<'a>, ImageError> {
        buffer.clear();
        let class = (index % CLASSES.len() as u64) as usize;
        draw(class, self.width, self.height, &mut Uniform::new(key(self.seed, index)), buffer);
        Ok(Stored::Pixels(Picture { width: self.width, height: self.height, rgb: buffer }))
    }

    fn size(&self) -> Option<[usize; 2]> {
        Some([self.height, self.width])
    }

    fn place(&self, index: u64) -> SourceLocation {
        SourceLocation {
            file: Arc::new(PathBuf::from("the synthetic set")),
            line: None,
            row: Some(index + 1),
            offset: 0,
        }
    }
}

/// The random parameters of an image besides its class.
struct Scene {
    /// The centre of the figure, or the origin of a texture, relative to half of the shorter side.
    x: f64,
    y: f64,
    /// Half the size of a shape, or the period of a texture.
    size: f64,
    /// The rotation of the figure: a unit vector close to (1, 0).
    turn: (f64, f64),
    is_falling: bool,
}

/// Largest change of a byte by noise.
const NOISE: f64 = 16.0;
/// Least difference in brightness between figure and background.
const CONTRAST: f64 = 64.0;

fn draw(class: usize, width: usize, height: usize, uniform: &mut Uniform, out: &mut Vec<u8>) {
    let mut between = |low: f64, high: f64| low + (high - low) * uniform.draw();
    let is_texture = class < 5;
    let (tilt, size) = (between(-0.2, 0.2), if is_texture { between(0.35, 0.6) } else { between(0.4, 0.7) });
    let reach = if is_texture { 1.0 } else { 0.9 - size };
    let length = (1.0 + tilt * tilt).sqrt();
    let scene = Scene {
        x: between(-reach, reach),
        y: between(-reach, reach),
        size,
        turn: (1.0 / length, tilt / length),
        is_falling: between(0.0, 1.0) < 0.5,
    };
    let (figure, ground) = loop {
        let mut colour = || [0; 3].map(|_: i32| between(0.0, 255.0));
        let (figure, ground) = (colour(), colour());
        if (brightness(figure) - brightness(ground)).abs() >= CONTRAST {
            break (figure, ground);
        }
    };
    let unit = width.min(height) as f64 / 2.0;
    let noise_key = (between(0.0, 1.0) * (1u64 << 53) as f64) as u64;
    out.reserve_exact(width * height * 3);
    for row in 0..height {
        for column in 0..width {
            let x = (column as f64 + 0.5 - width as f64 / 2.0) / unit - scene.x;
            let y = (row as f64 + 0.5 - height as f64 / 2.0) / unit - scene.y;
            let (x, y) = (x * scene.turn.0 + y * scene.turn.1, y * scene.turn.0 - x * scene.turn.1);
            // A pixel on an edge blends both colours.
            let share = (0.5 - distance(class, x, y, &scene) * unit).clamp(0.0, 1.0);
            let noise = key(noise_key, (row * width + column) as u64);
            for channel in 0..3 {
                let moved = (noise >> (16 * channel) & 0xffff) as f64 / 65535.0 * 2.0 - 1.0;
                let value = ground[channel] + share * (figure[channel] - ground[channel]) + NOISE * moved;
                out.push((value + 0.5).clamp(0.0, 255.0) as u8);
            }
        }
    }
}

fn brightness([red, green, blue]: [f64; 3]) -> f64 {
    0.299 * red + 0.587 * green + 0.114 * blue
}

/// Signed distance of a point from the figure of a class; negative inside.
fn distance(class: usize, x: f64, y: f64, scene: &Scene) -> f64 {
    let size = scene.size;
    // Distance from the nearest of a family of parallel lines, less a quarter of their period: half figure, half background.
    let stripes = |along: f64| (along - (along / size).round() * size).abs() - size / 4.0;
    let slant = if scene.is_falling { x + y } else { x - y } * std::f64::consts::FRAC_1_SQRT_2;
    let radius = (x * x + y * y).sqrt();
    match class {
        0 => stripes(y),
        1 => stripes(x),
        2 => stripes(slant),
        3 => {
            let (across, down) = (stripes(x), stripes(y));
            if (across < 0.0) == (down < 0.0) {
                -across.abs().min(down.abs())
            } else {
                across.abs().min(down.abs())
            }
        }
        4 => {
            let apart = |along: f64| along - (along / size).round() * size;
            (apart(x) * apart(x) + apart(y) * apart(y)).sqrt() - 0.3 * size
        }
        5 => radius - size,
        6 => (radius - 0.8 * size).abs() - 0.2 * size,
        7 => x.abs().max(y.abs()) - 0.9 * size,
        8 => {
            let bar = |along: f64, across: f64| (along.abs() - size).max(across.abs() - 0.3 * size);
            bar(x, y).min(bar(y, x))
        }
        9 => {
            // An equilateral triangle pointing up or down.
            let y = if scene.is_falling { -y } else { y };
            let side = 0.866_025_403_784_438_6 * x.abs() - 0.5 * y;
            (y - 0.6 * size).max(side - 0.6 * size)
        }
        _ => unreachable!("there are ten classes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(index: u64, seed: u64, width: usize, height: usize) -> Vec<u8> {
        let images = Synthetic { count: 1000, width, height, seed };
        let mut buffer = Vec::new();
        let Stored::Pixels(picture) = images.stored(index, &mut buffer).unwrap() else { panic!("pixels") };
        assert_eq!((picture.width, picture.height), (width, height));
        picture.rgb.to_vec()
    }

    #[test]
    fn an_image_is_a_function_of_seed_and_index() {
        let first = image(3, 1, 32, 32);
        assert_eq!(first, image(3, 1, 32, 32));
        assert!(first != image(3, 2, 32, 32) && first != image(13, 1, 32, 32));
        assert_eq!(image(9, 1, 7, 90).len(), 7 * 90 * 3);
        assert_eq!(image(4, 1, 1, 1).len(), 3);
    }

    /// Figure and background have the same distribution, so no pixel of the mean image of a class differs.
    #[test]
    fn the_mean_image_of_a_class_is_grey() {
        for class in 0..10 {
            let mut sums = vec![0f64; 32 * 32 * 3];
            for draw in 0..400 {
                let bytes = image(class + 10 * draw, 5, 32, 32);
                sums.iter_mut().zip(bytes).for_each(|(sum, byte)| *sum += f64::from(byte) / 400.0);
            }
            let worst = sums.iter().map(|mean| (mean - 127.5).abs()).fold(0.0, f64::max);
            // The largest of 3072 means of 400 values with a standard deviation of about 72 each.
            assert!(worst < 5.0 * 72.0 / 20.0, "class {class}: {worst}");
        }
    }

    #[test]
    fn figure_and_ground_are_both_seen() {
        for index in 0..200 {
            let bytes = image(index, 8, 32, 32);
            let light: Vec<f64> = bytes
                .chunks(3)
                .map(|pixel| brightness([pixel[0], pixel[1], pixel[2]].map(f64::from)))
                .collect();
            let (least, most) = light
                .iter()
                .fold((255f64, 0f64), |(least, most), value| (least.min(*value), most.max(*value)));
            let bright = light.iter().filter(|value| **value > (least + most) / 2.0).count();
            assert!((60..965).contains(&bright), "image {index}: {bright} of 1024 pixels are bright");
        }
    }
}
