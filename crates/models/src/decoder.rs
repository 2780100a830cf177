//! The Llama-class decoder: embedding, pre-norm blocks of attention and feed-forward, final norm, head. A decoder with a vision
//! tower sees images: image features replace the embeddings of placeholder tokens, and DeepStack features are added after its
//! first layers.
//!
//! T tokens in the batch, R of which are read, D width, H heads, HK key and value heads, K head size, V vocabulary, S segments,
//! C classes.

mod config;
mod rope;
mod window;

pub use config::{
    Attention, Bias, ClassLayer, DecoderConfig, Norm, NormWeights, Positions, QkNormOver, RopePairs,
    RopeScaling,
};
/// The head of tokens, unless it is tied.
pub use flatout_ir::passes::adapter::HEAD;
pub(crate) use rope::longrope_amplitude;

use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::elementwise::Elementwise;
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::rope::{Pairs, RopeSpec};
use flatout_ir::{Builder, DType, Graph, Init, SlotId, Tensor};
use serde_json::Value;

use crate::config::Head;
use crate::form::{Documents, Form, ImageExtents, LossForm};
use crate::layers::pooling::pool;
use crate::layers::{self, Draw, FeedForward, HeadNorm, Heads, Linear, Rotation, Sight, bounds, weight};
use crate::library::processor::{self, Processor};
use crate::library::{Described, Published, huggingface};
use crate::objectives::{next_token, text_classes};
use crate::registry::{Family, Model, ModelSection};
use crate::vision::{self, Features, FoveaConfig, Qwen3VlConfig, TextBody, Vision, fovea};
use crate::words::count;

/// The head of classes; the library uses the same name.
pub const SCORE: &str = "score.weight";

/// The parameters, declared once.
#[derive(Clone, Debug)]
pub struct Weights {
    /// [V, D]
    pub embed: SlotId,
    /// Learned positions [context, D].
    positions: Option<SlotId>,
    /// A learned vector for each token type.
    types: Option<SlotId>,
    /// The norm of the embedded tokens.
    embed_norm: Option<layers::Norm>,
    pub blocks: Vec<Block>,
    /// The norm of the final states, unless the blocks end with a norm.
    norm: Option<layers::Norm>,
    /// [V, D], or [C, D] for a head of classes; a tied head of tokens is the embedding.
    pub head: Option<SlotId>,
    /// [C], for a head of classes.
    class_bias: Option<SlotId>,
    /// The layer between the pooled state and the classes.
    class_layer: Option<(Linear, Option<layers::Norm>)>,
}

#[derive(Clone, Debug)]
pub struct Block {
    attn_norm: Option<layers::Norm>,
    attn: layers::Attention,
    /// A table of learned values [V, HK K], shared with another layer.
    value_table: Option<SlotId>,
    attn_post_norm: Option<layers::Norm>,
    attn_residual_norm: Option<layers::Norm>,
    ffn_norm: Option<layers::Norm>,
    ffn: FeedForward,
    ffn_post_norm: Option<layers::Norm>,
    ffn_residual_norm: Option<layers::Norm>,
}

/// The inputs of a pass over tokens other than weights and states: positions, attention pattern, dropout, images.
pub struct Pass<'g> {
    /// i32 [1, T], or [3, T] for a decoder that sees images: time, height and width.
    pub positions: Tensor<'g>,
    /// The token ids, i32 [T], where layers add learned values of tokens.
    pub tokens: Option<Tensor<'g>>,
    /// The type of each token, i32 [T], where the model has several.
    pub types: Option<Tensor<'g>>,
    pub sight: Sight<'g>,
    pub draw: Option<Draw<'g>>,
    pub images: Option<Images<'g>>,
    /// The most tokens that any token sees, under a schedule of windows.
    pub window: Option<usize>,
    /// The rows that the last block keeps after its attention, i32 [R]; `None` for all.
    pub read: Option<Tensor<'g>>,
}

