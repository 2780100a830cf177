//! Samples the next token of every sequence from its logits.
//!
//! (logits f32 [S, V], numbers i32 [S, 6], shares f32 [S, 2]) -> f32 [S, 2]: the token, and its log-probability by the
//! unmodified logits. The numbers of a sequence are the number of valid tokens among the V, `top_k`, the two words of a seed,
//! the index of the sequence and the index in it; the shares are the temperature and `top_p`. A sequence with no valid tokens
//! results in -1 and 0.
//!
//! The temperature applies first, then the `top_k` most likely tokens are kept (0 keeps all), and then the most likely of these
//! that together have the probability `top_p`. Temperature 0 takes the most likely token. Of equally likely tokens the one with
//! the smaller index comes first. The random number depends only on the seed, the sequence and the index in it.

use super::{arity, expect};
use crate::random::philox;
use crate::types::{DType, TensorType};

/// Number of integers and of floats per sequence.
pub const NUMBERS: usize = 6;
pub const SHARES: usize = 2;

pub fn infer(ins: &[&TensorType]) -> Result<Vec<TensorType>, String> {
    arity(ins, 3)?;
    let [logits, numbers, shares] = [ins[0], ins[1], ins[2]];
    if logits.rank() != 2 || logits.dtype != DType::F32 {
        return Err(format!("the logits are {logits}, wanted f32 [sequences, tokens]"));
    }
    let count = logits.dims[0];
    expect("the numbers", numbers, DType::I32, &[count, NUMBERS])?;
    expect("the shares", shares, DType::F32, &[count, SHARES])?;
    Ok(vec![TensorType::new(DType::F32, [count, 2])])
}

/// The sampling parameters of one sequence's next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Samples only from the `top_k` most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Samples only from the most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    pub seed: u64,
    pub sequence: u32,
    /// Index of the token in the sequence.
    pub index: u32,
}

impl Draw {
    /// The row of `numbers`, for sampling from the first `size` tokens.
    pub fn numbers(&self, size: usize) -> [i32; NUMBERS] {
        let seed = [self.seed as i32, (self.seed >> 32) as i32];
        [size as i32, self.top_k.min(size) as i32, seed[0], seed[1], self.sequence as i32, self.index as i32]
    }

    pub fn shares(&self) -> [f32; SHARES] {
        [self.temperature, self.top_p]
    }

    /// Parses two rows into the parameters and the number of valid tokens; `None` where that is zero.
    pub fn of(numbers: &[i32], shares: &[f32]) -> Option<(Draw, usize)> {
        let size = usize::try_from(numbers[0]).ok().filter(|size| *size > 0)?;
        let draw = Draw {
            temperature: shares[0],
            top_k: numbers[1].max(0) as usize,
            top_p: shares[1],
            seed: u64::from(numbers[2] as u32) | u64::from(numbers[3] as u32) << 32,
            sequence: numbers[4] as u32,
            index: numbers[5] as u32,
        };
        Some((draw, size))
    }

    /// The random number in [0, 1).
    fn unit(&self) -> f64 {
        let words = philox([self.index, 0, self.sequence, 0], [self.seed as u32, (self.seed >> 32) as u32]);
        (((words[0] as u64) << 21) | (words[1] as u64 >> 11)) as f64 / (1u64 << 53) as f64
    }

    pub fn token(&self, logits: &[f32]) -> u32 {
        let count = match (self.temperature == 0.0, self.top_k) {
            (true, _) => 1,
            (false, 0) => logits.len(),
            (false, top_k) => top_k,
        };
        let order = likeliest(logits, count);
        if count == 1 {
            return order[0];
        }
        let (top, temperature) = (logits[order[0] as usize] as f64, self.temperature as f64);
        let mut odds: Vec<f64> =
            order.iter().map(|t| ((logits[*t as usize] as f64 - top) / temperature).exp()).collect();
        if self.top_p < 1.0 {
            let mut left = self.top_p as f64 * odds.iter().sum::<f64>();
            let enough = odds.iter().position(|odd| {
                left -= odd;
                left <= 0.0
            });
            odds.truncate(enough.map_or(odds.len(), |last| last + 1));
        }
        let mut left = self.unit() * odds.iter().sum::<f64>();
        for (token, odd) in order.iter().zip(&odds) {
            left -= odd;
            if left < 0.0 {
                return *token;
            }
        }
        order[odds.len() - 1]
    }
}

/// The logarithm of the sum of the exponentials; subtracting it turns logits into log-probabilities.
pub fn log_sum(logits: &[f32]) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    top + logits.iter().map(|x| (*x as f64 - top).exp()).sum::<f64>().ln()
}

/// The most likely tokens in order; of equally likely ones the smaller index first.
pub fn likeliest(logits: &[f32], count: usize) -> Vec<u32> {
    let likelier = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    if count < order.len() {
        if count > 0 {
            order.select_nth_unstable_by(count - 1, likelier);
        }
        order.truncate(count);
    }
    order.sort_unstable_by(likelier);
    order
}

/// The row of the result for one sequence.
pub fn sample(logits: &[f32], numbers: &[i32], shares: &[f32]) -> [f64; 2] {
    let Some((draw, size)) = Draw::of(numbers, shares) else { return [-1.0, 0.0] };
    let logits = &logits[..size.min(logits.len())];
    let token = draw.token(logits);
    [token as f64, logits[token as usize] as f64 - log_sum(logits)]
}
