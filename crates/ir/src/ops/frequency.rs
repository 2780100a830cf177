//! Frequencies of rotary embeddings: frequency f turns by theta^(-2 f / K) per position, with the scalings for contexts longer
//! than those of training. All rotations use these numbers, in f64.

use std::f64::consts::TAU;
use std::sync::{Mutex, PoisonError};

use crate::attr::Attr;

/// The frequencies of a rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frequencies {
    pub theta: f64,
    pub scaling: Scaling,
    /// Number of equal runs of pairs that each use the whole range of frequencies, as rotations of images do for rows and
    /// columns.
    pub runs: usize,
}

/// The scaling of frequencies. `original` is the context length that they were trained at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    None,
    /// Divides every frequency by `factor`.
    Linear {
        factor: f64,
    },
    /// Divides the frequencies of pairs that turn fewer than `low` times in the original context by `factor`, leaves those that
    /// turn more than `high` times, and interpolates between the two by the number of turns.
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original: f64,
    },
    /// Likewise, but interpolates linearly in the index of the frequency, from the one that turns `fast` times in the original
    /// context to the one that turns `slow` times; cosines and sines are multiplied by `amplitude`.
    Yarn {
        factor: f64,
        fast: f64,
        slow: f64,
        original: f64,
        amplitude: f64,
    },
    /// Divides every frequency by a factor of its own; cosines and sines are multiplied by `amplitude`.
    Divided {
        factors: Factors,
        amplitude: f64,
    },
}

/// A list of numbers that is stored once and never freed, so that types that contain it are `Copy`. There are only as many
/// lists as opened checkpoints have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors(&'static [f64]);

impl Factors {
    pub fn of(factors: &[f64]) -> Factors {
        static ALL: Mutex<Vec<&'static [f64]>> = Mutex::new(vec![]);
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        let found = all.iter().find(|known| **known == factors).copied();
        Factors(found.unwrap_or_else(|| {
            let kept: &'static [f64] = factors.to_vec().leak();
            all.push(kept);
            kept
        }))
    }
}

impl From<f64> for Frequencies {
    /// Frequencies without scaling.
    fn from(theta: f64) -> Self {
        Frequencies { theta, scaling: Scaling::None, runs: 1 }
    }
}

impl Frequencies {
    /// The turn per position of each of `half` frequencies, in radians; a head has two elements for each.
    pub fn turns(&self, half: usize) -> Vec<f64> {
        assert!(half.is_multiple_of(self.runs), "{half} frequencies are not {} equal runs", self.runs);
        self.run(half / self.runs).repeat(self.runs)
    }

    /// The turns of one run of `half` frequencies.
    fn run(&self, half: usize) -> Vec<f64> {
        let Frequencies { theta, scaling, .. } = *self;
        let plain = |f: usize| theta.powf(-(f as f64) / half as f64);
        let stretched = |f: usize| match scaling {
            Scaling::None => plain(f),
            Scaling::Linear { factor } => plain(f) / factor,
            Scaling::Llama3 { factor, low, high, original } => {
                let turns = original * plain(f) / TAU;
                mix(plain(f) / factor, plain(f), (turns - low) / (high - low))
            }
            Scaling::Yarn { factor, fast, slow, original, .. } => {
                // The fractional index of the frequency that makes `turns` turns in the original context.
                let index = |turns: f64| half as f64 * (original / (turns * TAU)).ln() / theta.ln();
                let first = index(fast).floor().max(0.0);
                let last = index(slow).ceil().min(2.0 * half as f64 - 1.0);
                // Equal indices would divide by zero, so the ramp becomes a steep step.
                let span = if first == last { 1e-3 } else { last - first };
                mix(plain(f), plain(f) / factor, (f as f64 - first) / span)
            }
            Scaling::Divided { factors: Factors(factors), .. } => {
                assert_eq!(factors.len(), half, "a head of {half} frequencies has as many factors");
                plain(f) / factors[f]
            }
        };
        (0..half).map(stretched).collect()
    }

