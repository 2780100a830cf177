//! The image inputs of a graph: pixels as bytes or as crops of a table, and the inputs of dropout and mixing.
//!
//! B images of Y rows and X columns of pixels.

use flatout_ir::ops::resample::PART;
use flatout_ir::{Builder, Class, DType, Init, Tensor};

use crate::form::ImageForm;
use crate::layers::Draw;

/// Red, green and blue.
pub const CHANNELS: usize = 3;
/// The slot that holds all images of a small set, u8 [images, rows, columns, 3].
pub const TABLE: &str = "images";

/// The inputs that the host writes before a run, except for the labels.
pub struct Inputs<'g> {
    /// u8 [B, Y, X, 3], top row first, red, green and blue interleaved.
    pub pixels: Tensor<'g>,
    /// The coordinates of dropout; each row is the sample's index and 0.
    pub draw: Option<Draw<'g>>,
    pub mix: Option<Mix<'g>>,
}

/// Mixing: image i becomes `share` of itself plus the rest of image `with`, or, where the box `cut` is not empty, itself with
/// the other's pixels in the box.
#[derive(Clone, Copy)]
pub struct Mix<'g> {
    /// i32 [B].
    pub with: Tensor<'g>,
    /// f32 [B].
    pub share: Tensor<'g>,
    /// i32 [B, 4]: first row, end row (exclusive), first column, end column (exclusive).
    pub cut: Tensor<'g>,
}

impl<'g> Inputs<'g> {
    /// Inputs of images of `sides` rows and columns of pixels; `draws` says whether the model has dropout.
    pub fn new(b: &'g Builder, sides: [usize; 2], form: &ImageForm, draws: bool) -> Self {
        let n = form.images;
        let pixels = match form.table {
            None => b.input("pixels", DType::U8, &[n, sides[0], sides[1], CHANNELS]),
            Some([images, rows, columns]) => {
                let dims = [images, rows, columns, CHANNELS];
                let parts = b.input("parts", DType::I32, &[n, PART]);
                // Random numbers of the model must not depend on the kind of input.
                b.uncounted(|| {
                    let table = b.read(b.slot(TABLE, Class::Const, DType::U8, &dims, Init::Data));
                    table.resample(parts, sides)
                })
            }
        };
        let draw = (form.dropout && draws).then(|| Draw {
            rng: b.input("rng", DType::I32, &[3]),
            rows: b.input("rows", DType::I32, &[n, 2]),
        });
        let mix = form.mix.then(|| Mix {
            with: b.input("mix_with", DType::I32, &[n]),
            share: b.input("mix_share", DType::F32, &[n]),
            cut: b.input("mix_box", DType::I32, &[n, 4]),
        });
        Inputs { pixels, draw, mix }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use flatout_ir::oracle;

    use super::*;
    use crate::layers::patches::patches;
    use crate::objectives::image_classes;

    fn run(b: Builder, values: &[(&str, Vec<f64>)]) -> HashMap<String, Vec<f64>> {
        let values: HashMap<String, Vec<f64>> =
            values.iter().map(|(name, x)| (name.to_string(), x.clone())).collect();
        oracle::run(&b.finish(), &values).results.into_iter().collect()
    }

    /// A 4 x 4 image whose red is the pixel's index, green 100 and blue 255, in patches of 2 x 2.
    #[test]
    fn pixels_are_normalised_and_cut_by_rows() {
        let b = Builder::new();
        let inputs = Inputs::new(&b, [4, 4], &ImageForm::plain(1), false);
        b.result("y", patches(inputs.pixels, None, 2, &[0.0, 0.5, 0.25], &[1.0 / 255.0, 1.0, 0.5]));
        let pixels: Vec<f64> = (0..16).flat_map(|i| [i as f64, 100.0, 255.0]).collect();
        let y = &run(b, &[("pixels", pixels)])["y"];
        let red: Vec<f64> = y.iter().step_by(3).map(|x| x.round()).collect();
        assert_eq!(red, [0., 1., 4., 5., 2., 3., 6., 7., 8., 9., 12., 13., 10., 11., 14., 15.]);
        assert!((y[1] - (100.0 / 255.0 - 0.5)).abs() < 1e-6 && (y[2] - 1.5).abs() < 1e-6, "{y:?}");
    }

    /// Two 2 x 2 images, all 0 and all 255: the first is blended with the second, and a column of the first is pasted into the
    /// second.
    #[test]
    fn images_are_blended_or_pasted_and_their_classes_with_them() {
        let b = Builder::new();
        let form = ImageForm { mix: true, ..ImageForm::plain(2) };
        let inputs = Inputs::new(&b, [2, 2], &form, false);
        b.result("y", patches(inputs.pixels, inputs.mix, 1, &[0.0; 3], &[1.0; 3]));
        image_classes::loss(&b, b.input("logits", DType::F32, &[2, 2]), inputs.mix, &form);
        let pixels = [vec![0.0; 12], vec![255.0; 12]].concat();
        let results = run(
            b,
            &[
                ("pixels", pixels),
                ("mix_with", vec![1.0, 0.0]),
                ("mix_share", vec![0.75, 0.5]),
                ("mix_box", vec![0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 1.0, 2.0]),
                ("logits", vec![0.0, 0.0, 0.0, 3f64.ln()]),
                ("labels", vec![0.0, 1.0]),
                ("label_weights", vec![1.0, 2.0]),
            ],
        );
        let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(close(&results["y"][..12], &[0.25; 12]), "{:?}", results["y"]);
        let columns: Vec<f64> = results["y"][12..].iter().step_by(3).copied().collect();
        assert!(close(&columns, &[1.0, 0.0, 1.0, 0.0]), "{columns:?}");
        // ln 2 for the first image; for the second, half of each class: lse - 0.5 ln 3 = ln 4 - 0.5 ln 3, counted twice.
        let wanted = 2f64.ln() + 2.0 * (4f64.ln() - 0.5 * 3f64.ln());
        assert!(close(&results["loss"], &[wanted]) && results["weight"] == [3.0], "{:?}", results["loss"]);
    }

    #[test]
    fn a_smoothed_target_has_a_share_of_every_class() {
        let b = Builder::new();
        let form = ImageForm { smoothing: 0.2, ..ImageForm::plain(1) };
        let inputs = Inputs::new(&b, [1, 1], &form, false);
        image_classes::loss(&b, b.input("logits", DType::F32, &[1, 4]), inputs.mix, &form);
        let logits = [2.0, 0.0, -1.0, 0.5];
        let results = run(
            b,
            &[
                ("pixels", vec![0.0; 3]),
                ("logits", logits.to_vec()),
                ("labels", vec![3.0]),
                ("label_weights", vec![1.0]),
            ],
        );
        let lse = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
        let wanted = lse - 0.8 * 0.5 - 0.05 * logits.iter().sum::<f64>();
        assert!((results["loss"][0] - wanted).abs() < 1e-6);
    }
}
