//! BDH: sparse latents of every token attend to themselves, gate one another and are projected back to the state; all
//! applications share one layer's weights. Images become patches after a token for the whole image, texts become tokens.
//!
//! B images, T tokens in total, D width, H heads, N latents per head, C classes, V vocabulary. Norms have no weights.

mod config;

pub use config::{BdhConfig, BdhInit, BdhResidual};

use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::frequency::Frequencies;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::linear_attention::{Keys, LinearAttend, LinearMask, Rotary};
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::rope::{Pairs, RopeSpec};
use flatout_ir::{Builder, DType, Graph, Init, SlotId, Tensor};

use crate::config::Head;
use crate::form::{Documents, Form, ImageForm, LossForm};
use crate::images::{CHANNELS, Inputs};
use crate::layers::patches::patches;
use crate::layers::{Draw, Linear, Sight, bounds, row, weight};
use crate::library::Published;
use crate::objectives::{image_classes, next_token};
use crate::registry::{Family, ModelSection};
use crate::words::{count, pixels};

/// Pixels are mapped from 0..1 to -1..1.
const MEAN: [f64; CHANNELS] = [0.5; CHANNELS];
const STD: [f64; CHANNELS] = [0.5; CHANNELS];
const INIT: Init = Init::Normal { std: 0.02 };

/// The weights of the one layer, declared once.
#[derive(Clone, Debug)]
pub struct Layer {
    /// [H * N, D]
    encoder: SlotId,
    /// [H, N, D]
    gate: SlotId,
    /// [D, H * N]
    decoder: SlotId,
}

impl Layer {
    pub fn declare(b: &Builder, c: &BdhConfig) -> Layer {
        let (d, h, n) = (c.width, c.heads, c.latent);
        let encoder = Init::Uniform { bound: c.encoder_bound() as f32 };
        b.scope("layer", || Layer {
            encoder: weight(b, "encoder", &[h * n, d], encoder),
            gate: weight(b, "gate", &[h, n, d], encoder),
            decoder: weight(b, "decoder", &[d, h * n], Init::Uniform { bound: c.decoder_bound() as f32 }),
        })
    }
}

/// The inputs of a pass over tokens other than weights and states: positions, attention pattern, dropout of gated latents.
pub struct Pass<'g> {
    /// i32 [1, T]
    pub positions: Tensor<'g>,
    pub sight: Sight<'g>,
    pub mask: LinearMask,
    pub draw: Option<Draw<'g>>,
}

/// All applications of the layer to states [T, D].
pub fn apply<'g>(b: &'g Builder, c: &BdhConfig, w: &Layer, x: Tensor<'g>, pass: &Pass<'g>) -> Tensor<'g> {
    // Read once, because every application multiplies the same tensors.
    let weights = [w.encoder, w.gate, w.decoder].map(|slot| b.read(slot));
    (0..c.layers)
        .fold(x, |x, i| b.scope(&format!("applications.{i}"), || application(c, weights, i, x, pass)))
}

fn application<'g>(
    c: &BdhConfig,
    [encoder, gate, decoder]: [Tensor<'g>; 3],
    i: usize,
    x: Tensor<'g>,
    pass: &Pass<'g>,
) -> Tensor<'g> {
    let (t, d, h, n) = (x.dims()[0], c.width, c.heads, c.latent);
    let u = norm(c, x);
    let a = u.linear(encoder).activate(Act::Relu); // [T, H * N]
    let rope = RopeSpec::text(n, Frequencies::from(c.rope_theta), Pairs::Interleaved);
    let r = a.reshape(&[t, h, n]).rope(pass.positions, &rope);
    let seen = attend(pass, i, r, u.reshape(&[t, 1, d])); // [T, H, D]
    let y = norm(c, seen).transpose(&[1, 0, 2]); // [H, T, D]
    let gate = y.linear(gate).transpose(&[1, 0, 2]).reshape(&[t, h * n]);
    let gated = gate.activate(Act::Relu) * a;
    let gated = pass.draw.map_or(gated, |draw| draw.drop(gated, c.dropout));
    let residual = match c.residual {
        BdhResidual::Normed => u,
        BdhResidual::Plain => x,
    };
    norm(c, residual + norm(c, gated.linear(decoder)))
}