impl<'g> Pass<'g> {
    /// The rows that a layer keeps after its attention; `None` for all.
    fn rows_after_attention(&self, c: &DecoderConfig, layer: usize) -> Option<Tensor<'g>> {
        self.read.filter(|_| layer + 1 == c.layers)
    }
}

/// The rows of x that are read. This advances no keys, so a graph in which every row is read draws the same random numbers.
fn select_rows<'g>(x: Tensor<'g>, read: Option<Tensor<'g>>) -> Tensor<'g> {
    read.map_or(x, |rows| x.b.uncounted(|| x.gather(rows)))
}

/// Images among the tokens.
pub struct Images<'g> {
    pub features: Features<'g>,
    /// The row of the features for each token, or -1: i32 [T].
    pub seen: Tensor<'g>,
}

/// Declares every parameter under the current scope.
pub fn weights(b: &Builder, c: &DecoderConfig) -> Weights {
    let table =
        |scope: &str, rows: usize| b.scope(scope, || weight(b, "weight", &[rows, c.width], normal(c)));
    let head = |scope: &str, rows: usize| {
        let init = Init::Normal { std: (c.init_std * c.init_head) as f32 };
        b.scope(scope, || weight(b, "weight", &[rows, c.width], init))
    };
    let values = |i: usize| {
        let width = c.kv_heads() * c.head_size();
        b.scope(&format!("value_embed_{i}"), || weight(b, "weight", &[c.vocab, width], normal(c)))
    };
    let values: Vec<SlotId> = (0..c.value_embeddings).map(values).collect();
    let block = |i: usize| Block {
        value_table: c.value_table(i).map(|table| values[table]),
        ..b.scope(&format!("layers.{i}"), || Block::declare(b, c, i))
    };
    let of_classes = c.head == Head::Classes;
    Weights {
        embed: table("embed", c.vocab),
        positions: (c.positions == Positions::Learned).then(|| table("positions", c.context)),
        types: (c.token_types > 0).then(|| table("types", c.token_types)),
        embed_norm: c.embed_norm.then(|| layers::Norm::declare(b, "embed_norm", c.width, norm_spec(c))),
        blocks: (0..c.layers).map(block).collect(),
        norm: (!c.residual_norms).then(|| layers::Norm::declare(b, "norm", c.width, norm_spec(c))),
        head: match c.head {
            Head::Tokens => (!c.tied).then(|| head("head", c.vocab)),
            Head::Classes => Some(head("score", c.classes())),
        },
        class_bias: (of_classes && c.class_bias)
            .then(|| b.scope("score", || weight(b, "bias", &[c.classes()], Init::Zeros))),
        class_layer: (of_classes && c.class_layer != ClassLayer::None).then(|| {
            let is_normed = c.class_layer == ClassLayer::Gelu;
            b.scope("score", || {
                let dense = Linear::named(b, "dense", [c.width; 2], normal(c), !is_normed);
                (dense, is_normed.then(|| layers::Norm::declare(b, "norm", c.width, norm_spec(c))))
            })
        }),
    }
}

fn normal(c: &DecoderConfig) -> Init {
    Init::Normal { std: c.init_std as f32 }
}

fn norm_spec(c: &DecoderConfig) -> NormSpec {
    NormSpec { center: c.norm == Norm::Layer, bias: c.norm_bias, ..head_norm_spec(c) }
}

/// The specification of the norm of queries and keys.
fn head_norm_spec(c: &DecoderConfig) -> NormSpec {
    let weight = match c.norm_weight {
        NormWeights::Plain => NormWeight::Plain,
        NormWeights::OnePlus => NormWeight::OnePlus,
    };
    NormSpec::rms(c.norm_eps as f32, weight)
}

/// Whether the products to q, k and v, of attention's output, and of the feed-forward add a bias.
pub(crate) fn biased(c: &DecoderConfig) -> [bool; 3] {
    match c.bias {
        Bias::None => [false, false, false],
        Bias::Qkv => [true, false, false],
        Bias::Attention => [true, true, false],
        Bias::All => [true, true, true],
        Bias::Ffn => [false, false, true],
    }
}

