//! The attention half of a block: projections to heads, norms and rotation of queries and keys, attention, output.

use flatout_ir::ops::attention::{Attend, Mask, Masking, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::norm::NormSpec;
use flatout_ir::ops::rope::RopeSpec;
use flatout_ir::{Builder, DType, Init, SlotId, Tensor};

use super::linear::row;
use super::{Cache, Linear, Norm, weight};

#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Number of query heads.
    pub count: usize,
    /// Number of key and value heads.
    pub kv_count: usize,
    pub size: usize,
    /// The factor on scores.
    pub scale: f32,
    /// The soft bound on scores.
    pub cap: Cap,
}

impl Heads {
    /// Heads with as many keys as queries, and scores divided by the square root of the head size.
    pub fn plain(count: usize, size: usize) -> Heads {
        Heads { count, kv_count: count, size, scale: 1.0 / (size as f32).sqrt(), cap: Cap::NONE }
    }
}

/// The attention pattern: the division of the token axis into sequences, and cached keys and values.
#[derive(Clone, Copy)]
pub struct Sight<'g> {
    pub q: Segments,
    pub k: Segments,
    pub masking: Masking<'g>,
    pub cache: Option<Cache<'g>>,
}

impl<'g> Sight<'g> {
    /// Sequences of equal length.
    pub fn rows(len: usize) -> Sight<'g> {
        let segments = Segments::Uniform { len };
        Sight { q: segments, k: segments, masking: Masking::default(), cache: None }
    }

    /// Sequences at (start, len) i32 [S] of at most `longest` tokens each.
    pub fn ragged(bounds: (Tensor<'g>, Tensor<'g>), longest: usize) -> Sight<'g> {
        let segments = Segments::Ragged { max_segments: bounds.0.dims()[0], max_len: longest };
        let masking = Masking { q: Some(bounds), k: Some(bounds), intervals: None };
        Sight { q: segments, k: segments, masking, cache: None }
    }

    /// Trees at (start, len) i32 [S] of at most `longest` tokens each, in which a token sees the rows of its two
    /// `intervals` i32 [T, 4].
    pub fn trees(bounds: (Tensor<'g>, Tensor<'g>), intervals: Tensor<'g>, longest: usize) -> Sight<'g> {
        let ragged = Sight::ragged(bounds, longest);
        Sight { masking: Masking { intervals: Some(intervals), ..ragged.masking }, ..ragged }
    }

    /// The mask of a layer: its own, unless the tokens' intervals give the rows they see.
    pub fn mask(&self, own: Mask) -> Mask {
        if self.masking.intervals.is_some() { Mask::TwoIntervals } else { own }
    }

    /// New tokens of sequences at `new`, after those in a cache of `capacity` tokens per sequence, whose bounds are `seen`.
    pub fn cached(
        [new, seen]: [(Tensor<'g>, Tensor<'g>); 2],
        places: Tensor<'g>,
        capacity: usize,
    ) -> Sight<'g> {
        let (sequences, tokens) = (new.0.dims()[0], places.dims()[0]);
        let of = |max_len: usize| Segments::Ragged { max_segments: sequences, max_len };
        let longest = if tokens == sequences { 1 } else { tokens.min(capacity) };
        Sight {
            q: of(longest),
            k: of(capacity),
            masking: Masking { q: Some(new), k: Some(seen), intervals: None },
            cache: Some(Cache { places, rows: sequences * capacity }),
        }
    }
}

/// Inputs `name_start` and `name_len`, i32 [S]: the first row and the number of tokens of each of S sequences.
pub fn bounds<'g>(b: &'g Builder, name: &str, sequences: usize) -> (Tensor<'g>, Tensor<'g>) {
    let of = |what: &str| b.input(&format!("{name}_{what}"), DType::I32, &[sequences]);
    (of("start"), of("len"))
}

