//! The Llama-class decoder: embedding, pre-norm blocks of attention and feed-forward, final norm, head.
//!
//! T tokens in the batch, D width, H heads, HK key and value heads, K head size, V vocabulary, S segments, C classes.

use flatout_ir::ops::attention::{Attend, Masking, Segments};
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::rope::{Pairs, RopeSpec};
use flatout_ir::{Builder, Class, DType, Graph, Init, Tensor};

use crate::config::{Activation, Bias, DecoderConfig, Head, Norm, NormWeights, Positions, RopePairs};
use crate::layers::pooling::pool;

/// What the model is built to compute, with its static extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Results `loss`, the weighted sum over all tokens, and `weight`, the sum of the weights, of rows of `len` tokens.
    Loss { rows: usize, len: usize, documents: Documents, dropout: bool },
    /// Result `logits` [T, V] of rows of `len` tokens.
    Logits { rows: usize, len: usize },
    /// Result `logits` [S, V] of the last token of each of S `sequences`, given up to `tokens` new ones of them all,
    /// after those in a cache of `capacity` a sequence.
    Cached { sequences: usize, tokens: usize, capacity: usize },
    /// Of a head of classes: results `loss` and `weight`, the weighted sum over texts and the sum of their weights, and
    /// `class_logits` [S, C] where nothing is dropped. S `texts` of at most `longest` tokens lie anywhere among all `tokens`.
    Classes { tokens: usize, texts: usize, longest: usize, dropout: bool },
}

impl Form {
    /// The smallest form of a model that has all its parameters.
    pub fn least(c: &DecoderConfig) -> Form {
        match c.head {
            Head::Tokens => Form::Logits { rows: 1, len: 1 },
            Head::Classes => Form::Classes { tokens: 1, texts: 1, longest: 1, dropout: false },
        }
    }
}

/// Whether tokens see earlier documents of their row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Documents {
    /// A row is one sequence.
    Joined,
    /// At most this many documents in the batch, each a segment of its own.
    Apart { most: usize },
}

/// Our path and the Hugging Face name of every weight, Llama, Qwen3 and Gemma-3 alike; GPT-2's are in `gpt2`.
pub fn weight_names(c: &DecoderConfig) -> Vec<(String, String)> {
    let mut names = vec![("embed.weight".to_string(), "model.embed_tokens.weight".to_string())];
    if c.positions == Positions::Learned {
        names.push(("positions.weight".into(), "model.embed_positions.weight".into()));
    }
    for i in 0..c.layers {
        let mut add = |ours: &str, theirs: &str, bias: bool| {
            let (ours, theirs) = (format!("layers.{i}.{ours}"), format!("model.layers.{i}.{theirs}"));
            names.push((ours.clone(), format!("{theirs}.weight")));
            names.extend(bias.then(|| (bias_name(&ours), format!("{theirs}.bias"))));
        };
        let [qkv, output, ffn] = biased(c);
        add("attn_norm", "input_layernorm", c.norm_bias);
        add("attn.wq", "self_attn.q_proj", qkv);
        add("attn.wk", "self_attn.k_proj", qkv);
        add("attn.wv", "self_attn.v_proj", qkv);
        if c.qk_norm {
            add("attn.q_norm", "self_attn.q_norm", false);
            add("attn.k_norm", "self_attn.k_norm", false);
        }
        add("attn.wo", "self_attn.o_proj", output);
        // Their name says where the first of two norms between the halves stands, whether it is the only one or not.
        let ffn_norm = match c.post_norms {
            true => {
                add("attn_post_norm", "post_attention_layernorm", c.norm_bias);
                "pre_feedforward_layernorm"
            }
            false => "post_attention_layernorm",
        };
        add("ffn_norm", ffn_norm, c.norm_bias);
        if c.activation.gated() {
            add("ffn.gate", "mlp.gate_proj", ffn);
        }
        add("ffn.up", "mlp.up_proj", ffn);
        add("ffn.down", "mlp.down_proj", ffn);
        if c.post_norms {
            add("ffn_post_norm", "post_feedforward_layernorm", c.norm_bias);
        }
    }
    names.push(("norm".into(), "model.norm.weight".into()));
    names.extend(c.norm_bias.then(|| (bias_name("norm"), "model.norm.bias".into())));
    match c.head {
        Head::Tokens if c.tied => {}
        Head::Tokens => names.push(("head.weight".into(), "lm_head.weight".into())),
        Head::Classes => names.push((SCORE.into(), SCORE.into())),
    }
    names
}

