//! BDH: sparse latents of every token attend to themselves, gate each other and come back to the state; one layer's weights
//! serve every application. Images come as patches with a token for the whole before them, texts as tokens.
//!
//! B images, T tokens in all, D width, H heads, N latents of a head, C classes. Norms have no weights.

use flatout_ir::ops::attention::{Masking, Segments};
use flatout_ir::ops::frequency::Frequencies;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::linear_attention::{Keys, LinearAttend, LinearMask};
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::rope::{Pairs, RopeSpec};
use flatout_ir::{Builder, DType, Graph, Init, Tensor};

use crate::config::{BdhConfig, BdhResidual, Head};
use crate::patches::{CHANNELS, patches};
use crate::score::classify;

/// What the model is built to compute, with its static extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Of images: results `loss` and `weight`, and `class_logits` [B, C] where nothing is dropped.
    Classes { images: usize, dropout: bool },
    /// Of texts: results `loss` and `weight` of rows of `len` tokens.
    Loss { rows: usize, len: usize, dropout: bool },
    /// Of texts: result `logits` [T, V].
    Logits { rows: usize, len: usize },
}

/// Pixels are brought from 0..1 to -1..1.
const MEAN: f64 = 0.5;
const STD: f64 = 0.5;
const POSITIONS_STD: f32 = 0.02;

/// The graph in one form. Inputs are `pixels`, `labels` and `label_weights`, or `tokens`, `positions`, `targets` and
/// `weights`; with dropout also `rng` and `rows`.
pub fn build(c: &BdhConfig, form: Form) -> Graph {
    let of_images = matches!(form, Form::Classes { .. });
    assert_eq!(of_images, c.head == Head::Classes, "{form:?} is no form of a head of {}", c.head);
    let b = Builder::new();
    let (rows, len, dropout) = match form {
        Form::Classes { images, dropout } => (images, c.image_tokens(), dropout),
        Form::Loss { rows, len, dropout } => (rows, len, dropout),
        Form::Logits { rows, len } => (rows, len, false),
    };
    let t = rows * len;
    let draw = (dropout && c.dropout > 0.0)
        .then(|| (b.input("rng", DType::I32, &[3]), b.input("rows", DType::I32, &[t, 2])));
    let positions = match of_images {
        true => b.iota(DType::I32, &[rows, len], 1).reshape(&[1, t]),
        false => b.input("positions", DType::I32, &[1, t]),
    };
    let mask = if of_images { LinearMask::Full } else { LinearMask::Strict };
    let mut x = match of_images {
        true => image_tokens(&b, c, rows),
        false => {
            let embedding = b.scope("embed", || b.param("weight", &[c.vocab, c.width], normal()));
            b.scope("embed", || embedding.gather(b.input("tokens", DType::I32, &[t])))
        }
    };
    let model = Bdh { c, layer: Layer::new(&b, c), positions, draw, len, mask };
    for i in 0..c.layers {
        x = b.scope(&format!("applications.{i}"), || model.apply(x));
    }
    match form {
        Form::Classes { images, dropout } => b.scope("score", || {
            let whole = x.reshape(&[images, len, c.width]).slice(1, 0, 1).reshape(&[images, c.width]);
            classify(&b, model.norm(whole), c.classes(), normal(), dropout);
        }),
        Form::Loss { .. } | Form::Logits { .. } => b.scope("head", || {
            let head = b.param("weight", &[c.vocab, c.width], normal());
            if let Form::Logits { .. } = form {
                return b.result("logits", x.linear(head));
            }
            let (target, weight) =
                (b.input("targets", DType::I32, &[t]), b.input("weights", DType::F32, &[t]));
            let (loss, _) = x.head_loss(head, target, weight);
            b.result("loss", loss);
            b.result("weight", weight.sum(0));
        }),
    }
    b.finish()
}

fn normal() -> Init {
    Init::Normal { std: POSITIONS_STD }
}

