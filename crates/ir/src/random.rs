//! Counter-based random numbers (Philox 4x32, 10 rounds): a pure function of key and counter, the same on every
//! backend. Dropout draws by (seed, step, sample, token, node key, element); initial weights by (seed, path, element);
//! the rounding of the optimiser's state by (element, update).

/// Four random words from one counter and key.
#[inline(always)]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..10 {
        let (a, b) = (c[0] as u64 * 0xD251_1F53, c[2] as u64 * 0xCD9E_8D57);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// The inputs of a row's dropout apart from the element: the counter's fixed words and the key.
#[derive(Clone, Copy, Debug)]
pub struct RowDraw {
    sample: u32,
    token: u32,
    step: u32,
    key: [u32; 2],
}

impl RowDraw {
    #[inline(always)]
    pub fn new(rng: [i32; 3], node_key: u64, sample: i32, token: i32) -> Self {
        let key = [rng[0] as u32 ^ node_key as u32, rng[1] as u32 ^ (node_key >> 32) as u32];
        RowDraw { sample: sample as u32, token: token as u32, step: rng[2] as u32, key }
    }

    /// The draws of elements 8 i to 8 i + 7, two per word, the first in its low half. 16 bits are precise to 8e-6 of a
    /// probability, and drawing costs more than the memory pass it is part of.
    #[inline(always)]
    pub fn block(&self, i: u32) -> [u32; 4] {
        philox([i, self.token, self.sample, self.step], self.key)
    }

    pub fn of(&self, element: usize) -> u16 {
        (self.block((element / 8) as u32)[element % 8 / 2] >> (element % 2 * 16)) as u16
    }
}

/// The threshold below which a draw drops its element.
pub fn drop_below(p: f32) -> u16 {
    (p as f64 * 65_536.0).round().min(65_535.0) as u16
}

/// The key for rounding the optimiser's state; any constant works. Runs of different seeds share it without harm, because they
/// round different values.
pub const ROUNDING_KEY: [u32; 2] = [0x6d6f_6d65, 0x6e74_7321];

/// The draws that round the moments of elements 4 i to 4 i + 3 in one update, one word each: its low half for the first moment,
/// its high half for the second.
#[inline(always)]
pub fn rounding(i: u64, updates: u32) -> [u32; 4] {
    philox([i as u32, (i >> 32) as u32, updates, 0], ROUNDING_KEY)
}

/// A standard normal number, element `i` of the stream `stream` under `seed`.
pub fn normal(seed: u64, stream: u64, i: u64) -> f32 {
    normal_pair(seed, stream, i / 2)[(i % 2) as usize]
}

/// Elements 2 i and 2 i + 1 of a stream (Box-Muller), for half the work of computing each alone.
pub fn normal_pair(seed: u64, stream: u64, i: u64) -> [f32; 2] {
    let [first, second] = unit_pair(seed, stream, i);
    let (radius, angle) = ((-2.0 * first.ln()).sqrt(), std::f64::consts::TAU * second);
    let (sin, cos) = angle.sin_cos();
    [(radius * cos) as f32, (radius * sin) as f32]
}

/// Two numbers of a stream, uniform in the open interval from 0 to 1.
pub fn unit_pair(seed: u64, stream: u64, i: u64) -> [f64; 2] {
    let key = [seed as u32, (seed >> 32) as u32];
    let c = philox([i as u32, (i >> 32) as u32, stream as u32, (stream >> 32) as u32], key);
    let unit =
        |hi: u32, lo: u32| (((hi as u64) << 21 | (lo as u64) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    [unit(c[0], c[1]), unit(c[2], c[3])]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published known-answer vectors of Philox 4x32-10.
    #[test]
    fn philox_gives_the_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
    }

    /// A dropout of one in ten over many draws, checked at every position of a block.
    #[test]
    fn dropout_drops_the_requested_share() {
        for place in 0..8 {
            let dropped =
                (0..50_000).filter(|i| RowDraw::new([3, 4, 5], 6, *i, 7).of(place) < drop_below(0.1));
            let share = dropped.count() as f64 / 50_000.0;
            assert!((share - 0.1).abs() < 0.005, "{share} at {place}");
        }
        assert_eq!((drop_below(0.0), drop_below(0.5), drop_below(0.999_999)), (0, 32_768, 65_535));
    }

    #[test]
    fn normal_has_mean_zero_and_variance_one() {
        let n = 100_000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for i in 0..n {
            let x = normal(7, 3, i) as f64;
            (sum, squares) = (sum + x, squares + x * x);
        }
        let (mean, variance) = (sum / n as f64, squares / n as f64);
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
    }
}