/// The head of classes, by the library's name and ours.
pub const SCORE: &str = "score.weight";

/// Which products add a bias: those to q, k and v, attention's output, the feed-forward's.
fn biased(c: &DecoderConfig) -> [bool; 3] {
    [c.bias != Bias::None, matches!(c.bias, Bias::Attention | Bias::All), c.bias == Bias::All]
}

/// The path of what is added after a weight.
fn bias_name(weight: &str) -> String {
    format!("{weight}_bias")
}

/// The graph of a decoder in one form. Inputs are named `tokens`, `positions` and so on, as each form needs them.
pub fn build(c: &DecoderConfig, form: Form) -> Graph {
    let of_classes = matches!(form, Form::Classes { .. });
    assert_eq!(of_classes, c.head == Head::Classes, "{form:?} is no form of a head of {}", c.head);
    let b = Builder::new();
    let m = Decoder { b: &b, c, inputs: Inputs::new(&b, c, form), form };
    let embedding = b.scope("embed", || b.param("weight", &[c.vocab, c.width], m.normal()));
    let mut x = m.embed(embedding); // [T, D]
    for i in 0..c.layers {
        x = b.scope(&format!("layers.{i}"), || m.block(i, x));
    }
    let x = m.norm(x, "norm");
    if let Form::Classes { dropout, .. } = form {
        b.scope("score", || m.classify(x, dropout));
        return b.finish();
    }
    let head = if c.tied {
        embedding
    } else {
        b.scope("head", || b.param("weight", &[c.vocab, c.width], m.normal()))
    };
    b.scope("head", || m.finish(x, head));
    b.finish()
}

/// What the host writes before a run.
struct Inputs<'g> {
    tokens: Tensor<'g>,
    positions: Tensor<'g>,
    /// (rng, rows) of dropout.
    draw: Option<(Tensor<'g>, Tensor<'g>)>,
    /// Start and length of the queries' and keys' segments.
    q: Option<(Tensor<'g>, Tensor<'g>)>,
    k: Option<(Tensor<'g>, Tensor<'g>)>,
    /// The cache rows of new tokens.
    cache_rows: Option<Tensor<'g>>,
}

impl<'g> Inputs<'g> {
    fn new(b: &'g Builder, c: &DecoderConfig, form: Form) -> Self {
        let i32s = |name: &str, dims: &[usize]| b.input(name, DType::I32, dims);
        let t = match form {
            Form::Loss { rows, len, .. } | Form::Logits { rows, len } => rows * len,
            Form::Cached { tokens, .. } | Form::Classes { tokens, .. } => tokens,
        };
        let segments =
            |name: &str, s: usize| (i32s(&format!("{name}_start"), &[s]), i32s(&format!("{name}_len"), &[s]));
        let draws = match form {
            Form::Loss { dropout, .. } => dropout && c.dropout > 0.0,
            Form::Classes { dropout, .. } => dropout && (c.dropout > 0.0 || c.head_dropout > 0.0),
            Form::Logits { .. } | Form::Cached { .. } => false,
        };
        let (q, k) = match form {
            Form::Loss { documents: Documents::Apart { most }, .. } => {
                // Dropout draws the same whether or not documents lie apart.
                let s = b.uncounted(|| segments("segment", most));
                (Some(s), Some(s))
            }
            Form::Classes { texts, .. } => {
                let s = segments("segment", texts);
                (Some(s), Some(s))
            }
            Form::Cached { sequences, .. } => {
                (Some(segments("new", sequences)), Some(segments("seen", sequences)))
            }
            _ => (None, None),
        };
        Inputs {
            tokens: i32s("tokens", &[t]),
            positions: i32s("positions", &[1, t]),
            draw: draws.then(|| (i32s("rng", &[3]), i32s("rows", &[t, 2]))),
            q,
            k,
            cache_rows: matches!(form, Form::Cached { .. }).then(|| i32s("cache_rows", &[t])),
        }
    }
}

struct Decoder<'a, 'g> {
    b: &'g Builder,
    c: &'a DecoderConfig,
    inputs: Inputs<'g>,
    form: Form,
}