/// The states [T, D] of `tokens` i32 [T] at the input of the first block; `table` is the embedding.
pub fn embed<'g>(
    b: &'g Builder,
    c: &DecoderConfig,
    w: &Weights,
    table: Tensor<'g>,
    tokens: Tensor<'g>,
    pass: &Pass<'g>,
) -> Tensor<'g> {
    let x = b.scope("embed", || table.gather(tokens));
    let placed = w.positions.map(|table| {
        b.scope("positions", || b.read(table).gather(pass.positions.reshape(&[tokens.dims()[0]])))
    });
    let typed = w.types.map(|table| {
        b.scope("types", || {
            let table = b.read(table);
            pass.types.map_or(table, |types| table.gather(types))
        })
    });
    // After the gathers, so that scale and sums are neighbours.
    let x = b.scope("embed", || {
        let x = if c.embed_scale == 1.0 { x } else { x.scale(c.embed_scale) };
        let x = placed.map_or(x, |placed| x + placed);
        let x = typed.map_or(x, |typed| x + typed);
        // The token of an image is -1, for which the gather gives zeros.
        pass.images.as_ref().map_or(x, |images| add_seen(x, images.features.main, images.seen))
    });
    let x = w.embed_norm.map_or(x, |norm| b.scope("embed_norm", || norm.apply(b, x)));
    b.scope("embed", || drop(c, pass.draw, x))
}

/// States with rows of features added at image tokens. This advances no keys, so a graph without images draws the same random
/// numbers.
fn add_seen<'g>(x: Tensor<'g>, rows: Tensor<'g>, seen: Tensor<'g>) -> Tensor<'g> {
    x.b.uncounted(|| x + rows.gather(seen))
}

/// The blocks and the final norm over states [T, D] from any source, to [T, D], or to [R, D] for the rows that are read.
pub fn apply<'g>(
    b: &'g Builder,
    c: &DecoderConfig,
    w: &Weights,
    x: Tensor<'g>,
    pass: &Pass<'g>,
) -> Tensor<'g> {
    let mut x = x;
    for (i, block) in w.blocks.iter().enumerate() {
        x = b.scope(&format!("layers.{i}"), || block.apply(b, c, i, x, pass));
        if let Some(images) = &pass.images
            && let Some(deep) = images.features.deep.get(i)
        {
            x = b.scope(&format!("layers.{i}.deepstack"), || {
                add_seen(x, *deep, select_rows(images.seen, pass.rows_after_attention(c, i)))
            });
        }
    }
    w.norm.map_or(x, |norm| b.scope("norm", || norm.apply(b, x)))
}

fn drop<'g>(c: &DecoderConfig, draw: Option<Draw<'g>>, x: Tensor<'g>) -> Tensor<'g> {
    draw.map_or(x, |draw| draw.drop(x, c.dropout))
}

impl Block {
    /// Declares the parameters of layer `layer` under the current scope.
    pub fn declare(b: &Builder, c: &DecoderConfig, layer: usize) -> Block {
        let heads = Heads {
            count: c.heads,
            kv_count: c.kv_heads(),
            size: c.head_size(),
            scale: c.score_scale(),
            cap: Cap(c.score_cap.map(|cap| cap as f32)),
        };
        let [qkv, output, ffn] = biased(c);
        let residual = Init::Normal { std: (c.init_std * c.init_residual) as f32 };
        let init = [normal(c), residual];
        let norm = |name: &str| layers::Norm::declare(b, name, c.width, norm_spec(c));
        let head_norm = c.qk_norm.then(|| match c.qk_norm_over {
            QkNormOver::Head => HeadNorm::Each(head_norm_spec(c)),
            QkNormOver::Heads => HeadNorm::All(head_norm_spec(c)),
        });
        Block {
            attn_norm: (c.pre_norms && (c.first_norm || layer > 0)).then(|| norm("attn_norm")),
            attn: b.scope("attn", || {
                let attention = layers::Attention::declare(b, c.width, heads, head_norm, [qkv, output], init);
                if c.value_table(layer).is_some() { attention.adding_values(b) } else { attention }
            }),
            value_table: None,
            attn_post_norm: c.post_norms.then(|| norm("attn_post_norm")),
            attn_residual_norm: c.residual_norms.then(|| norm("attn_residual_norm")),
            ffn_norm: c.pre_norms.then(|| norm("ffn_norm")),
            ffn: b.scope("ffn", || FeedForward::declare(b, [c.width, c.ffn], c.activation, ffn, init)),
            ffn_post_norm: c.post_norms.then(|| norm("ffn_post_norm")),
            ffn_residual_norm: c.residual_norms.then(|| norm("ffn_residual_norm")),
        }
    }