/// Patches of pixels and a learned token for the whole before them, each with its place: [B * tokens, D].
fn image_tokens<'g>(b: &'g Builder, c: &BdhConfig, images: usize) -> Tensor<'g> {
    let (d, tokens) = (c.width, c.image_tokens());
    let pixels = b.input("pixels", DType::F32, &[images, c.image_size, c.image_size, CHANNELS]);
    let patches = b.scope("patches", || {
        let rows = patches(pixels, c.patch, [MEAN; CHANNELS], [STD; CHANNELS]);
        // As a convolution begins: both uniform within the root of one over what is summed.
        let inner = rows.dims()[1];
        let init = Init::Uniform { bound: (1.0 / inner as f64).sqrt() as f32 };
        let weight = b.param("weight", &[d, inner], init);
        rows.linear(weight) + b.param("bias", &[d], init).reshape(&[1, d])
    });
    let whole = b.param("cls", &[1, 1, d], Init::Zeros).broadcast(&[images, 1, d]);
    let places = b.scope("positions", || b.param("weight", &[tokens, d], normal()));
    let x = b.concat(&[whole, patches.reshape(&[images, tokens - 1, d])], 1);
    (x + places.reshape(&[1, tokens, d])).reshape(&[images * tokens, d])
}

/// The weights of the one layer.
struct Layer<'g> {
    /// [H * N, D]
    encoder: Tensor<'g>,
    /// [H, N, D]
    gate: Tensor<'g>,
    /// [D, H * N]
    decoder: Tensor<'g>,
}

impl<'g> Layer<'g> {
    fn new(b: &'g Builder, c: &BdhConfig) -> Self {
        let (d, h, n) = (c.width, c.heads, c.latent);
        let encoder = Init::Uniform { bound: c.encoder_bound() as f32 };
        b.scope("layer", || Layer {
            encoder: b.param("encoder", &[h * n, d], encoder),
            gate: b.param("gate", &[h, n, d], encoder),
            decoder: b.param("decoder", &[d, h * n], Init::Uniform { bound: c.decoder_bound() as f32 }),
        })
    }
}

struct Bdh<'a, 'g> {
    c: &'a BdhConfig,
    layer: Layer<'g>,
    positions: Tensor<'g>,
    /// (rng, rows) of dropout.
    draw: Option<(Tensor<'g>, Tensor<'g>)>,
    /// Tokens of an image or a row.
    len: usize,
    mask: LinearMask,
}

impl<'g> Bdh<'_, 'g> {
    fn norm(&self, x: Tensor<'g>) -> Tensor<'g> {
        let spec =
            NormSpec { eps: self.c.norm_eps as f32, center: true, weight: NormWeight::None, bias: false };
        x.norm(spec, None, None)
    }

    fn apply(&self, x: Tensor<'g>) -> Tensor<'g> {
        let (t, d, h, n) = (x.dims()[0], self.c.width, self.c.heads, self.c.latent);
        let u = self.norm(x);
        let a = u.linear(self.layer.encoder).activate(Act::Relu); // [T, H * N]
        let rope = RopeSpec::text(n, Frequencies::from(self.c.rope_theta), Pairs::Interleaved);
        let r = a.reshape(&[t, h, n]).rope(self.positions, &rope);
        let segments = Segments::Uniform { len: self.len };
        let attend = LinearAttend { scale: 1.0, mask: self.mask, q: segments, k: Keys::Queries };
        let seen = r.linear_attention(None, u.reshape(&[t, 1, d]), &attend, &Masking::default()); // [T, H, D]
        let y = self.norm(seen).transpose(&[1, 0, 2]); // [H, T, D]
        let gate = y.linear(self.layer.gate).activate(Act::Relu).transpose(&[1, 0, 2]).reshape(&[t, h * n]);
        let gated = a * gate;
        let gated = match self.draw {
            Some((rng, rows)) => gated.dropout(self.c.dropout as f32, rng, rows),
            None => gated,
        };
        let residual = match self.c.residual {
            BdhResidual::Normed => u,
            BdhResidual::Plain => x,
        };
        self.norm(residual + self.norm(gated.linear(self.layer.decoder)))
    }
}
