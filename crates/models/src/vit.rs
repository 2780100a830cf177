//! The vision transformer: patches and a class token, pre-norm blocks, final norm, a head of classes. DINOv2, DeiT, the towers
//! of CLIP and SigLIP and timm's ViT are values of its config.
//!
//! B images, G patches per image, M learned positions per side, N tokens per image, T = B N, D width, H heads, K head size.

mod config;

pub use config::{FinalNorm, VitConfig, VitLibrary};

use flatout_ir::ops::attention::Mask;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::{Builder, Class, DType, Graph, Init, SlotId, Tensor};
use serde_json::Value;

use crate::config::{Activation, Pooling};
use crate::form::{Form, ImageForm};
use crate::images::{CHANNELS, Inputs};
use crate::layers::patches::{patches, project};
use crate::layers::{Attention, Draw, FeedForward, Heads, Linear, Norm, Sight, row, weight};
use crate::library::{Described, Published, processor, vision};
use crate::objectives::image_classes;
use crate::registry::{Family, Model, ModelSection};
use crate::words::{count, pixels};

/// The parameters, declared once.
#[derive(Clone, Debug)]
pub struct Weights {
    patch: Linear,
    /// [D]
    cls: Option<SlotId>,
    /// Positions of tokens before the patches, then those of the grid: [.. + M M, D].
    positions: SlotId,
    /// The matrix [G, M M] that resamples positions for images with another grid.
    resampling: Option<SlotId>,
    registers: Option<SlotId>,
    input_norm: Option<Norm>,
    pub blocks: Vec<Block>,
    pub norm: Option<Norm>,
    pub head: Option<Linear>,
}

#[derive(Clone, Debug)]
pub struct Block {
    attn_norm: Norm,
    attn: Attention,
    /// Learned factors on the output of each half.
    attn_scale: Option<SlotId>,
    ffn_norm: Norm,
    ffn: FeedForward,
    ffn_scale: Option<SlotId>,
}

/// Declares every parameter under the current scope.
pub fn weights(b: &Builder, c: &VitConfig) -> Weights {
    let (d, grid, init) = (c.width, c.grid(), normal(c));
    let dims = [d, c.patch * c.patch * CHANNELS];
    let patch = match c.input_norm {
        true => b.scope("patch", || Linear { weight: weight(b, "weight", &dims, init), bias: None }),
        false => Linear::scoped(b, "patch", dims, init, Init::Zeros),
    };
    let cls = c.class_token.then(|| weight(b, "cls", &[d], init));
    let (positions, resampling) = b.scope("positions", || {
        let table = weight(b, "weight", &[c.prefix_positions() + grid * grid, d], init);
        let matrix = ([grid, grid] != c.patches()).then(|| {
            let init = Init::Bicubic { from: [grid, grid], to: c.patches(), antialias: c.antialias };
            let dims = [c.patches().iter().product(), grid * grid];
            b.slot("resampling", Class::Const, DType::F32, &dims, init)
        });
        (table, matrix)
    });
    Weights {
        patch,
        cls,
        positions,
        resampling,
        registers: (c.registers > 0).then(|| weight(b, "registers", &[c.registers, d], init)),
        input_norm: c.input_norm.then(|| Norm::declare(b, "input_norm", d, norm_spec(c))),
        blocks: (0..c.layers).map(|i| b.scope(&format!("layers.{i}"), || Block::declare(b, c))).collect(),
        norm: (c.final_norm != FinalNorm::None).then(|| Norm::declare(b, "norm", d, norm_spec(c))),
        head: c.classes.map(|classes| Linear::scoped(b, "head", [classes, c.pooled()], init, Init::Zeros)),
    }
}

fn normal(c: &VitConfig) -> Init {
    Init::Normal { std: c.init_std as f32 }
}

fn norm_spec(c: &VitConfig) -> NormSpec {
    NormSpec { eps: c.norm_eps as f32, center: true, weight: NormWeight::Plain, bias: true }
}

