//! The next token, drawn from a model's logits.

use flatout_ir::random;

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token.
    pub temperature: f64,
    /// Only the most likely `top_k` tokens are drawn from; 0 is all.
    pub top_k: usize,
    /// Only the most likely tokens that together have this probability are drawn from; 1 is all.
    pub top_p: f64,
    pub seed: u64,
    pub max_tokens: usize,
}

/// A token drawn by its probability: the temperature first, then `top_k`, then `top_p` of what is left. The number drawn
/// with depends on the seed, the sequence and the place in it, and on nothing else.
pub fn draw(logits: &[f32], how: Sampling, sequence: u32, index: u64) -> u32 {
    let likelier = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    if how.temperature == 0.0 {
        return order.into_iter().min_by(likelier).expect("a vocabulary has tokens");
    }
    if how.top_k > 0 && how.top_k < order.len() {
        order.select_nth_unstable_by(how.top_k - 1, likelier);
        order.truncate(how.top_k);
    }
    order.sort_unstable_by(likelier);
    let top = logits[order[0] as usize] as f64;
    let mut odds: Vec<f64> =
        order.iter().map(|t| ((logits[*t as usize] as f64 - top) / how.temperature).exp()).collect();
    if how.top_p < 1.0 {
        let mut left = how.top_p * odds.iter().sum::<f64>();
        let enough = odds.iter().position(|odd| {
            left -= odd;
            left <= 0.0
        });
        odds.truncate(enough.map_or(odds.len(), |last| last + 1));
    }
    let words = random::philox(
        [index as u32, (index >> 32) as u32, sequence, 0],
        [how.seed as u32, (how.seed >> 32) as u32],
    );
    let unit = (((words[0] as u64) << 21) | (words[1] as u64 >> 11)) as f64 / (1u64 << 53) as f64;
    let mut left = unit * odds.iter().sum::<f64>();
    for (token, odd) in order.iter().zip(&odds) {
        left -= odd;
        if left < 0.0 {
            return *token;
        }
    }
    order[odds.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOW: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 3, max_tokens: 0 };

    /// How often each of the tokens is drawn.
    fn counts(logits: &[f32], how: Sampling) -> Vec<usize> {
        let mut counts = vec![0; logits.len()];
        (0..4000).for_each(|index| counts[draw(logits, how, 0, index) as usize] += 1);
        counts
    }

    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        // Probabilities 1/8, 1/2, 1/8, 1/4.
        let logits = [0.0, 4f32.ln(), 0.0, 2f32.ln()];
        let all = counts(&logits, HOW);
        for (count, wanted) in all.iter().zip([500, 2000, 500, 1000]) {
            assert!(count.abs_diff(wanted) < 120, "{all:?}");
        }
        let hot = counts(&logits, Sampling { temperature: 100.0, ..HOW });
        assert!(hot.iter().all(|count| count.abs_diff(1000) < 120), "{hot:?}");
        assert_eq!(counts(&logits, Sampling { temperature: 0.0, ..HOW }), [0, 4000, 0, 0]);
        let two = counts(&logits, Sampling { top_k: 2, ..HOW });
        assert!(two[0] == 0 && two[2] == 0 && two[3].abs_diff(1333) < 120, "{two:?}");
        assert_eq!(counts(&logits, Sampling { top_k: 1, ..HOW }), [0, 4000, 0, 0]);
        for (top_p, kept) in [(0.1, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.87, 3), (0.88, 4)] {
            let counts = counts(&logits, Sampling { top_p, ..HOW });
            assert_eq!(counts.iter().filter(|count| **count > 0).count(), kept, "{top_p}: {counts:?}");
        }
        // The share is of what the number of tokens left.
        let both = counts(&logits, Sampling { top_k: 2, top_p: 0.6, ..HOW });
        assert_eq!(both, [0, 4000, 0, 0]);
    }

    #[test]
    fn seeds_sequences_and_places_draw_differently_and_always_the_same() {
        let logits = [0.0; 64];
        let drawn = |seed: u64, sequence: u32| -> Vec<u32> {
            (0..32).map(|index| draw(&logits, Sampling { seed, ..HOW }, sequence, index)).collect()
        };
        assert_eq!(drawn(1, 0), drawn(1, 0));
        assert_ne!(drawn(1, 0), drawn(2, 0));
        assert_ne!(drawn(1, 0), drawn(1, 1));
    }
}