    /// x [T, D] to [T, D] as layer `layer`, which determines mask and rotation. The last layer attends to all rows but returns
    /// only those that are read, [R, D].
    pub fn apply<'g>(
        &self,
        b: &'g Builder,
        c: &DecoderConfig,
        layer: usize,
        x: Tensor<'g>,
        pass: &Pass<'g>,
    ) -> Tensor<'g> {
        let norm = |name: &str, norm: &layers::Norm, x: Tensor<'g>| b.scope(name, || norm.apply(b, x));
        let read = pass.rows_after_attention(c, layer);
        let draw = pass.draw.map(|draw| Draw { rows: select_rows(draw.rows, read), ..draw });
        let norm_where = |name: &str, given: &Option<layers::Norm>, x: Tensor<'g>| {
            given.as_ref().map_or(x, |given| norm(name, given, x))
        };
        let residual = |name: &str, after: &Option<layers::Norm>, y: Tensor<'g>| {
            let y = drop(c, draw, norm_where(name, after, y));
            if c.residual_scale == 1.0 { y } else { y.scale(c.residual_scale) }
        };
        let rotation = rotation(c, layer, pass.positions);
        let normed = norm_where("attn_norm", &self.attn_norm, x);
        let y = b.scope("attn", || {
            let mask = pass.sight.mask(c.mask_within(layer, pass.window));
            let [q, k, v] = self.attn.project(b, normed);
            let v = self.value_table.map_or(v, |table| {
                let tokens = pass.tokens.expect("a decoder with tables of values is given its tokens");
                self.attn.add_to_values(b, v, b.read(table).gather(tokens))
            });
            let heads = self.attn.attend(b, [q, k, v], layer, rotation.as_ref(), &pass.sight, mask);
            self.attn.output(b, select_rows(heads, read))
        });
        let x = select_rows(x, read) + residual("attn_post_norm", &self.attn_post_norm, y);
        let x = norm_where("attn_residual_norm", &self.attn_residual_norm, x);
        let normed = norm_where("ffn_norm", &self.ffn_norm, x);
        let y = b.scope("ffn", || self.ffn.apply(b, normed));
        let x = x + residual("ffn_post_norm", &self.ffn_post_norm, y);
        norm_where("ffn_residual_norm", &self.ffn_residual_norm, x)
    }
}

fn rotation<'g>(c: &DecoderConfig, layer: usize, positions: Tensor<'g>) -> Option<Rotation<'g>> {
    let pairs = match c.rope_pairs {
        RopePairs::Half => Pairs::Half,
        RopePairs::Interleaved => Pairs::Interleaved,
    };
    let spec = || match c.rope_sections {
        Some(sections) => RopeSpec::interleaved(c.head_size(), c.frequencies(layer), sections, pairs),
        None => RopeSpec::text(c.rope_size(), c.frequencies(layer), pairs),
    };
    c.rotates_in(layer).then(|| Rotation { positions, spec: spec() })
}