    /// The factor of cosines and sines.
    pub fn amplitude(&self) -> f64 {
        match self.scaling {
            Scaling::Yarn { amplitude, .. } | Scaling::Divided { amplitude, .. } => amplitude,
            _ => 1.0,
        }
    }

    /// Cosine and sine of each angle at positions 0 to `positions`, `[positions, half, 2]` in order.
    pub fn table(&self, positions: usize, half: usize) -> impl Iterator<Item = f64> + use<> {
        let (turns, amplitude) = (self.turns(half), self.amplitude());
        (0..positions * half).flat_map(move |i| {
            let (sin, cos) = ((i / half) as f64 * turns[i % half]).sin_cos();
            [amplitude * cos, amplitude * sin]
        })
    }
}

/// Interpolates from `a` at a share of 0 or below to `b` at 1 or above.
fn mix(a: f64, b: f64, share: f64) -> f64 {
    let share = share.clamp(0.0, 1.0);
    (1.0 - share) * a + share * b
}

/// `10000`, `10000:linear:4`, `500000:llama3:8:1:4:8192`, `10000:yarn:4:32:1:2048:1.1`, `10000:divided:1.1:1:1.5:4` with the
/// amplitude first; `10000:runs:2` and `10000:runs:2:linear:4` have two runs.
impl Attr for Frequencies {
    fn to_text(&self) -> String {
        let theta = match self.runs {
            1 => self.theta.to_string(),
            runs => format!("{}:runs:{runs}", self.theta),
        };
        match self.scaling {
            Scaling::None => theta,
            Scaling::Linear { factor } => format!("{theta}:linear:{factor}"),
            Scaling::Llama3 { factor, low, high, original } => {
                format!("{theta}:llama3:{factor}:{low}:{high}:{original}")
            }
            Scaling::Yarn { factor, fast, slow, original, amplitude } => {
                format!("{theta}:yarn:{factor}:{fast}:{slow}:{original}:{amplitude}")
            }
            Scaling::Divided { factors, amplitude } => {
                let factors: String = factors.0.iter().map(|factor| format!(":{factor}")).collect();
                format!("{theta}:divided:{amplitude}{factors}")
            }
        }
    }

