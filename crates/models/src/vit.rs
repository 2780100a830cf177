//! The vision transformer: patches and a class token, pre-norm blocks, final norm, a head of classes. DINOv2 and timm's
//! ViT are values of its config.
//!
//! B images, G patches a side, M learned positions a side, N tokens an image, T = B N, D width, H heads, K head size.

use flatout_ir::ops::attention::{Attend, Mask, Masking, Segments};
use flatout_ir::ops::gated::Act;
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::{Builder, Class, DType, Graph, Init, Tensor};

use crate::config::{Pooling, VitConfig};
use crate::images::{CHANNELS, ImageForm, Inputs};

/// The graph over a batch of images, of the size that the config says. Without classes there is no head, and the result is
/// `features`, what a head would read.
pub fn build(c: &VitConfig, form: ImageForm) -> Graph {
    let b = Builder::new();
    let draws = c.drop_path > 0.0 || c.head_dropout > 0.0;
    let v = Vit { b: &b, c, images: form.images, inputs: Inputs::new(&b, c.sides(), form, draws) };
    let mut x = v.embed(); // [T, D]
    for i in 0..c.layers {
        x = b.scope(&format!("layers.{i}"), || v.block(i, x));
    }
    let pooled = v.inputs.drop(v.pool(x), c.head_dropout); // [B, D] or [B, 2 D]
    let Some(classes) = c.classes else {
        b.result("features", pooled);
        return b.finish();
    };
    b.scope("head", || {
        let weight = b.param("weight", &[classes, c.pooled()], v.normal());
        let logits = pooled.linear(weight) + b.param("bias", &[classes], Init::Zeros).reshape(&[1, classes]);
        v.inputs.finish(logits);
    });
    b.finish()
}

