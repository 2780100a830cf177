//! BDH: sparse latents of every token attend to themselves, gate each other and come back to the state; one layer's weights
//! serve every application. Images come as patches with a token for the whole before them, texts as tokens.
//!
//! B images, T tokens in all, D width, H heads, N latents of a head, C classes. Norms have no weights.

use flatout_ir::ops::attention::{Masking, Segments};
use flatout_ir::ops::frequency::Frequencies;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::linear_attention::{Keys, LinearAttend, LinearMask, Turn};
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::rope::{Pairs, RopeSpec};
use flatout_ir::{Builder, Class, DType, Graph, Init, Tensor};

use crate::config::{BdhConfig, BdhResidual, Head};
use crate::images::{CHANNELS, ImageForm, Inputs};

/// What the model is built to compute, with its static extents.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// Of images.
    Classes(ImageForm),
    /// Of texts: results `loss` and `weight` of rows of `len` tokens.
    Loss { rows: usize, len: usize, dropout: bool },
    /// Of texts: result `logits` [T, V].
    Logits { rows: usize, len: usize },
    /// Of texts: result `logits` [S, V] of the token at `last` of each of S sequences, for up to `tokens` new ones after
    /// those in a cache of `capacity` a sequence.
    Cached { sequences: usize, tokens: usize, capacity: usize },
}

impl Form {
    /// The smallest form of a model that has all its parameters.
    pub fn least(c: &BdhConfig) -> Form {
        match c.head {
            Head::Classes => Form::Classes(ImageForm::plain(1)),
            Head::Tokens => Form::Logits { rows: 1, len: 1 },
        }
    }
}

/// Pixels are brought from 0..1 to -1..1.
const MEAN: [f64; CHANNELS] = [0.5; CHANNELS];
const STD: [f64; CHANNELS] = [0.5; CHANNELS];
const INIT: Init = Init::Normal { std: 0.02 };

/// The graph in one form. Inputs are those of images, or `tokens`, `positions`, `targets` and `weights` and with dropout also
/// `rng` and `rows`; of the cached form those that a decoder has there.
pub fn build(c: &BdhConfig, form: Form) -> Graph {
    let b = Builder::new();
    match form {
        Form::Classes(form) => of_images(&b, c, form),
        Form::Loss { rows, len, .. } | Form::Logits { rows, len } => of_texts(&b, c, form, rows * len),
        Form::Cached { tokens, .. } => of_texts(&b, c, form, tokens),
    }
    b.finish()
}

fn of_images<'g>(b: &'g Builder, c: &BdhConfig, form: ImageForm) {
    assert_eq!(c.head, Head::Classes, "images have classes");
    let (n, len, d) = (form.images, c.image_tokens(), c.width);
    let inputs = Inputs::new(b, c.sides(), form, c.dropout > 0.0);
    let patches = b.scope("patches", || {
        let rows = inputs.patches(c.patch, &MEAN, &STD);
        // As a convolution begins: both uniform within the root of one over what is summed.
        let inner = rows.dims()[1];
        let init = Init::Uniform { bound: (1.0 / inner as f64).sqrt() as f32 };
        rows.linear(b.param("weight", &[d, inner], init)) + b.param("bias", &[d], init).reshape(&[1, d])
    });
    let whole = b.param("cls", &[1, 1, d], Init::Zeros).broadcast(&[n, 1, d]);
    let places = b.scope("positions", || b.param("weight", &[len, d], INIT));
    let x = b.concat(&[whole, patches.reshape(&[n, len - 1, d])], 1);
    let x = (x + places.reshape(&[1, len, d])).reshape(&[n * len, d]);

    let positions = b.iota(DType::I32, &[n, len], 1).reshape(&[1, n * len]);
    // Before what is dropped, so that dropping can be part of whatever computes that.
    let draw = if c.dropout > 0.0 { inputs.token_draw(len) } else { None };
    let drop = |x: Tensor<'g>| match draw {
        Some((rng, rows)) => x.dropout(c.dropout as f32, rng, rows),
        None => x,
    };
    let sight = Sight::of_rows(len, LinearMask::Full);
    let model = Bdh { c, layer: Layer::new(b, c), positions, drop: &drop, sight };
    let x = model.apply_all(x);
    b.scope("score", || {
        let whole = x.reshape(&[n, len, d]).slice(1, 0, 1).reshape(&[n, d]);
        let weight = b.param("weight", &[c.classes(), d], INIT);
        let bias = b.param("bias", &[c.classes()], Init::Zeros).reshape(&[1, c.classes()]);
        inputs.finish(model.norm(whole).linear(weight) + bias);
    });
}