/// The graph of a decoder in one form. Inputs are named `tokens`, `positions` and so on, as each form needs them.
pub fn build(c: &DecoderConfig, form: Form) -> Graph {
    let of_classes = matches!(form, Form::Classes { .. });
    assert_eq!(of_classes, c.head == Head::Classes, "{form:?} is no form of a head of {}", c.head);
    let b = Builder::new();
    let (tokens, mut pass) = inputs(&b, c, form);
    let w = weights(&b, c);
    pass.images = seen(form).map(|seen| images(&b, c, &w, form, seen, tokens.dims()[0]));
    let table = b.read(w.embed);
    let x = embed(&b, c, &w, table, tokens, &pass);
    let x = apply(&b, c, &w, x, &pass);
    if let Some(slot) = pass.images.as_ref().and_then(|images| images.features.states) {
        fovea::keep_states(&b, slot, x, pass.sight.masking.q.expect("new tokens of sequences are segments"));
    }
    match form {
        Form::Classes { dropout, .. } => b.scope("score", || classify(&b, c, &w, x, &pass, !dropout)),
        _ => {
            let head = w.head.map_or(table, |head| b.read(head));
            b.scope("head", || {
                let x = if c.logit_divisor == 1.0 { x } else { x.scale(1.0 / c.logit_divisor) };
                next_token::results(&b, form, x, head, Cap(c.logit_cap.map(|cap| cap as f32)))
            });
        }
    }
    b.finish()
}

fn seen(form: Form) -> Option<ImageExtents> {
    match form {
        Form::Loss(LossForm { seen, .. }) | Form::Logits { seen, .. } | Form::Cached { seen, .. } => seen,
        Form::Classes { .. } | Form::Images(_) => None,
    }
}

/// The features of images, computed by the tower or read from an input, and the input `seen`.
fn images<'g>(
    b: &'g Builder,
    c: &DecoderConfig,
    w: &Weights,
    form: Form,
    seen: ImageExtents,
    tokens: usize,
) -> Images<'g> {
    let v = c.vision.as_ref().expect("only a decoder with a tower sees images");
    let body = |x: Tensor<'g>, positions: Tensor<'g>, sight: Sight<'g>| {
        apply(
            b,
            c,
            w,
            x,
            &Pass {
                positions,
                tokens: None,
                types: None,
                sight,
                draw: None,
                images: None,
                window: None,
                read: None,
            },
        )
    };
    let cached = match form {
        Form::Cached { sequences, .. } => Some(sequences),
        _ => None,
    };
    let features_given = matches!(form, Form::Loss(LossForm { features_given: true, .. }));
    let beside = TextBody { width: c.width, init_std: c.init_std, body: &body, cached, features_given };
    let (features, seen) = vision::features(b, v, &beside, seen, tokens);
    Images { features, seen }
}