/// Rows [.., K] with zeros behind them up to a multiple of what matrix units load at once; a patch of 14 pixels has 588
/// values, and rows that begin anywhere cost its products twenty times as much.
fn aligned(rows: Tensor<'_>) -> Tensor<'_> {
    const LOADED: usize = 8;
    let (count, inner) = (rows.dims()[0], rows.dims()[1]);
    match inner.next_multiple_of(LOADED) - inner {
        0 => rows,
        missing => rows.b.concat(&[rows, rows.b.fill(0.0, rows.dtype(), &[count, missing])], 1),
    }
}

struct Vit<'a, 'g> {
    b: &'g Builder,
    c: &'a VitConfig,
    images: usize,
    inputs: Inputs<'g>,
}

impl<'g> Vit<'_, 'g> {
    fn normal(&self) -> Init {
        Init::Normal { std: self.c.init_std as f32 }
    }

    /// A product with its bias: `name` and `name_bias`.
    fn linear(&self, x: Tensor<'g>, name: &str, out: usize) -> Tensor<'g> {
        let y = x.linear(self.b.param(name, &[out, x.dims()[1]], self.normal()));
        y + self.b.param(&format!("{name}_bias"), &[out], Init::Zeros).reshape(&[1, out])
    }

    fn norm(&self, x: Tensor<'g>, name: &str) -> Tensor<'g> {
        let d = self.c.width;
        let weight = self.b.param(name, &[d], Init::Ones);
        let bias = self.b.param(&format!("{name}_bias"), &[d], Init::Zeros);
        let spec =
            NormSpec { eps: self.c.norm_eps as f32, center: true, weight: NormWeight::Plain, bias: true };
        self.b.scope(name, || x.norm(spec, Some(weight), Some(bias)))
    }

    /// Class token, registers and patches of every image, with their positions; registers have none.
    fn embed(&self) -> Tensor<'g> {
        let (b, c, n, d) = (self.b, self.c, self.images, self.c.width);
        let count = c.patches().iter().product();
        let x = b.scope("patch", || {
            let patches = self.inputs.patches(c.patch, &c.mean, &c.std); // [B G, P P 3]
            let weight = b.param("weight", &[d, c.patch * c.patch * CHANNELS], self.normal());
            aligned(patches).linear(aligned(weight)) + b.param("bias", &[d], Init::Zeros).reshape(&[1, d])
        });
        let cls = b.param("cls", &[d], self.normal());
        let (of_cls, of_patches) = b.scope("positions", || self.positions());
        let first = (cls.reshape(&[1, d]) + of_cls).reshape(&[1, 1, d]).broadcast(&[n, 1, d]);
        let patches = x.reshape(&[n, count, d]) + of_patches.reshape(&[1, count, d]);
        let registers = (c.registers > 0).then(|| {
            let registers = b.param("registers", &[c.registers, d], self.normal());
            registers.reshape(&[1, c.registers, d]).broadcast(&[n, c.registers, d])
        });
        let parts: Vec<Tensor<'g>> = [Some(first), registers, Some(patches)].into_iter().flatten().collect();
        b.concat(&parts, 1).reshape(&[n * c.tokens(), d])
    }

    /// Positions of the class token [1, D] and of the patches [G, D], resampled where the table is another grid's.
    fn positions(&self) -> (Tensor<'g>, Tensor<'g>) {
        let (b, grid, patches) = (self.b, self.c.grid(), self.c.patches());
        let table = b.param("weight", &[1 + grid * grid, self.c.width], self.normal());
        let of_grid = table.slice(0, 1, grid * grid);
        if [grid, grid] == patches {
            return (table.slice(0, 0, 1), of_grid);
        }
        let init = Init::Bicubic { from: [grid, grid], to: patches };
        let dims = [patches[0] * patches[1], grid * grid];
        let matrix = b.read(b.slot("resampling", Class::Const, DType::F32, &dims, init));
        (table.slice(0, 0, 1), matrix.product(of_grid, false, false))
    }

    fn block(&self, layer: usize, x: Tensor<'g>) -> Tensor<'g> {
        let normed = self.norm(x, "attn_norm");
        let y = self.b.scope("attn", || self.attention(normed));
        let x = x + self.branch(layer, y, "attn_scale");
        let normed = self.norm(x, "ffn_norm");
        let y = self.b.scope("ffn", || {
            let up = self.linear(normed, "up", self.c.ffn()).activate(Act::GeluExact);
            self.linear(up, "down", self.c.width)
        });
        x + self.branch(layer, y, "ffn_scale")
    }

    /// What a half block adds: scaled by what is learned, and left out for some images.
    fn branch(&self, layer: usize, y: Tensor<'g>, scale: &str) -> Tensor<'g> {
        let d = self.c.width;
        let y = match self.c.layer_scale {
            Some(value) => {
                let init = Init::Constant { value: value as f32 };
                y * self.b.param(scale, &[d], init).reshape(&[1, d])
            }
            None => y,
        };
        let share = layer as f64 / (self.c.layers - 1).max(1) as f64;
        self.inputs.drop_path(y, share * self.c.drop_path)
    }

    fn attention(&self, x: Tensor<'g>) -> Tensor<'g> {
        let (t, d, h, k) = (x.dims()[0], self.c.width, self.c.heads, self.c.head_size());
        let [q, key, value] = ["wq", "wk", "wv"].map(|name| self.linear(x, name, d).reshape(&[t, h, k]));
        let segments = Segments::Uniform { len: self.c.tokens() };
        let attend = Attend { scale: 1.0 / (k as f32).sqrt(), mask: Mask::Full, q: segments, k: segments };
        let out = q.attention(key, value, &attend, &Masking::default());
        self.linear(out.reshape(&[t, d]), "wo", d)
    }

    /// What the head reads of every image. The norm is by tokens, so only those that are read are normed.
    fn pool(&self, x: Tensor<'g>) -> Tensor<'g> {
        let (n, tokens, d) = (self.images, self.c.tokens(), self.c.width);
        let all = |x: Tensor<'g>| x.reshape(&[n, tokens, d]);
        let cls = |x: Tensor<'g>| all(x).slice(1, 0, 1).reshape(&[n, d]);
        let first = 1 + self.c.registers;
        let mean = |x: Tensor<'g>| all(x).slice(1, first, tokens - first).mean(1).reshape(&[n, d]);
        match self.c.pooling {
            Pooling::Last | Pooling::Max => unreachable!("validated: images have other poolings"),
            Pooling::Cls => self.norm(cls(x), "norm"),
            Pooling::Mean => mean(self.norm(x, "norm")),
            Pooling::ClsMean => {
                let x = self.norm(x, "norm");
                self.b.concat(&[cls(x), mean(x)], 1)
            }
        }
    }
}