/// The rotary positions i32 [axes, T] and frequencies of queries and keys. Only the first elements of each head rotate, as many
/// as there are frequencies for.
pub struct Rotation<'g> {
    pub positions: Tensor<'g>,
    pub spec: RopeSpec,
}

impl<'g> Rotation<'g> {
    fn apply(&self, x: Tensor<'g>) -> Tensor<'g> {
        let (size, turned) = (x.dims()[2], 2 * self.spec.axis_of_freq.len());
        if turned == size {
            return x.rope(self.positions, &self.spec);
        }
        let rest = x.slice(2, turned, size - turned);
        x.b.concat(&[x.slice(2, 0, turned).rope(self.positions, &self.spec), rest], 2)
    }
}

/// The norm of queries and keys.
#[derive(Clone, Copy, Debug)]
pub enum HeadNorm {
    /// Over each head.
    Each(NormSpec),
    /// Over all heads of a token together, before they are split.
    All(NormSpec),
}

#[derive(Clone, Debug)]
pub struct Attention {
    heads: Heads,
    wq: Linear,
    wk: Linear,
    wv: Linear,
    /// The norms of queries and keys.
    norms: Option<[Norm; 2]>,
    /// Whether those are over all heads of a token together, rather than over each head.
    norms_join_heads: bool,
    /// The factors on learned values of the tokens, [HK K], where the layer adds such values.
    value_gain: Option<SlotId>,
    wo: Linear,
}

/// The initial value of the factors on learned values.
const VALUE_GAIN: f32 = 0.5;

impl Attention {
    /// Declares `wq`, `wk`, `wv`, `q_norm`, `k_norm` and `wo`. Biases and initial values are pairs: of the projections to heads
    /// and of the output, which writes to the residual stream.
    pub fn declare(
        b: &Builder,
        width: usize,
        heads: Heads,
        norm: Option<HeadNorm>,
        biases: [bool; 2],
        [inward, outward]: [Init; 2],
    ) -> Attention {
        let norms = |spec: NormSpec, sizes: [usize; 2]| {
            [("q_norm", sizes[0]), ("k_norm", sizes[1])]
                .map(|(name, size)| Norm::declare(b, name, size, spec))
        };
        let Heads { count, kv_count, size, .. } = heads;
        let into =
            |name: &str, count: usize| Linear::named(b, name, [count * heads.size, width], inward, biases[0]);
        Attention {
            heads,
            wq: into("wq", heads.count),
            wk: into("wk", heads.kv_count),
            wv: into("wv", heads.kv_count),
            norms: norm.map(|norm| match norm {
                HeadNorm::Each(spec) => norms(spec, [size; 2]),
                HeadNorm::All(spec) => norms(spec, [count * size, kv_count * size]),
            }),
            norms_join_heads: matches!(norm, Some(HeadNorm::All(_))),
            value_gain: None,
            wo: Linear::named(b, "wo", [width, heads.count * heads.size], outward, biases[1]),
        }
    }

    /// The layer with learned values of tokens added to its values. Declares `value_gain`.
    pub fn adding_values(self, b: &Builder) -> Attention {
        let size = self.heads.kv_count * self.heads.size;
        let gain = weight(b, "value_gain", &[size], Init::Constant { value: VALUE_GAIN });
        Attention { value_gain: Some(gain), ..self }
    }