/// The inputs that the host writes before a run, except for targets and images: tokens i32 [T], and the inputs of the pass over
/// them.
fn inputs<'g>(b: &'g Builder, c: &DecoderConfig, form: Form) -> (Tensor<'g>, Pass<'g>) {
    let i32s = |name: &str, dims: &[usize]| b.input(name, DType::I32, dims);
    let (t, drops) = match form {
        Form::Loss(LossForm { rows, len, dropout, .. }) => (rows * len, dropout && c.dropout > 0.0),
        Form::Logits { rows, len, .. } => (rows * len, false),
        Form::Cached { tokens, .. } => (tokens, false),
        Form::Classes { tokens, dropout, .. } => {
            (tokens, dropout && (c.dropout > 0.0 || c.head_dropout > 0.0))
        }
        Form::Images(_) => panic!("a decoder reads no images"),
    };
    let segments = match form {
        // Dropout draws the same numbers with and without separate documents.
        Form::Loss(LossForm {
            documents: Documents::Apart { most } | Documents::Trees { most, .. }, ..
        }) => {
            vec![b.uncounted(|| bounds(b, "segment", most))]
        }
        Form::Classes { texts, .. } => vec![bounds(b, "segment", texts)],
        Form::Cached { sequences, .. } => ["new", "seen"].map(|name| bounds(b, name, sequences)).to_vec(),
        _ => vec![],
    };
    let tokens = i32s("tokens", &[t]);
    let positions = i32s("positions", &[c.position_axes(), t]);
    let types = (c.token_types > 1).then(|| i32s("types", &[t]));
    let draw = drops.then(|| Draw { rng: i32s("rng", &[3]), rows: i32s("rows", &[t, 2]) });
    let sight = match (form, &segments[..]) {
        (Form::Cached { capacity, .. }, &[new, seen]) => {
            Sight::cached([new, seen], i32s("cache_rows", &[t]), capacity)
        }
        (Form::Classes { longest, .. }, &[texts]) => Sight::ragged(texts, longest),
        (Form::Loss(LossForm { documents: Documents::Trees { longest, .. }, .. }), &[trees]) => {
            assert!(c.is_causal(), "a branch sees all of its prefix");
            let intervals = b.uncounted(|| i32s("intervals", &[t, 4]));
            Sight::trees(trees, intervals, longest)
        }
        (_, &[documents]) => Sight::ragged(documents, c.context),
        (Form::Loss(LossForm { len, .. }) | Form::Logits { len, .. }, _) => Sight::rows(len),
        _ => unreachable!("other forms have segments"),
    };
    let read = match form {
        Form::Loss(LossForm { read: Some(rows), trims_last: true, .. }) => {
            Some(b.uncounted(|| next_token::answers(b, rows)))
        }
        _ => None,
    };
    let window = match form {
        Form::Loss(LossForm { window, .. }) => window,
        _ => None,
    };
    let given = (c.value_embeddings > 0).then_some(tokens);
    (tokens, Pass { positions, tokens: given, types, sight, draw, images: None, window, read })
}

/// Pools hidden states [T, D] to one state per text, and computes the loss of the texts' classes.
fn classify<'g>(
    b: &'g Builder,
    c: &DecoderConfig,
    w: &Weights,
    x: Tensor<'g>,
    pass: &Pass<'g>,
    gives_logits: bool,
) {
    let (start, len) = pass.sight.masking.q.expect("texts are segments");
    let pooled = pool(x, start, len, pass.sight.q, c.pooling); // [S, D]
    let pooled = match w.class_layer {
        Some((dense, norm)) => {
            let inner = dense.apply(b, pooled);
            let inner = match c.class_layer {
                ClassLayer::Tanh => inner.map(Elementwise::Tanh),
                ClassLayer::Relu => inner.activate(Act::Relu),
                ClassLayer::Gelu | ClassLayer::None => inner.activate(Act::GeluExact),
            };
            norm.map_or(inner, |norm| norm.apply(b, inner))
        }
        None => pooled,
    };
    let pooled = pass
        .draw
        .map_or(pooled, |draw| Draw { rows: draw.rows.gather(start), ..draw }.drop(pooled, c.head_dropout));
    let score = b.read(w.head.expect("classes have a head"));
    let bias = w.class_bias.map(|bias| b.read(bias));
    text_classes::loss(b, pooled, score, bias, gives_logits);
}

impl Family for DecoderConfig {
    fn dimensions(&self) -> String {
        let text = format!(
            "{} layers of width {}, {} heads, vocabulary {}, context {}",
            self.layers,
            self.width,
            self.heads,
            count(self.vocab as u64),
            count(self.context as u64)
        );
        match &self.vision {
            Some(v) => format!("{text}; {}", v.dimensions()),
            None => text,
        }
    }