impl<'g> Decoder<'_, 'g> {
    fn normal(&self) -> Init {
        Init::Normal { std: self.c.init_std as f32 }
    }

    fn linear(&self, x: Tensor<'g>, name: &str, out: usize, bias: bool) -> Tensor<'g> {
        self.product(x, name, out, bias, self.normal())
    }

    /// A product that writes to the residual stream.
    fn residual(&self, x: Tensor<'g>, name: &str, bias: bool) -> Tensor<'g> {
        let std = (self.c.init_std * self.c.init_residual) as f32;
        self.product(x, name, self.c.width, bias, Init::Normal { std })
    }

    fn product(&self, x: Tensor<'g>, name: &str, out: usize, bias: bool, init: Init) -> Tensor<'g> {
        let y = x.linear(self.b.param(name, &[out, x.dims()[1]], init));
        match bias {
            true => y + self.b.param(&bias_name(name), &[out], Init::Zeros).reshape(&[1, out]),
            false => y,
        }
    }

    /// A norm's weight, which begins as a factor of 1, and how it enters.
    fn norm_weight(&self, name: &str, size: usize) -> (Tensor<'g>, NormWeight) {
        let (init, weight) = match self.c.norm_weight {
            NormWeights::Plain => (Init::Ones, NormWeight::Plain),
            NormWeights::OnePlus => (Init::Zeros, NormWeight::OnePlus),
        };
        (self.b.param(name, &[size], init), weight)
    }

    fn norm(&self, x: Tensor<'g>, name: &str) -> Tensor<'g> {
        let (w, weight) = self.norm_weight(name, self.c.width);
        let bias = self.c.norm_bias.then(|| self.b.param(&bias_name(name), &[self.c.width], Init::Zeros));
        let spec = NormSpec {
            eps: self.c.norm_eps as f32,
            center: self.c.norm == Norm::Layer,
            weight,
            bias: self.c.norm_bias,
        };
        self.b.scope(name, || x.norm(spec, Some(w), bias))
    }

    fn drop(&self, x: Tensor<'g>) -> Tensor<'g> {
        match self.inputs.draw {
            Some((rng, rows)) => x.dropout(self.c.dropout as f32, rng, rows),
            None => x,
        }
    }

    fn embed(&self, embedding: Tensor<'g>) -> Tensor<'g> {
        let x = self.b.scope("embed", || embedding.gather(self.inputs.tokens));
        let placed = (self.c.positions == Positions::Learned).then(|| {
            self.b.scope("positions", || {
                let t = self.inputs.tokens.dims()[0];
                let table = self.b.param("weight", &[self.c.context, self.c.width], self.normal());
                table.gather(self.inputs.positions.reshape(&[t]))
            })
        });
        // After both gathers, so that scale and sum are neighbours.
        self.b.scope("embed", || {
            let x = if self.c.embed_scale == 1.0 { x } else { x.scale(self.c.embed_scale) };
            self.drop(placed.map_or(x, |placed| x + placed))
        })
    }

    fn block(&self, layer: usize, x: Tensor<'g>) -> Tensor<'g> {
        let normed = self.norm(x, "attn_norm");
        let y = self.b.scope("attn", || self.attention(layer, normed));
        let x = x + self.drop(self.post_norm(y, "attn_post_norm"));
        let normed = self.norm(x, "ffn_norm");
        let y = self.b.scope("ffn", || self.feed_forward(normed));
        x + self.drop(self.post_norm(y, "ffn_post_norm"))
    }

    fn post_norm(&self, x: Tensor<'g>, name: &str) -> Tensor<'g> {
        if self.c.post_norms { self.norm(x, name) } else { x }
    }

    fn attention(&self, layer: usize, x: Tensor<'g>) -> Tensor<'g> {
        let (t, h, hk, k) = (x.dims()[0], self.c.heads, self.c.kv_heads(), self.c.head_size());
        let [qkv, output, _] = biased(self.c);
        let query = self.linear(x, "wq", h * k, qkv).reshape(&[t, h, k]);
        let key = self.linear(x, "wk", hk * k, qkv).reshape(&[t, hk, k]);
        let value = self.linear(x, "wv", hk * k, qkv).reshape(&[t, hk, k]);
        let (query, key) = (self.place(layer, query, "q_norm"), self.place(layer, key, "k_norm"));
        let (key, value) = (self.cached(layer, "k", key), self.cached(layer, "v", value));
        let attend = self.attend(layer);
        let masking = Masking { q: self.inputs.q, k: self.inputs.k, intervals: None };
        let out = query.attention(key, value, &attend, &masking);
        self.residual(out.reshape(&[t, h * k]), "wo", output)
    }

    /// Norm and rotation of queries or keys [T, H, K].
    fn place(&self, layer: usize, x: Tensor<'g>, norm: &str) -> Tensor<'g> {
        let k = self.c.head_size();
        let x = match self.c.qk_norm {
            true => {
                let (w, weight) = self.norm_weight(norm, k);
                x.rms_norm(self.c.norm_eps as f32, weight, Some(w))
            }
            false => x,
        };
        let pairs = match self.c.rope_pairs {
            RopePairs::Half => Pairs::Half,
            RopePairs::Interleaved => Pairs::Interleaved,
        };
        match self.c.positions {
            Positions::Rope => {
                x.rope(self.inputs.positions, &RopeSpec::text(k, self.c.frequencies(layer), pairs))
            }
            Positions::Learned | Positions::None => x,
        }
    }

    /// All keys or values so far: the new ones after those kept, which stay for the next call.
    fn cached(&self, layer: usize, name: &str, x: Tensor<'g>) -> Tensor<'g> {
        let (Some(rows), Form::Cached { sequences, capacity, .. }) = (self.inputs.cache_rows, self.form)
        else {
            return x;
        };
        let dims = [sequences * capacity, self.c.kv_heads(), self.c.head_size()];
        let slot = self.b.slot(&format!("cache.{name}.{layer}"), Class::Cache, x.dtype(), &dims, Init::Zeros);
        let all = self.b.read(slot).row_scatter(x, rows);
        self.b.write(slot, all);
        all
    }

    fn attend(&self, layer: usize) -> Attend {
        let (q, k) = match self.form {
            Form::Loss { documents: Documents::Apart { most }, .. } => {
                let s = Segments::Ragged { max_segments: most, max_len: self.c.context };
                (s, s)
            }
            Form::Loss { len, .. } | Form::Logits { len, .. } => {
                (Segments::Uniform { len }, Segments::Uniform { len })
            }
            Form::Classes { texts, longest, .. } => {
                let s = Segments::Ragged { max_segments: texts, max_len: longest };
                (s, s)
            }
            Form::Cached { sequences, tokens, capacity } => (
                Segments::Ragged { max_segments: sequences, max_len: tokens.min(capacity) },
                Segments::Ragged { max_segments: sequences, max_len: capacity },
            ),
        };
        Attend { scale: self.c.score_scale(), mask: self.c.mask(layer), q, k }
    }

    fn feed_forward(&self, x: Tensor<'g>) -> Tensor<'g> {
        let [_, _, bias] = biased(self.c);
        let up = || self.linear(x, "up", self.c.ffn, bias);
        let gate = |act: Act| {
            let gate = self.linear(x, "gate", self.c.ffn, bias);
            let up = up();
            gate.activate(act) * up
        };
        let inner = match self.c.activation {
            Activation::Swiglu => gate(Act::Silu),
            Activation::Geglu => gate(Act::Gelu),
            Activation::GeluTanh => up().activate(Act::Gelu),
            Activation::GeluExact => up().activate(Act::GeluExact),
            Activation::Relu2 => up().activate(Act::Relu).square(),
        };
        self.residual(inner, "down", bias)
    }

    fn finish(&self, x: Tensor<'g>, head: Tensor<'g>) {
        let t = x.dims()[0];
        match self.form {
            Form::Loss { .. } => {
                let target = self.b.input("targets", DType::I32, &[t]);
                let weight = self.b.input("weights", DType::F32, &[t]);
                let (loss, _) = x.head_loss(head, target, weight);
                self.b.result("loss", loss);
                self.b.result("weight", weight.sum(0));
            }
            Form::Logits { .. } => self.b.result("logits", x.linear(head)),
            Form::Cached { sequences, .. } => {
                let last = self.b.input("last", DType::I32, &[sequences]);
                self.b.result("logits", x.gather(last).linear(head));
            }
            Form::Classes { .. } => unreachable!("classes have a head of their own"),
        }
    }

    /// Hidden states [T, D] of texts to one state a text, and the loss of their classes.
    fn classify(&self, x: Tensor<'g>, dropout: bool) {
        let (start, len) = self.inputs.q.expect("texts are segments");
        let (s, c) = (start.dims()[0], self.c.classes());
        let mut pooled = pool(x, start, len, self.attend(0).q, self.c.pooling); // [S, D]
        if let Some((rng, rows)) = self.inputs.draw {
            pooled = pooled.dropout(self.c.head_dropout as f32, rng, rows.gather(start));
        }
        let score = self.b.param("weight", &[c, self.c.width], self.normal());
        let label = self.b.input("labels", DType::I32, &[s]);
        let weight = self.b.input("label_weights", DType::F32, &[s]);
        let (loss, _) = pooled.head_loss(score, label, weight);
        self.b.result("loss", loss);
        self.b.result("weight", weight.sum(0));
        if !dropout {
            self.b.result("class_logits", pooled.linear(score));
        }
    }
}