fn norm<'g>(c: &BdhConfig, x: Tensor<'g>) -> Tensor<'g> {
    let spec = NormSpec { eps: c.norm_eps as f32, center: true, weight: NormWeight::None, bias: false };
    x.norm(spec, None, None)
}

/// Linear attention of latents r [T, H, N] over states u [T, 1, D] in one application: [T, H, D].
fn attend<'g>(pass: &Pass<'g>, application: usize, r: Tensor<'g>, u: Tensor<'g>) -> Tensor<'g> {
    let Sight { q, k, masking, cache } = pass.sight;
    let attend = |k: Keys| LinearAttend { scale: 1.0, mask: pass.mask, q, k, rotary: Rotary::None };
    let Some(cache) = cache else {
        return r.linear_attention(None, u, &attend(Keys::Queries), &masking);
    };
    let [keys, values] =
        [("k", r), ("v", u)].map(|(name, x)| cache.extend(&format!("{name}.{application}"), x));
    r.linear_attention(Some(keys), values, &attend(Keys::Given(k)), &masking)
}

/// The graph in one form. Its inputs are those of images, or `tokens`, `positions`, `targets` and `weights`, and with dropout
/// also `rng` and `rows`; the cached form has the inputs of a decoder's cached form.
pub fn build(c: &BdhConfig, form: Form) -> Graph {
    let b = Builder::new();
    match (c.head, form) {
        (Head::Classes, Form::Images(form)) => of_images(&b, c, form),
        (
            Head::Tokens,
            Form::Loss(LossForm { documents: Documents::Joined, .. })
            | Form::Logits { .. }
            | Form::Cached { .. },
        ) => of_texts(&b, c, form),
        _ => panic!("{form:?} is no form of a BDH with a head of {}", c.head),
    }
    b.finish()
}

fn of_images(b: &Builder, c: &BdhConfig, form: ImageForm) {
    let (n, len, d) = (form.images, c.image_tokens(), c.width);
    let inputs = Inputs::new(b, c.sides(), &form, c.dropout > 0.0);
    // Initialised like PyTorch's convolution: uniform within sqrt(1 / n), where n is the number of summed terms.
    let inner = c.patch * c.patch * CHANNELS;
    let uniform = Init::Uniform { bound: (1.0 / inner as f64).sqrt() as f32 };
    let patch = Linear::scoped(b, "patches", [d, inner], uniform, uniform);
    let cls = weight(b, "cls", &[1, 1, d], Init::Zeros);
    let learned = b.scope("positions", || weight(b, "weight", &[len, d], INIT));
    let layer = Layer::declare(b, c);
    let score = Linear::scoped(b, "score", [c.classes(), d], INIT, Init::Zeros);

    let patches =
        b.scope("patches", || patch.apply(b, patches(inputs.pixels, inputs.mix, c.patch, &MEAN, &STD)));
    let whole = b.read(cls).broadcast(&[n, 1, d]);
    let places = b.read(learned);
    let x = b.concat(&[whole, patches.reshape(&[n, len - 1, d])], 1);
    let x = (x + places.reshape(&[1, len, d])).reshape(&[n * len, d]);

    let positions = b.iota(DType::I32, &[n, len], 1).reshape(&[1, n * len]);
    // Before the operation that dropout applies to, so that dropout can fuse into it.
    let draw = inputs.draw.map(|draw| draw.of_tokens(len));
    let pass = Pass { positions, sight: Sight::rows(len), mask: LinearMask::Full, draw };
    let x = apply(b, c, &layer, x, &pass);
    b.scope("score", || {
        let whole = x.reshape(&[n, len, d]).slice(1, 0, 1).reshape(&[n, d]);
        let weight = b.read(score.weight);
        let bias = score.bias.map(|bias| row(b.read(bias))).expect("declared with a bias");
        image_classes::loss(b, norm(c, whole).linear(weight) + bias, inputs.mix, &form);
    });
}

