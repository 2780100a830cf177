//! The rotary frequencies of a config: validation of its keys, and the frequencies that they define.

use flatout_ir::ops::frequency::{Factors, Frequencies, Scaling};

use super::{DecoderConfig, Positions, RopeScaling};

impl DecoderConfig {
    /// The frequencies of a layer's rotation, for a valid config.
    pub fn frequencies(&self, layer: usize) -> Frequencies {
        let mut theta_of_all = self.rope_theta;
        if let Some(theta) = self.rope_local_theta.filter(|_| self.is_local(layer)) {
            return Frequencies::from(theta);
        }
        let factor = self.rope_factor.unwrap_or(1.0);
        let original = self.rope_original_context.unwrap_or(self.context) as f64;
        let scaling = match self.rope_scaling {
            RopeScaling::None => Scaling::None,
            RopeScaling::Linear => Scaling::Linear { factor },
            RopeScaling::Llama3 => Scaling::Llama3 {
                factor,
                low: self.rope_low_freq_factor,
                high: self.rope_high_freq_factor,
                original,
            },
            RopeScaling::Yarn => Scaling::Yarn {
                factor,
                fast: self.rope_beta_fast,
                slow: self.rope_beta_slow,
                original,
                amplitude: self.rope_attention_factor.unwrap_or(1.0 + 0.1 * factor.ln()),
            },
            // The base grows with the excess of the context over the original one.
            RopeScaling::Dynamic => {
                let longer = (self.context as f64).max(original);
                let size = self.rope_size() as f64;
                theta_of_all *= (factor * longer / original - (factor - 1.0)).powf(size / (size - 2.0));
                Scaling::None
            }
            RopeScaling::Longrope => {
                let factors = match self.context as f64 > original {
                    true => &self.rope_long_factors,
                    false => &self.rope_short_factors,
                };
                let amplitude = self.rope_attention_factor.unwrap_or(longrope_amplitude(factor, original));
                let factors = Factors::of(factors.as_deref().unwrap_or_default());
                Scaling::Divided { factors, amplitude }
            }
        };
        Frequencies { scaling, ..Frequencies::from(theta_of_all) }
    }

    /// Number of elements of a head that rotate.
    pub fn rope_size(&self) -> usize {
        self.rope_size.unwrap_or(self.head_size())
    }

    /// Whether queries and keys of a layer rotate.
    pub fn rotates_in(&self, layer: usize) -> bool {
        let is_listed = self.unrotated_layers.as_ref().is_some_and(|layers| layers.contains(&layer));
        self.positions == Positions::Rope && !is_listed
    }

    /// Whether the keys of the scaling are consistent; otherwise one sentence that names one of them.
    pub(super) fn validate_rope(&self) -> Result<(), String> {
        let scaling = self.rope_scaling;
        let is_long = scaling == RopeScaling::Longrope;
        let needs_original = !matches!(scaling, RopeScaling::None | RopeScaling::Linear);
        let has_amplitude = is_long || scaling == RopeScaling::Yarn;
        let given = [
            ("rope_factor", self.rope_factor.is_some(), scaling != RopeScaling::None),
            ("rope_original_context", self.rope_original_context.is_some(), needs_original),
            ("rope_attention_factor", self.rope_attention_factor.is_some(), has_amplitude),
            ("rope_short_factors", self.rope_short_factors.is_some(), is_long),
            ("rope_long_factors", self.rope_long_factors.is_some(), is_long),
        ];
        for (key, is_given, has_use) in given {
            if is_given && !has_use {
                return Err(format!("`model.{key}` has no use while `model.rope_scaling` is {scaling}"));
            }
        }
        self.validate_rope_size()?;
        if scaling == RopeScaling::None {
            return Ok(());
        }
        if self.positions != Positions::Rope {
            return Err(format!(
                "`model.rope_scaling` is {scaling}, and `model.positions` is {}: only rope has frequencies",
                self.positions
            ));
        }
        match self.rope_factor {
            None => return Err(format!("`model.rope_factor` is missing: `model.rope_scaling` is {scaling}")),
            Some(factor) if !(factor.is_finite() && factor >= 1.0) => {
                return Err(format!("`model.rope_factor` is {factor} and must be 1 or more"));
            }
            Some(_) => {}
        }
        match self.rope_original_context {
            Some(0) => return Err("`model.rope_original_context` is 0 and must be at least 1".into()),
            None if needs_original => {
                return Err(format!(
                    "`model.rope_original_context` is missing: {scaling} asks what context the model was trained at"
                ));
            }
            _ => {}
        }
        let (low, high, bounds) = match scaling {
            RopeScaling::Llama3 => {
                let keys = "`model.rope_low_freq_factor` and `model.rope_high_freq_factor`";
                (self.rope_low_freq_factor, self.rope_high_freq_factor, keys)
            }
            RopeScaling::Yarn => (
                self.rope_beta_slow,
                self.rope_beta_fast,
                "`model.rope_beta_slow` and `model.rope_beta_fast`",
            ),
            RopeScaling::Longrope => return self.validate_longrope(),
            RopeScaling::Dynamic if self.rope_size() < 4 => {
                return Err(format!(
                    "{} elements of a head rotate, and dynamic scaling wants at least 4",
                    self.rope_size()
                ));
            }
            RopeScaling::None | RopeScaling::Linear | RopeScaling::Dynamic => return Ok(()),
        };
        if !(low > 0.0 && low < high && high.is_finite()) {
            return Err(format!(
                "{bounds} are {low} and {high}: the first must be above 0 and below the second"
            ));
        }
        if scaling == RopeScaling::Yarn && self.rope_theta <= 1.0 {
            return Err(format!("`model.rope_theta` is {} and must be above 1 for yarn", self.rope_theta));
        }
        self.validate_amplitude()
    }

