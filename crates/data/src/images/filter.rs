//! The filters for resizing images.

use flatout_settings::choice;

choice! {
    /// A filter with antialiasing: where an image shrinks, the filter widens by the same factor, so that every pixel counts.
    pub enum Filter {
        /// The triangle filter, over two pixels.
        Bilinear = "bilinear",
        /// The cubic filter with coefficient -1/2, over four pixels.
        Bicubic = "bicubic",
        /// The Lanczos filter (windowed sinc), over six pixels.
        Lanczos = "lanczos",
    }
}

impl Filter {
    /// The support radius at scale 1.
    pub(crate) fn reach(self) -> f64 {
        match self {
            Filter::Bilinear => 1.0,
            Filter::Bicubic => 2.0,
            Filter::Lanczos => 3.0,
        }
    }

    /// The unnormalised weight of a pixel at a distance.
    pub(crate) fn weight(self, distance: f64) -> f64 {
        let x = distance.abs();
        match self {
            _ if x >= self.reach() => 0.0,
            Filter::Bilinear => 1.0 - x,
            Filter::Bicubic if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
            Filter::Bicubic => ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0,
            Filter::Lanczos => sinc(x) * sinc(x / 3.0),
        }
    }
}

fn sinc(x: f64) -> f64 {
    let angle = std::f64::consts::PI * x;
    if angle == 0.0 { 1.0 } else { angle.sin() / angle }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pixel_is_itself_and_neighbours_meet() {
        for filter in Filter::ALL {
            assert_eq!(filter.weight(0.0), 1.0);
            assert!((1..4).all(|at| filter.weight(f64::from(at)).abs() < 1e-15), "{filter}");
            let near = (filter.weight(1.0 - 1e-9) - filter.weight(1.0 + 1e-9)).abs();
            assert!(near < 1e-8, "{filter} has no step at 1");
        }
        assert_eq!(Filter::Bicubic.weight(0.5), 0.5625);
        assert_eq!(Filter::Bicubic.weight(-1.5), -0.0625);
    }
}