/// States [T, D] after the last block, before the norm, of normalised patches [B G, P P 3]; `draw` has one row per image.
pub fn apply<'g>(
    b: &'g Builder,
    c: &VitConfig,
    w: &Weights,
    patches: Tensor<'g>,
    draw: Option<Draw<'g>>,
) -> Tensor<'g> {
    let mut x = embed(b, c, w, patches);
    for (i, block) in w.blocks.iter().enumerate() {
        x = b.scope(&format!("layers.{i}"), || block.apply(b, c, i, x, draw));
    }
    x
}

/// Class token, registers and patches of every image, with their positions.
pub fn embed<'g>(b: &'g Builder, c: &VitConfig, w: &Weights, patches: Tensor<'g>) -> Tensor<'g> {
    let (d, count) = (c.width, c.patches().iter().product::<usize>());
    let n = patches.dims()[0] / count;
    let x = b.scope("patch", || project(b, &w.patch, patches));
    let cls = w.cls.map(|cls| b.read(cls));
    let placed = c.prefix_positions();
    let (of_prefix, of_patches) = b.scope("positions", || {
        let (table, learned) = (b.read(w.positions), c.grid() * c.grid());
        let of_grid = table.slice(0, placed, learned);
        let matrix = w.resampling.map(|matrix| b.read(matrix));
        let of_prefix = (placed > 0).then(|| table.slice(0, 0, placed));
        (of_prefix, matrix.map_or(of_grid, |matrix| matrix.product(of_grid, false, false)))
    });
    // Tokens with their positions, which begin at row `from` of the positions.
    let place = |tokens: Tensor<'g>, from: usize| {
        let rows = tokens.dims()[0];
        let own = of_prefix.filter(|_| from < placed);
        let own = own.map(|all| if placed == rows { all } else { all.slice(0, from, rows) });
        own.map_or(tokens, |own| tokens + own)
    };
    let of_all = |rows: Tensor<'g>| {
        let count = rows.dims()[0];
        rows.reshape(&[1, count, d]).broadcast(&[n, count, d])
    };
    let first = cls.map(|cls| of_all(place(row(cls), 0)));
    let patches = x.reshape(&[n, count, d]) + of_patches.reshape(&[1, count, d]);
    let registers = w.registers.map(|registers| of_all(place(b.read(registers), usize::from(c.class_token))));
    let parts: Vec<Tensor<'g>> = [first, registers, Some(patches)].into_iter().flatten().collect();
    let all = if let [patches] = parts[..] { patches } else { b.concat(&parts, 1) };
    let x = all.reshape(&[n * c.tokens(), d]);
    w.input_norm.map_or(x, |norm| b.scope("input_norm", || norm.apply(b, x)))
}

impl Block {
    /// Declares a block's parameters under the current scope.
    pub fn declare(b: &Builder, c: &VitConfig) -> Block {
        let (d, k, init) = (c.width, c.head_size(), [normal(c); 2]);
        let heads = Heads::plain(c.heads, k);
        let norm = |name: &str| Norm::declare(b, name, d, norm_spec(c));
        let scale = |name: &str| {
            c.layer_scale.map(|value| weight(b, name, &[d], Init::Constant { value: value as f32 }))
        };
        Block {
            attn_norm: norm("attn_norm"),
            attn: b.scope("attn", || Attention::declare(b, d, heads, None, [true; 2], init)),
            attn_scale: scale("attn_scale"),
            ffn_norm: norm("ffn_norm"),
            ffn: b.scope("ffn", || {
                let activation = if c.swiglu { Activation::Swiglu } else { c.activation };
                FeedForward::declare(b, [d, c.ffn()], activation, true, init)
            }),
            ffn_scale: scale("ffn_scale"),
        }
    }

