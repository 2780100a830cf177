//! Counter-based random numbers: a value is a pure function of its keys, so there is no state to save.

/// The finaliser of SplitMix64: a bijection on 64 bits that scatters neighbouring inputs.
pub(crate) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Folds one more key into a running one. The order of the keys matters.
pub(crate) fn key(running: u64, next: u64) -> u64 {
    mix(running.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ mix(next.wrapping_add(0xd1b5_4a32_d192_ed03)))
}

/// A 64-bit fingerprint of bytes. It splits and identifies documents and is not cryptographic.
pub(crate) fn fingerprint(bytes: &[u8]) -> u64 {
    let mut chunks = bytes.chunks_exact(8);
    let mut hash = key(0, bytes.len() as u64);
    for chunk in &mut chunks {
        hash = key(hash, u64::from_le_bytes(chunk.try_into().expect("a chunk has 8 bytes")));
    }
    let mut last = [0u8; 8];
    last[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
    key(hash, u64::from_le_bytes(last))
}

/// The sequence of uniform numbers that belongs to one key.
pub(crate) struct Uniform {
    key: u64,
    drawn: u64,
}

impl Uniform {
    pub(crate) fn new(key: u64) -> Self {
        Self { key, drawn: 0 }
    }

    /// The next number in [0, 1), with 53 random bits.
    pub(crate) fn draw(&mut self) -> f64 {
        self.drawn += 1;
        (key(self.key, self.drawn) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_numbers_have_the_moments_of_the_unit_interval() {
        let mut uniform = Uniform::new(7);
        let draws: Vec<f64> = (0..100_000).map(|_| uniform.draw()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let square = draws.iter().map(|draw| draw * draw).sum::<f64>() / draws.len() as f64;
        assert!(
            (mean - 0.5).abs() < 5e-3 && (square - 1.0 / 3.0).abs() < 5e-3,
            "mean {mean}, square {square}"
        );
    }

    #[test]
    fn fingerprints_see_length_and_every_byte() {
        let zeros = [0u8; 24];
        let mut seen: Vec<u64> = (0..=24).map(|len| fingerprint(&zeros[..len])).collect();
        for at in 0..24 {
            let mut bytes = zeros;
            bytes[at] = 1;
            seen.push(fingerprint(&bytes));
        }
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count);
    }
}