fn of_texts(b: &Builder, c: &BdhConfig, form: Form) {
    let (t, drops) = match form {
        Form::Loss(LossForm { rows, len, dropout, .. }) => (rows * len, dropout && c.dropout > 0.0),
        Form::Logits { rows, len, .. } => (rows * len, false),
        Form::Cached { tokens, .. } => (tokens, false),
        Form::Classes { .. } | Form::Images(_) => unreachable!("no form of tokens"),
    };
    let i32s = |name: &str, dims: &[usize]| b.input(name, DType::I32, dims);
    let draw = drops.then(|| Draw { rng: i32s("rng", &[3]), rows: i32s("rows", &[t, 2]) });
    let table = |scope: &str| b.scope(scope, || weight(b, "weight", &[c.vocab, c.width], INIT));
    let (embed, layer, head) = (table("embed"), Layer::declare(b, c), table("head"));

    let embedding = b.read(embed);
    let x = b.scope("embed", || embedding.gather(i32s("tokens", &[t])));
    let positions = i32s("positions", &[1, t]);
    let sight = match form {
        Form::Cached { sequences, capacity, .. } => {
            let segments = ["new", "seen"].map(|name| bounds(b, name, sequences));
            Sight::cached(segments, i32s("cache_rows", &[t]), capacity)
        }
        Form::Loss(LossForm { len, .. }) | Form::Logits { len, .. } => Sight::rows(len),
        Form::Classes { .. } | Form::Images(_) => unreachable!("no form of tokens"),
    };
    let pass = Pass { positions, sight, mask: LinearMask::Strict, draw };
    let x = apply(b, c, &layer, x, &pass);
    let head = b.read(head);
    b.scope("head", || next_token::results(b, form, x, head, Cap::NONE));
}

impl Family for BdhConfig {
    fn dimensions(&self) -> String {
        let input = match self.classes {
            Some(classes) => {
                format!("patches of {} in images of {}, {classes} classes", self.patch, pixels(self.sides()))
            }
            None => {
                format!("vocabulary {}, context {}", count(self.vocab as u64), count(self.context as u64))
            }
        };
        format!(
            "one layer of width {} applied {} times, {} heads of {} latents, {input}",
            self.width,
            self.layers,
            self.heads,
            count(self.latent as u64)
        )
    }

    fn input_sizes(&self, _asked: &ModelSection<'_>) -> Result<Vec<(&'static str, Option<usize>)>, String> {
        Ok(vec![
            ("image_size", Some(self.image_size)),
            ("context", Some(self.context)),
            ("image_height", self.image_height),
        ])
    }

    fn vocab(&self) -> Option<usize> {
        (self.head == Head::Tokens).then_some(self.vocab)
    }

    fn image_sides(&self) -> Option<[usize; 2]> {
        (self.head == Head::Classes).then(|| self.sides())
    }

    fn normalisation(&self) -> Option<[[f64; 3]; 2]> {
        (self.head == Head::Classes).then_some([MEAN, STD])
    }

    fn from(&self) -> Option<&String> {
        self.from.as_ref()
    }

    fn from_mut(&mut self) -> &mut Option<String> {
        &mut self.from
    }

    fn classes(&self) -> Option<usize> {
        self.classes.filter(|_| self.head == Head::Classes)
    }

    fn class_head(&self) -> Option<&'static str> {
        (self.head == Head::Classes).then_some("score")
    }

    fn tokens(&self) -> usize {
        if self.head == Head::Classes { self.image_tokens() } else { self.context }
    }

    fn set_context(&mut self, tokens: usize) {
        self.context = tokens;
    }

    fn rotates(&self) -> bool {
        true
    }

    fn parameters(&self) -> u64 {
        BdhConfig::parameters(self)
    }

    fn validate(&self) -> Result<(), String> {
        BdhConfig::validate(self)
    }

    fn build(&self, form: Form) -> Graph {
        build(self, form)
    }

    fn least(&self) -> Form {
        match self.head {
            Head::Classes => Form::Images(ImageForm::plain(1)),
            Head::Tokens => Form::Logits { rows: 1, len: 1, seen: None },
        }
    }

    fn published(&self) -> Result<&dyn Published, String> {
        Err("a BDH has no form that another library reads".into())
    }
}