    /// x [T, D] to [T, D]; the layer's number determines the probability that an image skips it.
    pub fn apply<'g>(
        &self,
        b: &'g Builder,
        c: &VitConfig,
        layer: usize,
        x: Tensor<'g>,
        draw: Option<Draw<'g>>,
    ) -> Tensor<'g> {
        let sight = Sight::rows(c.tokens());
        self.halves(b, c, layer, x, draw, |x| self.attn.apply(b, x, layer, None, &sight, Mask::Full))
    }

    /// The block without dropout, and the keys and values [T, H, K] that it attended to.
    pub fn apply_keeping<'g>(
        &self,
        b: &'g Builder,
        c: &VitConfig,
        layer: usize,
        x: Tensor<'g>,
    ) -> (Tensor<'g>, [Tensor<'g>; 2]) {
        let sight = Sight::rows(c.tokens());
        let mut kept = None;
        let x = self.halves(b, c, layer, x, None, |x| {
            let [q, k, v] = self.attn.project(b, x);
            kept = Some([k, v]);
            self.attn.output(b, self.attn.attend_to([q, k, v], &sight, Mask::Full))
        });
        (x, kept.expect("both halves were applied"))
    }

    /// Keys and values [T, H, K] of x [T, D], without the rest of the block.
    pub fn keys_values<'g>(&self, b: &'g Builder, x: Tensor<'g>) -> [Tensor<'g>; 2] {
        let normed = b.scope("attn_norm", || self.attn_norm.apply(b, x));
        b.scope("attn", || self.attn.keys_values(b, normed))
    }

    /// The block over query rows x [R, D], which attend to the given keys and values and not to one another.
    pub fn look<'g>(
        &self,
        b: &'g Builder,
        c: &VitConfig,
        layer: usize,
        x: Tensor<'g>,
        [k, v]: [Tensor<'g>; 2],
        sight: &Sight<'g>,
    ) -> Tensor<'g> {
        self.halves(b, c, layer, x, None, |x| {
            let q = self.attn.queries(b, x);
            self.attn.output(b, self.attn.attend_to([q, k, v], sight, Mask::Full))
        })
    }

    /// Both halves of the block; `attend` is the first half for normed rows.
    fn halves<'g>(
        &self,
        b: &'g Builder,
        c: &VitConfig,
        layer: usize,
        x: Tensor<'g>,
        draw: Option<Draw<'g>>,
        attend: impl FnOnce(Tensor<'g>) -> Tensor<'g>,
    ) -> Tensor<'g> {
        let norm = |name: &str, norm: &Norm, x: Tensor<'g>| b.scope(name, || norm.apply(b, x));
        let share = layer as f64 / (c.layers - 1).max(1) as f64;
        // The residual branch of a half: with its learned scale, and dropped for some images.
        let branch = |y: Tensor<'g>, scale: Option<SlotId>| {
            let y = scale.map_or(y, |scale| y * row(b.read(scale)));
            draw.map_or(y, |draw| draw.drop_path(y, share * c.drop_path))
        };
        let normed = norm("attn_norm", &self.attn_norm, x);
        let y = b.scope("attn", || attend(normed));
        let x = x + branch(y, self.attn_scale);
        let normed = norm("ffn_norm", &self.ffn_norm, x);
        let y = b.scope("ffn", || self.ffn.apply(b, normed));
        x + branch(y, self.ffn_scale)
    }
}

/// The head's input for every image, [B, D] or [B, 2 D]. The norm is per token, so only tokens that are read are normed.
pub fn pool<'g>(b: &'g Builder, c: &VitConfig, w: &Weights, x: Tensor<'g>) -> Tensor<'g> {
    let (tokens, d) = (c.tokens(), c.width);
    let n = x.dims()[0] / tokens;
    let norm = |x: Tensor<'g>| w.norm.map_or(x, |norm| b.scope("norm", || norm.apply(b, x)));
    let all = |x: Tensor<'g>| x.reshape(&[n, tokens, d]);
    let cls = |x: Tensor<'g>| all(x).slice(1, 0, 1).reshape(&[n, d]);
    let first = c.prefix();
    let mean = |x: Tensor<'g>| all(x).slice(1, first, tokens - first).mean(1).reshape(&[n, d]);
    match c.pooling {
        Pooling::Last | Pooling::Max => unreachable!("validated: images have other poolings"),
        Pooling::Cls => norm(cls(x)),
        Pooling::Mean if c.final_norm == FinalNorm::Pooled => norm(mean(x)),
        Pooling::Mean => mean(norm(x)),
        Pooling::ClsMean => {
            let x = norm(x);
            b.concat(&[cls(x), mean(x)], 1)
        }
    }
}