fn of_texts<'g>(b: &'g Builder, c: &BdhConfig, form: Form, t: usize) {
    assert_eq!(c.head, Head::Tokens, "texts have tokens");
    let i32s = |name: &str, dims: &[usize]| b.input(name, DType::I32, dims);
    let drops = matches!(form, Form::Loss { dropout: true, .. }) && c.dropout > 0.0;
    let draw = drops.then(|| (i32s("rng", &[3]), i32s("rows", &[t, 2])));
    let embedding = b.scope("embed", || b.param("weight", &[c.vocab, c.width], INIT));
    let x = b.scope("embed", || embedding.gather(i32s("tokens", &[t])));
    let positions = i32s("positions", &[1, t]);
    let drop = |x: Tensor<'g>| match draw {
        Some((rng, rows)) => x.dropout(c.dropout as f32, rng, rows),
        None => x,
    };
    let sight = match form {
        Form::Cached { sequences, tokens, capacity } => Sight::cached(b, sequences, tokens, capacity),
        Form::Loss { len, .. } | Form::Logits { len, .. } => Sight::of_rows(len, LinearMask::Strict),
        Form::Classes(_) => unreachable!("a form of images"),
    };
    let model = Bdh { c, layer: Layer::new(b, c), positions, drop: &drop, sight };
    let x = model.apply_all(x);
    b.scope("head", || {
        let head = b.param("weight", &[c.vocab, c.width], INIT);
        match form {
            Form::Logits { .. } => return b.result("logits", x.linear(head)),
            Form::Cached { sequences, .. } => {
                let last = i32s("last", &[sequences]);
                return b.result("logits", x.gather(last).linear(head));
            }
            _ => {}
        }
        let (target, weight) = (i32s("targets", &[t]), b.input("weights", DType::F32, &[t]));
        let (loss, _) = x.head_loss(head, target, weight);
        b.result("loss", loss);
        b.result("weight", weight.sum(0));
    });
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

/// What tokens see: those of their image or their row, or of their sequence so far.
struct Sight<'g> {
    attend: LinearAttend,
    masking: Masking<'g>,
    /// Where new tokens go in the caches, and the rows of one.
    cache: Option<(Tensor<'g>, usize)>,
}

impl<'g> Sight<'g> {
    fn of_rows(len: usize, mask: LinearMask) -> Self {
        let q = Segments::Uniform { len };
        let attend = LinearAttend { scale: 1.0, mask, q, k: Keys::Queries, turn: Turn::None };
        Sight { attend, masking: Masking::default(), cache: None }
    }

    fn cached(b: &'g Builder, sequences: usize, tokens: usize, capacity: usize) -> Self {
        let bounds = |name: &str| {
            let of = |what: &str| b.input(&format!("{name}_{what}"), DType::I32, &[sequences]);
            (of("start"), of("len"))
        };
        let segments = |max_len: usize| Segments::Ragged { max_segments: sequences, max_len };
        let (q, k) = (segments(tokens.min(capacity)), Keys::Given(segments(capacity)));
        Sight {
            attend: LinearAttend { scale: 1.0, mask: LinearMask::Strict, q, k, turn: Turn::None },
            masking: Masking { q: Some(bounds("new")), k: Some(bounds("seen")), intervals: None },
            cache: Some((b.input("cache_rows", DType::I32, &[tokens]), sequences * capacity)),
        }
    }

    /// What latents r [T, H, N] see of states u [T, 1, D] in one application: [T, H, D].
    fn see(&self, application: usize, r: Tensor<'g>, u: Tensor<'g>) -> Tensor<'g> {
        let Some((places, rows)) = self.cache else {
            return r.linear_attention(None, u, &self.attend, &self.masking);
        };
        let kept = |name: &str, x: Tensor<'g>| {
            let dims = [rows, x.dims()[1], x.dims()[2]];
            let path = format!("cache.{name}.{application}");
            let slot = x.b.slot(&path, Class::Cache, x.dtype(), &dims, Init::Zeros);
            let all = x.b.read(slot).row_scatter(x, places);
            x.b.write(slot, all);
            all
        };
        let (keys, values) = (kept("k", r), kept("v", u));
        r.linear_attention(Some(keys), values, &self.attend, &self.masking)
    }
}

struct Bdh<'a, 'g> {
    c: &'a BdhConfig,
    layer: Layer<'g>,
    positions: Tensor<'g>,
    /// Drops gated latents where that is asked for.
    drop: &'a dyn Fn(Tensor<'g>) -> Tensor<'g>,
    sight: Sight<'g>,
}

impl<'g> Bdh<'_, 'g> {
    fn norm(&self, x: Tensor<'g>) -> Tensor<'g> {
        let spec =
            NormSpec { eps: self.c.norm_eps as f32, center: true, weight: NormWeight::None, bias: false };
        x.norm(spec, None, None)
    }

    fn apply_all(&self, x: Tensor<'g>) -> Tensor<'g> {
        (0..self.c.layers).fold(x, |x, i| x.b.scope(&format!("applications.{i}"), || self.apply(i, x)))
    }

    fn apply(&self, i: usize, x: Tensor<'g>) -> Tensor<'g> {
        let (t, d, h, n) = (x.dims()[0], self.c.width, self.c.heads, self.c.latent);
        let u = self.norm(x);
        let a = u.linear(self.layer.encoder).activate(Act::Relu); // [T, H * N]
        let rope = RopeSpec::text(n, Frequencies::from(self.c.rope_theta), Pairs::Interleaved);
        let r = a.reshape(&[t, h, n]).rope(self.positions, &rope);
        let seen = self.sight.see(i, r, u.reshape(&[t, 1, d])); // [T, H, D]
        let y = self.norm(seen).transpose(&[1, 0, 2]); // [H, T, D]
        let gate = y.linear(self.layer.gate).transpose(&[1, 0, 2]).reshape(&[t, h * n]);
        let gated = (self.drop)(gate.activate(Act::Relu) * a);
        let residual = match self.c.residual {
            BdhResidual::Normed => u,
            BdhResidual::Plain => x,
        };
        self.norm(residual + self.norm(gated.linear(self.layer.decoder)))
    }
}
