//! Images on their way into a model: bytes to patches, classes to a loss. What vision models share.
//!
//! B images of Y rows and X columns of pixels, P pixels of a patch a side, G patches of an image, C classes. Pixels come as
//! they are decoded, [B, Y, X, 3] from the top row, red, green and blue together; they cross memory as bytes, and are normalised where they
//! are cut.

use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::ops::resample::PART;
use flatout_ir::{Builder, Class, DType, Init, Tensor};

/// Red, green and blue.
pub const CHANNELS: usize = 3;
/// The slot that holds all images of a small set, u8 [images, rows, columns, 3].
pub const TABLE: &str = "images";

/// What a graph over images is for. Results are `loss`, the weighted sum over images, `weight`, the sum of their weights,
/// and, where nothing is drawn, `class_logits` [B, C].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImageForm {
    pub images: usize,
    /// What is dropped at random is dropped.
    pub dropout: bool,
    /// The share of a target that is spread over all classes.
    pub smoothing: f64,
    /// Images are mixed with others of the batch: inputs `mix_with`, `mix_share` and `mix_box` say with which and how.
    pub mix: bool,
    /// Pixels are parts of images that lie on the device, so many of so many rows and columns: the input `parts` says
    /// which.
    pub table: Option<[usize; 3]>,
}

impl ImageForm {
    /// Images as they are, for evaluation.
    pub fn plain(images: usize) -> ImageForm {
        ImageForm { images, dropout: false, smoothing: 0.0, mix: false, table: None }
    }
}

/// What the host writes before a run.
pub struct Inputs<'g> {
    b: &'g Builder,
    form: ImageForm,
    /// Rows and columns of pixels.
    sides: [usize; 2],
    /// u8 [B, Y, X, 3].
    pixels: Tensor<'g>,
    /// (rng, rows [B, 2]) of what is dropped: a row is the sample's number and 0.
    draw: Option<(Tensor<'g>, Tensor<'g>)>,
    mix: Option<Mix<'g>>,
}

/// Image i becomes `share` of itself and the rest of image `with`: by pixel values, or by the box of pixels that is
/// the other's where the box is not empty.
#[derive(Clone, Copy)]
struct Mix<'g> {
    /// i32 [B].
    with: Tensor<'g>,
    /// f32 [B].
    share: Tensor<'g>,
    /// i32 [B, 4]: first row, row behind the last, first column, column behind the last.
    cut: Tensor<'g>,
}

impl<'g> Inputs<'g> {
    /// Inputs of images of so many rows and columns of pixels; `draws` says whether the model has something to drop.
    pub fn new(b: &'g Builder, sides: [usize; 2], form: ImageForm, draws: bool) -> Self {
        let n = form.images;
        let pixels = match form.table {
            None => b.input("pixels", DType::U8, &[n, sides[0], sides[1], CHANNELS]),
            Some([images, rows, columns]) => {
                let dims = [images, rows, columns, CHANNELS];
                let parts = b.input("parts", DType::I32, &[n, PART]);
                // The model behind it draws what it draws of pixels.
                b.uncounted(|| {
                    let table = b.read(b.slot(TABLE, Class::Const, DType::U8, &dims, Init::Data));
                    table.resample(parts, sides)
                })
            }
        };
        let draw = (form.dropout && draws)
            .then(|| (b.input("rng", DType::I32, &[3]), b.input("rows", DType::I32, &[n, 2])));
        let mix = form.mix.then(|| Mix {
            with: b.input("mix_with", DType::I32, &[n]),
            share: b.input("mix_share", DType::F32, &[n]),
            cut: b.input("mix_box", DType::I32, &[n, 4]),
        });
        Inputs { b, form, sides, pixels, draw, mix }
    }

