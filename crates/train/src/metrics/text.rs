//! Bits per byte of text, a loss that is comparable between tokenisers.

use serde::{Deserialize, Serialize};

use super::null_is_nan;

/// Metrics of an evaluation on text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextMetrics {
    /// Bits of all predicted tokens, ends of documents among them, divided by the bytes of text they represent.
    #[serde(deserialize_with = "null_is_nan")]
    pub bits_per_byte: f64,
}

impl TextMetrics {
    /// From a mean loss in nats per token, and the mean number of bytes per token.
    pub fn of(loss: f64, bytes_per_token: f64) -> TextMetrics {
        TextMetrics { bits_per_byte: loss / std::f64::consts::LN_2 / bytes_per_token }
    }

    /// One line for people.
    pub fn words(&self) -> String {
        format!("{:.4} bits a byte", self.bits_per_byte)
    }
}
