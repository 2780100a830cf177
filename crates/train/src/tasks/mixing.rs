//! Mixup and cutmix: draws which images of a micro-batch are mixed, and in what ratio. The model mixes them and their classes.
//!
//! An image is mixed with the next one of its micro-batch, so the pairs, unlike everything else, depend on how a batch is split.
//! The ratio is drawn with the seed and the global index of the image.

use flatout_ir::random::philox;

use crate::config::Config;

/// The mixing that `train.mixup` and `train.cutmix` ask for.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixing {
    /// Parameters of the beta distributions from which ratios are drawn; 0 disables a kind.
    mixup: f64,
    cutmix: f64,
    /// Rows and columns of an image.
    sides: [usize; 2],
}

/// The mixing of the images of a micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mixed {
    /// Index of the other image.
    pub with: Vec<i32>,
    /// The share that an image keeps of itself.
    pub share: Vec<f32>,
    /// Four bounds per image (start and end of rows, start and end of columns) of the box taken from the other image; an empty
    /// box where values are blended.
    pub cut: Vec<i32>,
}

impl Mixing {
    pub fn of(config: &Config) -> Option<Mixing> {
        let (mixup, cutmix) = (config.train.mixup, config.train.cutmix);
        let sides = config.model.image_sides()?;
        (mixup > 0.0 || cutmix > 0.0).then_some(Mixing { mixup, cutmix, sides })
    }

    pub fn draw(&self, samples: &[u64], seed: u64) -> Mixed {
        let mut mixed = Mixed::default();
        for (place, sample) in samples.iter().enumerate() {
            mixed.with.push(((place + 1) % samples.len()) as i32);
            let mut uniform = Uniform::new(seed, *sample);
            let cuts = match (self.mixup > 0.0, self.cutmix > 0.0) {
                (true, true) => uniform.draw() < 0.5,
                (_, cuts) => cuts,
            };
            let share = uniform.beta(if cuts { self.cutmix } else { self.mixup });
            let (share, cut) = if cuts { self.cut(share, &mut uniform) } else { (share, [0; 4]) };
            mixed.share.push(share as f32);
            mixed.cut.extend(cut);
        }
        mixed
    }

    /// A box of about the area that is replaced, centred anywhere in the image, and the share that is left outside it.
    fn cut(&self, share: f64, uniform: &mut Uniform) -> (f64, [i32; 4]) {
        let mut bounds = |side: f64| {
            let half = 0.5 * side * (1.0 - share).sqrt();
            let centre = side * uniform.draw();
            [centre - half, centre + half].map(|bound| bound.round().clamp(0.0, side))
        };
        let [height, width] = self.sides.map(|side| side as f64);
        let (rows, columns) = (bounds(height), bounds(width));
        let area = (rows[1] - rows[0]) * (columns[1] - columns[0]);
        if area == 0.0 {
            return (1.0, [0; 4]);
        }
        (1.0 - area / (height * width), [rows[0], rows[1], columns[0], columns[1]].map(|bound| bound as i32))
    }
}

/// Uniform numbers between 0 and 1 from a counter-based generator.
struct Uniform {
    key: [u32; 2],
    counter: [u32; 4],
}

impl Uniform {
    /// Every sample has a stream of its own, separate from those of dropout and initial weights.
    fn new(seed: u64, sample: u64) -> Uniform {
        let counter = [0, sample as u32, (sample >> 32) as u32, 0x6d69_7865];
        Uniform { key: [seed as u32, (seed >> 32) as u32], counter }
    }

    fn draw(&mut self) -> f64 {
        self.counter[0] += 1;
        let [high, low, ..] = philox(self.counter, self.key);
        ((((high as u64) << 32 | low as u64) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Draws from the beta distribution with both parameters alpha: x / (x + y) of two gamma draws.
    fn beta(&mut self, alpha: f64) -> f64 {
        let (x, y) = (self.log_gamma_draw(alpha), self.log_gamma_draw(alpha));
        // In logarithms, because draws of a small alpha are smaller than any f64.
        1.0 / (1.0 + (y - x).exp())
    }

    /// The logarithm of a draw from the gamma distribution, by the method of Marsaglia and Tsang; for alpha below 1, from a draw
    /// with alpha + 1.
    fn log_gamma_draw(&mut self, alpha: f64) -> f64 {
        let boost = if alpha < 1.0 { self.draw().ln() / alpha } else { 0.0 };
        let d = if alpha < 1.0 { alpha + 1.0 } else { alpha } - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let (u, turn) = (self.draw(), self.draw());
            let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * turn).cos();
            let v = (1.0 + c * normal).powi(3);
            if v > 0.0 && self.draw().ln() < 0.5 * normal * normal + d - d * v + d * v.ln() {
                return (d * v).ln() + boost;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(alpha: f64) -> (f64, f64) {
        let draws: Vec<f64> = (0..20_000).map(|sample| Uniform::new(5, sample).beta(alpha)).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        (mean, draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64)
    }

    /// The variance of beta(a, a) is 1 / (4 (2 a + 1)).
    #[test]
    fn shares_have_the_betas_moments() {
        for alpha in [0.2, 1.0, 3.0] {
            let (mean, variance) = moments(alpha);
            assert!((mean - 0.5).abs() < 0.01, "{alpha}: {mean}");
            assert!((variance * 4.0 * (2.0 * alpha + 1.0) - 1.0).abs() < 0.03, "{alpha}: {variance}");
        }
    }

    #[test]
    fn a_box_has_the_area_that_is_not_kept() {
        let mixing = Mixing { mixup: 0.0, cutmix: 1.0, sides: [32, 32] };
        let samples: Vec<u64> = (0..200).collect();
        let mixed = mixing.draw(&samples, 7);
        for (share, cut) in mixed.share.iter().zip(mixed.cut.chunks_exact(4)) {
            let area = ((cut[1] - cut[0]) * (cut[3] - cut[2])) as f32;
            assert!((1.0 - area / 1024.0 - share).abs() < 1e-6);
            assert!(cut.iter().all(|bound| (0..=32).contains(bound)));
        }
        assert_eq!(mixed.with[..2], [1, 2]);
        assert_eq!(mixed.with[199], 0);
        assert_eq!(
            mixing.draw(&samples[50..60], 7).share,
            mixed.share[50..60],
            "depends on the sample alone"
        );
        let both = Mixing { mixup: 0.4, ..mixing }.draw(&samples, 7);
        let boxes = both.cut.chunks_exact(4).filter(|cut| cut[1] > cut[0]).count();
        assert!((60..140).contains(&boxes), "{boxes} of 200");
    }
}