    /// Values [T, HK, K] with learned ones of their tokens, [T, HK K], added.
    pub fn add_to_values<'g>(&self, b: &'g Builder, v: Tensor<'g>, learned: Tensor<'g>) -> Tensor<'g> {
        let gain = self.value_gain.expect("this attention was declared with factors on learned values");
        v + (learned * row(b.read(gain))).reshape(&v.dims())
    }

    /// Queries [T, H, K], keys and values [T, HK, K] of x [T, D], as their products compute them.
    pub fn project<'g>(&self, b: &'g Builder, x: Tensor<'g>) -> [Tensor<'g>; 3] {
        let q = self.queries(b, x);
        let [k, v] = self.keys_values(b, x);
        [q, k, v]
    }

    pub fn queries<'g>(&self, b: &'g Builder, x: Tensor<'g>) -> Tensor<'g> {
        let norm = self.norm(0, true);
        self.to_heads(b, x, &self.wq, norm, self.heads.count)
    }

    pub fn keys_values<'g>(&self, b: &'g Builder, x: Tensor<'g>) -> [Tensor<'g>; 2] {
        let norm = self.norm(1, true);
        [(&self.wk, norm), (&self.wv, None)]
            .map(|(product, norm)| self.to_heads(b, x, product, norm, self.heads.kv_count))
    }

    fn to_heads<'g>(
        &self,
        b: &'g Builder,
        x: Tensor<'g>,
        product: &Linear,
        norm: Option<&Norm>,
        heads: usize,
    ) -> Tensor<'g> {
        let y = product.apply(b, x);
        let y = norm.map_or(y, |norm| norm.apply(b, y));
        y.reshape(&[x.dims()[0], heads, self.heads.size])
    }

    /// Queries and keys after norm and rotation.
    pub fn place<'g>(
        &self,
        b: &'g Builder,
        [q, k]: [Tensor<'g>; 2],
        rotation: Option<&Rotation<'g>>,
    ) -> [Tensor<'g>; 2] {
        let place = |x: Tensor<'g>, norm: Option<&Norm>| {
            let x = norm.map_or(x, |norm| norm.apply(b, x));
            rotation.map_or(x, |rotation| rotation.apply(x))
        };
        [place(q, self.norm(0, false)), place(k, self.norm(1, false))]
    }

    /// The norm of queries (0) or keys (1), if it has this scope: all heads together, or each.
    fn norm(&self, of: usize, joins_heads: bool) -> Option<&Norm> {
        self.norms.as_ref().filter(|_| self.norms_join_heads == joins_heads).map(|norms| &norms[of])
    }

    /// Projects the heads' outputs, [T, H, K], to the residual stream [T, D].
    pub fn output<'g>(&self, b: &'g Builder, gathered: Tensor<'g>) -> Tensor<'g> {
        let t = gathered.dims()[0];
        self.wo.apply(b, gathered.reshape(&[t, self.heads.count * self.heads.size]))
    }

    /// The heads' outputs [T, H, K] from queries, keys and values as their products compute them. `layer` names the caches.
    pub fn attend<'g>(
        &self,
        b: &'g Builder,
        [q, k, v]: [Tensor<'g>; 3],
        layer: usize,
        rotation: Option<&Rotation<'g>>,
        sight: &Sight<'g>,
        mask: Mask,
    ) -> Tensor<'g> {
        let [q, k] = self.place(b, [q, k], rotation);
        let [k, v] = match sight.cache {
            Some(cache) => [("k", k), ("v", v)].map(|(name, x)| cache.extend(&format!("{name}.{layer}"), x)),
            None => [k, v],
        };
        self.attend_to([q, k, v], sight, mask)
    }

    /// The heads' outputs [T, H, K] for queries [T, H, K] over keys and values.
    pub fn attend_to<'g>(&self, [q, k, v]: [Tensor<'g>; 3], sight: &Sight<'g>, mask: Mask) -> Tensor<'g> {
        let Heads { scale, cap, .. } = self.heads;
        let attend = Attend { scale, cap, mask, q: sight.q, k: sight.k };
        q.attention(k, v, &attend, &sight.masking)
    }

    /// x [T, D] to [T, D]. `layer` names the caches.
    pub fn apply<'g>(
        &self,
        b: &'g Builder,
        x: Tensor<'g>,
        layer: usize,
        rotation: Option<&Rotation<'g>>,
        sight: &Sight<'g>,
        mask: Mask,
    ) -> Tensor<'g> {
        self.output(b, self.attend(b, self.project(b, x), layer, rotation, sight, mask))
    }
}