    /// Patches [B G, P P 3] in the order of rows, normalised by channel: (x / 255 - mean) / std.
    pub fn patches(&self, patch: usize, mean: &[f64; 3], std: &[f64; 3]) -> Tensor<'g> {
        let (n, [rows, columns]) = (self.form.images, self.sides.map(|side| side / patch));
        let factor = Channels::new(self.b, std.map(|std| 1.0 / (255.0 * std)));
        let shift = Channels::new(self.b, [0, 1, 2].map(|c| -mean[c] / std[c]));
        let cut = self.pixels.reshape(&[n, rows, patch, columns, patch, CHANNELS]);
        let cut = cut.transpose(&[0, 1, 3, 2, 4, 5]).cast(DType::F32); // [B, Y / P, X / P, P, P, 3]
        let cut = match self.mix {
            Some(mix) => self.mixed(cut, mix),
            None => cut,
        };
        let normal = factor.with(cut, |x, f| x.scale(f), |x, f| x * f);
        let normal = shift.with(normal, |x, s| x.offset(s), |x, s| x + s);
        normal.reshape(&[n * rows * columns, patch * patch * CHANNELS])
    }

    /// Cut images [B, Y / P, X / P, P, P, 3] with parts of others in them.
    fn mixed(&self, cut: Tensor<'g>, mix: Mix<'g>) -> Tensor<'g> {
        let (b, dims) = (self.b, cut.dims());
        let (n, patch) = (dims[0], dims[3]);
        let pixels: usize = dims[1..].iter().product();
        let other = cut.reshape(&[n, pixels]).gather(mix.with).reshape(&dims);
        let to_all = |x: Tensor<'g>| x.reshape(&[n, 1, 1, 1, 1, 1]).broadcast(&dims);
        // Which row, then which column of the image an element is in.
        let place = |patches: usize, within: usize| {
            b.iota(DType::I32, &dims, patches).scale(patch as f64) + b.iota(DType::I32, &dims, within)
        };
        let bound = |i: usize| to_all(mix.cut.slice(1, i, 1));
        let (row, column) = (place(1, 3), place(2, 4));
        let inside = bound(0).less_equal(row) * row.less(bound(1));
        let inside = inside * bound(2).less_equal(column) * column.less(bound(3));
        let rows = mix.cut.slice(1, 1, 1) - mix.cut.slice(1, 0, 1);
        let has_box = b.fill(0.0, DType::I32, &[n, 1]).less(rows).cast(DType::F32);
        let share = to_all(mix.share);
        let blended = cut * share + other * share.scale(-1.0).offset(1.0);
        let pasted = inside.cast(DType::F32).select(other, cut);
        to_all(has_box).select(pasted, blended)
    }

    /// Elements of every image dropped with probability p: x [B, ..].
    pub fn drop(&self, x: Tensor<'g>, p: f64) -> Tensor<'g> {
        match self.draw {
            Some((rng, rows)) => x.dropout(p as f32, rng, rows),
            None => x,
        }
    }

    /// (rng, rows [B N, 2]) of what is dropped of every token, where anything is: the tokens of an image one after another.
    pub fn token_draw(&self, tokens: usize) -> Option<(Tensor<'g>, Tensor<'g>)> {
        let (rng, rows) = self.draw?;
        let all = [self.form.images, tokens];
        let sample = rows.slice(1, 0, 1).broadcast(&all).reshape(&[all[0] * tokens, 1]);
        let token = self.b.iota(DType::I32, &all, 1).reshape(&[all[0] * tokens, 1]);
        Some((rng, self.b.concat(&[sample, token], 1)))
    }

    /// A whole branch y [B N, D] of some images left out, with probability p, and stretched in the others.
    pub fn drop_path(&self, y: Tensor<'g>, p: f64) -> Tensor<'g> {
        if self.draw.is_none() || p == 0.0 {
            return y;
        }
        let (n, dims) = (self.form.images, y.dims());
        let kept = self.drop(self.b.fill(1.0, DType::F32, &[n, 1]), p);
        let kept = kept.reshape(&[n, 1, 1]);
        (y.reshape(&[n, dims[0] / n, dims[1]]) * kept).reshape(&dims)
    }

    /// Loss and its weight of logits [B, C], as the graph's results.
    ///
    /// With q the target's distribution over classes, an image's loss is lse - sum of q * logits.
    pub fn finish(&self, logits: Tensor<'g>) {
        let (b, dims) = (self.b, logits.dims());
        let (n, classes) = (dims[0], dims[1]);
        let labels = b.input("labels", DType::I32, &[n]);
        let weights = b.input("label_weights", DType::F32, &[n]);
        // In f32 whatever products are in: a class's probability needs the digits.
        let wide = logits.map(E::Cast(DType::F32));
        let class = b.iota(DType::F32, &dims, 1);
        let hot = |labels: Tensor<'g>| class.equal(labels.cast(DType::F32).reshape(&[n, 1]).broadcast(&dims));
        let mut target = hot(labels);
        if let Some(mix) = self.mix {
            // gather reads rows of a table.
            let other = labels.reshape(&[n, 1]).gather(mix.with).reshape(&[n]);
            let share = mix.share.reshape(&[n, 1]);
            target = target * share + hot(other) * share.scale(-1.0).offset(1.0);
        }
        if self.form.smoothing > 0.0 {
            let spread = self.form.smoothing;
            target = target.scale(1.0 - spread).offset(spread / classes as f64);
        }
        let shift = wide.reduce(1, Fold::Max);
        let lse = shift + (wide - shift).exp().sum(1).log();
        let loss = (lse - (target * wide).sum(1)).reshape(&[n]);
        b.result("loss", (weights * loss).sum(0));
        b.result("weight", weights.sum(0));
        if !self.form.dropout {
            b.result("class_logits", logits);
        }
    }
}

/// A number for every channel of [.., 3]: one, where they share it, or a row of three. Rows are made before the pixels, so
/// that nothing parts what is done to those.
enum Channels<'g> {
    Same(f64),
    Row(Tensor<'g>),
}

impl<'g> Channels<'g> {
    fn new(b: &'g Builder, values: [f64; CHANNELS]) -> Self {
        if values.iter().all(|value| *value == values[0]) {
            return Channels::Same(values[0]);
        }
        Channels::Row(b.concat(&values.map(|value| b.fill(value, DType::F32, &[1])), 0))
    }

    fn with(
        &self,
        x: Tensor<'g>,
        one: impl Fn(Tensor<'g>, f64) -> Tensor<'g>,
        row: impl Fn(Tensor<'g>, Tensor<'g>) -> Tensor<'g>,
    ) -> Tensor<'g> {
        match *self {
            Channels::Same(value) => one(x, value),
            Channels::Row(values) => {
                let mut dims = vec![1; x.dims().len()];
                *dims.last_mut().expect("images have axes") = CHANNELS;
                row(x, values.reshape(&dims))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use flatout_ir::oracle;

    use super::*;

    fn run(b: Builder, values: &[(&str, Vec<f64>)]) -> HashMap<String, Vec<f64>> {
        let values: HashMap<String, Vec<f64>> =
            values.iter().map(|(name, x)| (name.to_string(), x.clone())).collect();
        oracle::run(&b.finish(), &values).results.into_iter().collect()
    }

    /// An image of 4 x 4 whose red is the pixel's number, green 100 and blue 255, in patches of 2 x 2.
    #[test]
    fn pixels_are_normalised_and_cut_by_rows() {
        let b = Builder::new();
        let inputs = Inputs::new(&b, [4, 4], ImageForm::plain(1), false);
        b.result("y", inputs.patches(2, &[0.0, 0.5, 0.25], &[1.0 / 255.0, 1.0, 0.5]));
        let pixels: Vec<f64> = (0..16).flat_map(|i| [i as f64, 100.0, 255.0]).collect();
        let y = &run(b, &[("pixels", pixels)])["y"];
        let red: Vec<f64> = y.iter().step_by(3).map(|x| x.round()).collect();
        assert_eq!(red, [0., 1., 4., 5., 2., 3., 6., 7., 8., 9., 12., 13., 10., 11., 14., 15.]);
        assert!((y[1] - (100.0 / 255.0 - 0.5)).abs() < 1e-6 && (y[2] - 1.5).abs() < 1e-6, "{y:?}");
    }

    /// Two images of 2 x 2, all 0 and all 255: the first is blended with the second, which gets a column of the first.
    #[test]
    fn images_are_blended_or_pasted_and_their_classes_with_them() {
        let b = Builder::new();
        let form = ImageForm { mix: true, ..ImageForm::plain(2) };
        let inputs = Inputs::new(&b, [2, 2], form, false);
        b.result("y", inputs.patches(1, &[0.0; 3], &[1.0; 3]));
        inputs.finish(b.input("logits", DType::F32, &[2, 2]));
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
        // ln 2 of the first; of the second half of each class: lse - 0.5 ln 3 = ln 4 - 0.5 ln 3, twice.
        let wanted = 2f64.ln() + 2.0 * (4f64.ln() - 0.5 * 3f64.ln());
        assert!(close(&results["loss"], &[wanted]) && results["weight"] == [3.0], "{:?}", results["loss"]);
    }

    #[test]
    fn a_smoothed_target_has_a_share_of_every_class() {
        let b = Builder::new();
        let form = ImageForm { smoothing: 0.2, ..ImageForm::plain(1) };
        let inputs = Inputs::new(&b, [1, 1], form, false);
        inputs.finish(b.input("logits", DType::F32, &[1, 4]));
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
