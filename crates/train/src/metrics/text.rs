//! How many bits a model needs for a byte of text, which compares models whose tokenisers differ.

use serde::{Deserialize, Serialize};

use super::null_is_nan;

/// The numbers of an evaluation on text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextMetrics {
    /// Bits of all predicted tokens, ends of documents among them, by the bytes of text that they stand for.
    #[serde(deserialize_with = "null_is_nan")]
    pub bits_per_byte: f64,
}

impl TextMetrics {
    /// Of a mean loss in nats a token, where tokens have this many bytes in the mean.
    pub fn of(loss: f64, bytes_per_token: f64) -> TextMetrics {
        TextMetrics { bits_per_byte: loss / std::f64::consts::LN_2 / bytes_per_token }
    }

    /// One line for people.
    pub fn words(&self) -> String {
        format!("{:.4} bits a byte", self.bits_per_byte)
    }
}