    fn validate_amplitude(&self) -> Result<(), String> {
        match self.rope_attention_factor {
            Some(factor) if !(factor.is_finite() && factor > 0.0) => {
                Err(format!("`model.rope_attention_factor` is {factor} and must be a number above 0"))
            }
            _ => Ok(()),
        }
    }

    fn validate_rope_size(&self) -> Result<(), String> {
        let Some(size) = self.rope_size else { return Ok(()) };
        let head_size = self.head_size();
        if self.positions != Positions::Rope {
            return Err(format!(
                "`model.rope_size` has no use while `model.positions` is {}",
                self.positions
            ));
        }
        if size == 0 || size > head_size || !size.is_multiple_of(2) {
            return Err(format!(
                "`model.rope_size` is {size}, and must be an even number from 2 to {head_size}, the size of a head"
            ));
        }
        match self.rope_sections {
            Some(_) => {
                Err("`model.rope_size` has no use with `model.rope_sections`, which cut whole heads".into())
            }
            None => Ok(()),
        }
    }

    fn validate_longrope(&self) -> Result<(), String> {
        let pairs = self.rope_size() / 2;
        let lists = [
            ("rope_short_factors", &self.rope_short_factors),
            ("rope_long_factors", &self.rope_long_factors),
        ];
        for (key, factors) in lists {
            let Some(factors) = factors else {
                return Err(format!("`model.{key}` is missing: longrope divides each frequency by one"));
            };
            if factors.len() != pairs || factors.iter().any(|factor| !(factor.is_finite() && *factor > 0.0)) {
                return Err(format!(
                    "`model.{key}` must be {pairs} numbers above 0, one for each frequency of a head"
                ));
            }
        }
        self.validate_amplitude()
    }
}

