//! A smooth bound: x becomes cap tanh(x / cap), which is close to x near 0 and stays within -cap to cap. Its slope is
//! 1 - (y / cap)^2 for the result y.

use crate::attr::Attr;
use crate::builder::Tensor;
use crate::ops::elementwise::Elementwise as E;

/// The bound on values; `None` leaves them unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cap(pub Option<f32>);

impl Cap {
    pub const NONE: Cap = Cap(None);

    pub fn is_none(self) -> bool {
        self.0.is_none()
    }

    pub fn apply(self, x: Tensor<'_>) -> Tensor<'_> {
        match self.0 {
            Some(cap) => x.scale(1.0 / cap as f64).map(E::Tanh).scale(cap as f64),
            None => x,
        }
    }
}

impl Attr for Cap {
    fn to_text(&self) -> String {
        self.0.map_or("none".into(), |cap| cap.to_string())
    }
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Cap::NONE),
            _ => f32::read(text).map(|cap| Cap(Some(cap))),
        }
    }
    fn omitted() -> Option<Self> {
        Some(Cap::NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_reads_back_equal() {
        for cap in [Cap::NONE, Cap(Some(50.0)), Cap(Some(0.3))] {
            assert_eq!(Cap::read(&cap.to_text()), Ok(cap));
        }
        assert!(Cap::read("wide").is_err());
        assert_eq!(Cap::omitted(), Some(Cap::NONE));
    }
}