    /// The context that the run sets, limited to the model's own unless set with or above `model.from`; by default at most 2048
    /// tokens. Learned positions are always a limit.
    fn input_sizes(&self, asked: &ModelSection<'_>) -> Result<Vec<(&'static str, Option<usize>)>, String> {
        let (most, is_learned) = (self.context, self.positions == Positions::Learned);
        let said = (asked.value)("context").and_then(|(value, own)| Some((value.as_u64()? as usize, own)));
        let context = match said {
            Some((given, true)) if is_learned && given > most => {
                return Err(format!(
                    "`model.context` is {given} and the model of {} has {most} learned positions: give at most as many",
                    asked.origin
                ));
            }
            Some((given, true)) => given,
            _ if is_learned => most,
            Some((given, false)) => given.min(most),
            None => most.min(2048),
        };
        Ok(vec![("context", Some(context))])
    }

    fn vocab(&self) -> Option<usize> {
        Some(self.vocab)
    }

    fn image_sides(&self) -> Option<[usize; 2]> {
        None
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

    fn brings_pooling(&self) -> bool {
        self.encoder
    }

    fn tokens(&self) -> usize {
        self.context
    }

    fn set_context(&mut self, tokens: usize) {
        if self.positions != Positions::Learned {
            self.context = tokens;
        }
    }

    fn rotates(&self) -> bool {
        self.positions == Positions::Rope
    }

    fn parameters(&self) -> u64 {
        DecoderConfig::parameters(self)
    }

    fn validate(&self) -> Result<(), String> {
        DecoderConfig::validate(self)
    }

    fn build(&self, form: Form) -> Graph {
        build(self, form)
    }

    fn least(&self) -> Form {
        match self.head {
            Head::Tokens => Form::Logits { rows: 1, len: 1, seen: self.vision.as_ref().map(|v| v.least()) },
            Head::Classes => Form::Classes { tokens: 1, texts: 1, longest: 1, dropout: false },
        }
    }

    fn published(&self) -> Result<&dyn Published, String> {
        Ok(self)
    }

    fn normalise(&mut self, said: &Value) -> Result<(), String> {
        match &mut self.vision {
            Some(v) => processor::normalise_by(said, v.normalisation_mut())?,
            None => return Ok(()),
        }
        self.validate().map_err(|sentence| format!("it describes no images: {sentence}"))
    }

    /// A model that no other family recognises is read as a decoder, whose errors say what is missing.
    fn read(config: &Value) -> Option<Result<Described, String>> {
        let described = huggingface::read(config).map(|read| Described {
            model: Model::Decoder(read.model),
            bos: read.bos,
            eos: read.eos,
            classes: read.classes,
            processor: Processor::default(),
            headless: read.headless,
        });
        Some(described)
    }
}

impl Model {
    /// Whether it sees images among the tokens of a text.
    pub fn has_tower(&self) -> bool {
        self.vision().is_some()
    }

    /// The tower of a decoder that has one.
    pub fn vision(&self) -> Option<&Vision> {
        self.as_decoder()?.vision.as_ref()
    }

    /// The tower of a decoder that sees images of any size.
    pub fn as_qwen3_vl(&self) -> Option<&Qwen3VlConfig> {
        self.vision()?.as_qwen3_vl()
    }

    /// The tower of a decoder that looks at frames of videos.
    pub fn as_fovea(&self) -> Option<&FoveaConfig> {
        self.vision()?.as_fovea()
    }

    pub fn as_fovea_mut(&mut self) -> Option<&mut FoveaConfig> {
        match self {
            Model::Decoder(DecoderConfig { vision: Some(Vision::Fovea(tower)), .. }) => Some(tower),
            _ => None,
        }
    }

    pub fn as_decoder(&self) -> Option<&DecoderConfig> {
        match self {
            Model::Decoder(decoder) => Some(decoder),
            _ => None,
        }
    }

    /// The decoder of a model that reads text. Other models are refused before this is called.
    #[track_caller]
    pub fn decoder(&self) -> &DecoderConfig {
        self.as_decoder().expect("only a decoder reads text")
    }

    #[track_caller]
    pub fn decoder_mut(&mut self) -> &mut DecoderConfig {
        match self {
            Model::Decoder(decoder) => decoder,
            _ => panic!("only a decoder reads text"),
        }
    }
}