/// LongRoPE's factor on cosines and sines for a context `factor` times as long.
pub(crate) fn longrope_amplitude(factor: f64, original: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn() -> DecoderConfig {
        DecoderConfig {
            width: 64,
            layers: 1,
            heads: 1,
            ffn: 64,
            vocab: 8,
            context: 4096,
            rope_scaling: RopeScaling::Yarn,
            rope_factor: Some(4.0),
            rope_original_context: Some(1024),
            ..DecoderConfig::default()
        }
    }

    #[test]
    fn keys_become_frequencies() {
        let plain = DecoderConfig {
            rope_scaling: RopeScaling::None,
            rope_factor: None,
            rope_original_context: None,
            ..yarn()
        };
        assert_eq!(plain.validate(), Ok(()));
        assert_eq!(plain.frequencies(0), Frequencies::from(1e4));
        assert_eq!(yarn().validate(), Ok(()));
        assert_eq!(yarn().frequencies(0).amplitude(), 1.0 + 0.1 * 4f64.ln());
        let told = DecoderConfig { rope_attention_factor: Some(1.5), ..yarn() };
        assert_eq!(told.frequencies(0).amplitude(), 1.5);
        let llama3 = DecoderConfig { rope_scaling: RopeScaling::Llama3, ..yarn() };
        assert_eq!(llama3.validate(), Ok(()));
        let scaling = Scaling::Llama3 { factor: 4.0, low: 1.0, high: 4.0, original: 1024.0 };
        assert_eq!(llama3.frequencies(0).scaling, scaling);
    }

    #[test]
    fn rows_beyond_the_original_context_have_other_frequencies() {
        let long = DecoderConfig {
            rope_scaling: RopeScaling::Longrope,
            rope_short_factors: Some(vec![1.5; 32]),
            rope_long_factors: Some(vec![6.0; 32]),
            ..yarn()
        };
        assert_eq!(long.validate(), Ok(()));
        let short = DecoderConfig { context: 1024, ..long.clone() };
        let plain = Frequencies::from(1e4).turns(32);
        assert_eq!(long.frequencies(0).turns(32)[5], plain[5] / 6.0);
        assert_eq!(short.frequencies(0).turns(32)[5], plain[5] / 1.5);
        let amplitude = (1.0 + 4f64.ln() / 1024f64.ln()).sqrt();
        assert_eq!([long, short].map(|c| c.frequencies(0).amplitude()), [amplitude; 2]);
        let dynamic = DecoderConfig { rope_scaling: RopeScaling::Dynamic, ..yarn() };
        assert_eq!(dynamic.validate(), Ok(()));
        let theta = 1e4 * 13f64.powf(64.0 / 62.0);
        assert!(
            (dynamic.frequencies(0).theta / theta - 1.0).abs() < 1e-12,
            "four times as long, by 4: 16 - 3"
        );
        let kept = DecoderConfig { context: 512, ..dynamic };
        assert_eq!(kept.frequencies(0), Frequencies::from(1e4));
    }

    #[test]
    fn inconsistent_keys_are_refused_by_name() {
        let refused = |change: fn(&mut DecoderConfig), words: &str| {
            let mut config = yarn();
            change(&mut config);
            let sentence = config.validate().expect_err(words);
            assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
        };
        refused(|c| c.rope_scaling = RopeScaling::None, "`model.rope_factor` has no use");
        refused(|c| c.rope_scaling = RopeScaling::Linear, "`model.rope_original_context` has no use");
        refused(|c| c.positions = Positions::Learned, "only rope has frequencies");
        refused(|c| c.rope_factor = None, "`model.rope_factor` is missing");
        refused(|c| c.rope_factor = Some(0.5), "`model.rope_factor` is 0.5 and must be 1 or more");
        refused(|c| c.rope_factor = Some(f64::NAN), "`model.rope_factor` is NaN");
        refused(|c| c.rope_original_context = None, "`model.rope_original_context` is missing");
        refused(|c| c.rope_original_context = Some(0), "`model.rope_original_context` is 0");
        refused(|c| c.rope_beta_fast = 0.5, "`model.rope_beta_fast` are 1 and 0.5");
        refused(|c| c.rope_attention_factor = Some(0.0), "`model.rope_attention_factor` is 0");
        refused(|c| c.rope_size = Some(7), "even number from 2 to 64");
        refused(|c| c.rope_size = Some(66), "even number from 2 to 64");
        refused(|c| c.rope_long_factors = Some(vec![]), "`model.rope_long_factors` has no use");
        refused(|c| c.rope_scaling = RopeScaling::Longrope, "`model.rope_short_factors` is missing");
        refused(
            |c| (c.rope_scaling, c.rope_short_factors) = (RopeScaling::Longrope, Some(vec![1.0; 31])),
            "`model.rope_short_factors` must be 32 numbers above 0",
        );
        refused(|c| c.rope_theta = 0.5, "must be above 1 for yarn");
        refused(
            |c| (c.rope_scaling, c.rope_low_freq_factor) = (RopeScaling::Llama3, 4.0),
            "`model.rope_high_freq_factor` are 4 and 4",
        );
        refused(
            |c| (c.rope_scaling, c.rope_attention_factor) = (RopeScaling::Llama3, Some(1.0)),
            "`model.rope_attention_factor` has no use while `model.rope_scaling` is llama3",
        );
    }
}