    fn read(text: &str) -> Result<Self, String> {
        let mut words = text.split(':').peekable();
        let theta = f64::read(words.next().unwrap_or_default())?;
        let runs = match words.next_if_eq(&"runs") {
            Some(_) => usize::read(words.next().unwrap_or_default())?,
            None => 1,
        };
        if runs == 0 {
            return Err(format!("`{text}` are no frequencies"));
        }
        let name = words.next();
        let numbers = words.map(f64::read).collect::<Result<Vec<f64>, _>>()?;
        let scaling = match (name, &numbers[..]) {
            (None, []) => Scaling::None,
            (Some("linear"), &[factor]) => Scaling::Linear { factor },
            (Some("llama3"), &[factor, low, high, original]) => {
                Scaling::Llama3 { factor, low, high, original }
            }
            (Some("yarn"), &[factor, fast, slow, original, amplitude]) => {
                Scaling::Yarn { factor, fast, slow, original, amplitude }
            }
            (Some("divided"), [amplitude, factors @ ..]) if !factors.is_empty() => {
                Scaling::Divided { factors: Factors::of(factors), amplitude: *amplitude }
            }
            _ => return Err(format!("`{text}` are no frequencies")),
        };
        Ok(Frequencies { theta, scaling, runs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Scaling; 4] = [
        Scaling::None,
        Scaling::Linear { factor: 4.0 },
        Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 },
        Scaling::Yarn { factor: 4.0, fast: 32.0, slow: 1.0, original: 2048.0, amplitude: 1.1386 },
    ];

    #[test]
    fn text_reads_back_equal() {
        let divided = Scaling::Divided { factors: Factors::of(&[1.0, 2.5]), amplitude: 1.25 };
        for scaling in ALL.into_iter().chain([divided]) {
            for runs in [1, 2] {
                let frequencies = Frequencies { theta: 5e5, scaling, runs };
                assert_eq!(Frequencies::read(&frequencies.to_text()), Ok(frequencies));
                assert_eq!(frequencies.to_text().contains("runs"), runs == 2);
            }
        }
        for wrong in [
            "",
            "x",
            "1:linear",
            "1:linear:2:3",
            "1:cubic:2",
            "1:llama3:1:2:x:4",
            "1:runs",
            "1:runs:0",
            "1:runs:x",
            "1:divided:1.5",
        ] {
            assert!(Frequencies::read(wrong).is_err(), "{wrong}");
        }
    }

    /// Pair f of 4 turns by theta^(-(f mod 2) / 2).
    #[test]
    fn every_run_has_the_same_frequencies() {
        let frequencies = Frequencies { runs: 2, ..Frequencies::from(1e4) };
        assert_eq!(frequencies.turns(4), [1.0, 0.01, 1.0, 0.01]);
        let table: Vec<f64> = frequencies.table(3, 4).collect();
        assert_eq!(table[16..20], table[20..24]);
        assert_eq!(table[18..20], [0.02f64.cos(), 0.02f64.sin()]);
    }

    #[test]
    fn scaling_keeps_fast_pairs_and_slows_slow_ones() {
        let turns = |scaling| Frequencies { scaling, ..Frequencies::from(1e4) }.turns(64);
        let plain = turns(Scaling::None);
        assert!((plain[16] - 1e4f64.powf(-0.25)).abs() < 1e-15);
        for scaling in &ALL[2..] {
            let (stretched, factor) = match *scaling {
                Scaling::Llama3 { factor, .. } | Scaling::Yarn { factor, .. } => (turns(*scaling), factor),
                _ => unreachable!("the last two"),
            };
            assert_eq!(stretched[0], plain[0]);
            assert_eq!(stretched[63], plain[63] / factor);
            let ratios: Vec<f64> = plain.iter().zip(&stretched).map(|(p, s)| p / s).collect();
            assert!(ratios.is_sorted() && ratios.iter().any(|r| *r > 1.01 && *r < factor - 0.01));
        }
    }

    /// Published worked values: for Llama 3.1's head of 128 at theta 5e5, frequencies 0 to 28 stay and those from 36 on are
    /// divided by 8.
    #[test]
    fn llama3_scaling_changes_only_slow_frequencies() {
        let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let plain = Frequencies::from(5e5).turns(64);
        let stretched = Frequencies { scaling, ..Frequencies::from(5e5) }.turns(64);
        for (f, (plain, stretched)) in plain.iter().zip(&stretched).enumerate() {
            let turns = 8192.0 * plain / TAU;
            let ratio = plain / stretched;
            match f {
                _ if turns >= 4.0 => assert_eq!(ratio, 1.0, "{f}"),
                _ if turns <= 1.0 => assert!((ratio - 8.0).abs() < 1e-12, "{f}"),
                _ => assert!(ratio > 1.0 && ratio < 8.0, "{f}"),
            }
        }
    }

    #[test]
    fn frequencies_are_divided_by_their_own_factors() {
        let factors = Factors::of(&[1.0, 4.0]);
        assert_eq!(factors, Factors::of(&[1.0, 4.0]));
        let frequencies =
            Frequencies { scaling: Scaling::Divided { factors, amplitude: 1.5 }, ..Frequencies::from(1e4) };
        assert_eq!((frequencies.turns(2), frequencies.amplitude()), (vec![1.0, 0.0025], 1.5));
    }

    #[test]
    fn a_table_is_cosines_and_sines_times_the_amplitude() {
        let table: Vec<f64> = Frequencies { scaling: ALL[3], ..Frequencies::from(1e4) }.table(3, 2).collect();
        assert_eq!(table.len(), 12);
        assert_eq!(table[..4], [1.1386, 0.0, 1.1386, 0.0]);
        let turn = Frequencies { scaling: ALL[3], ..Frequencies::from(1e4) }.turns(2)[1];
        assert_eq!(table[10..], [1.1386 * (2.0 * turn).cos(), 1.1386 * (2.0 * turn).sin()]);
    }
}