/// The graph over a batch of images of the config's size. Without classes there is no head, and the result is `features`, the
/// head's input.
pub fn build(c: &VitConfig, form: Form) -> Graph {
    let Form::Images(form) = form else { panic!("{form:?}: a vision transformer reads images") };
    let b = Builder::new();
    let inputs = Inputs::new(&b, c.sides(), &form, c.drop_path > 0.0 || c.head_dropout > 0.0);
    let w = weights(&b, c);
    let patches = b.scope("patch", || patches(inputs.pixels, inputs.mix, c.patch, &c.mean, &c.std));
    let x = apply(&b, c, &w, patches, inputs.draw);
    let pooled = pool(&b, c, &w, x);
    let pooled = inputs.draw.map_or(pooled, |draw| draw.drop(pooled, c.head_dropout));
    match w.head {
        Some(head) => b.scope("head", || {
            image_classes::loss(&b, head.apply(&b, pooled), inputs.mix, &form);
        }),
        None => b.result("features", pooled),
    }
    b.finish()
}

impl Family for VitConfig {
    fn dimensions(&self) -> String {
        format!(
            "{} layers of width {}, {} heads, patches of {} in images of {}, {} classes",
            self.layers,
            self.width,
            self.heads,
            self.patch,
            pixels(self.sides()),
            count(self.classes.unwrap_or(0) as u64)
        )
    }

    fn brings_head(&self) -> bool {
        self.classes.is_some()
    }

    fn brings_pooling(&self) -> bool {
        let is_plain = self.class_token
            && self.prefix_positions.is_none()
            && !self.input_norm
            && self.final_norm == FinalNorm::Tokens;
        self.brings_head() || !is_plain
    }

    fn input_sizes(&self, asked: &ModelSection<'_>) -> Result<Vec<(&'static str, Option<usize>)>, String> {
        if let Some((Value::String(pooling), _)) = (asked.value)("pooling")
            && self.classes.is_some()
            && pooling != self.pooling.name()
        {
            return Err(format!(
                "`model.pooling` is {pooling} and the head of {} reads {}: leave it out",
                asked.origin, self.pooling
            ));
        }
        if (asked.value)("image_size").is_some() {
            return Ok(vec![]);
        }
        let height = self.image_height.map(|height| ("image_height", Some(height)));
        Ok([("image_size", Some(self.image_size))].into_iter().chain(height).collect())
    }

    fn vocab(&self) -> Option<usize> {
        None
    }

    fn image_sides(&self) -> Option<[usize; 2]> {
        Some(self.sides())
    }

    fn normalisation(&self) -> Option<[[f64; 3]; 2]> {
        Some([self.mean, self.std])
    }

    fn from(&self) -> Option<&String> {
        self.from.as_ref()
    }

    fn from_mut(&mut self) -> &mut Option<String> {
        &mut self.from
    }

    fn classes(&self) -> Option<usize> {
        self.classes
    }

    fn class_head(&self) -> Option<&'static str> {
        Some("head")
    }

    fn tokens(&self) -> usize {
        VitConfig::tokens(self)
    }

    fn set_context(&mut self, _tokens: usize) {}

    fn rotates(&self) -> bool {
        false
    }

    fn parameters(&self) -> u64 {
        VitConfig::parameters(self)
    }

    fn validate(&self) -> Result<(), String> {
        VitConfig::validate(self)
    }

    fn build(&self, form: Form) -> Graph {
        build(self, form)
    }

    fn least(&self) -> Form {
        Form::Images(ImageForm::plain(1))
    }

    fn published(&self) -> Result<&dyn Published, String> {
        Ok(self)
    }

    fn normalise(&mut self, processor: &Value) -> Result<(), String> {
        processor::normalise(self, processor)
    }

    fn read(config: &Value) -> Option<Result<Described, String>> {
        let described = |(model, classes, processor)| Described {
            model: Model::Vit(model),
            bos: vec![],
            eos: vec![],
            classes,
            processor,
            headless: None,
        };
        vision::read(config).map(|read| read.map(described))
    }
}
