//! The library's modules that can have adapters, and the weights of our model in each.
//!
//! A module holds one of our weights, or several concatenated by rows, as q, k and v in Phi-3. An adapter of such a module
//! becomes one adapter per part, with the same A and the part's rows of B. Conversely, adapters of the parts become a single one
//! whose rank is the sum of theirs: its A stacks theirs, and its B has each in its own rows and columns and zeros elsewhere.
//!
//! For the token embedding the library looks up columns of `lora_embedding_A` and multiplies them by `lora_embedding_B`: these
//! are our B and A, both transposed.

use std::collections::BTreeSet;

use flatout_ir::Adapter;
use flatout_ir::passes::adapter::{EMBED, HEAD};
use flatout_ir::passes::adapters::adaptable;
use flatout_models::config::DecoderConfig;
use flatout_models::library::huggingface;
use flatout_models::library::stored::{Stored, Within};
use flatout_models::registry::Family;
use flatout_models::vision;

use crate::weights::pretrained::parameters;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Module {
    pub name: String,
    /// Shape [out, in] of the whole module.
    pub dims: [usize; 2],
    pub parts: Vec<WeightRows>,
}

/// Suffixes of A, B and DoRA's magnitudes after the name of a module.
const LINEAR: [&str; 3] = ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"];
/// Suffixes for the token embedding, whose first tensor is looked up: our B.
const TABLE: [&str; 2] = ["lora_embedding_A", "lora_embedding_B"];

/// A tensor of an adapter as stored in a file.
pub(crate) struct FileTensor {
    /// Suffix after the name of the module.
    pub name: &'static str,
    pub dims: Vec<usize>,
    /// Whether our tensor, [columns, rows], is the transpose.
    pub turned: bool,
}

impl FileTensor {
    /// The location of our tensor in it, unless it is the whole tensor unchanged.
    fn place(&self, ours: &str, theirs: &str) -> Option<Stored> {
        let within = || Within::Columns { transposed: true, columns: 0..self.dims[1] };
        let (ours, theirs, dims) = (ours.to_string(), theirs.to_string(), self.dims.clone());
        self.turned.then(|| Stored { ours, theirs, dims, within: within() })
    }

    /// Converts our values to those of the file.
    pub fn of_ours(&self, values: Vec<f32>) -> Vec<f32> {
        let Some(place) = self.place("", "") else { return values };
        let mut theirs = vec![0.0; values.len()];
        place.put(&values, &mut theirs);
        theirs
    }
}

/// One of our weights and its rows in a module.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WeightRows {
    pub weight: String,
    pub first: usize,
    pub rows: usize,
}

/// The modules of all weights that can have adapters, in the order of the model.
pub(crate) fn modules(model: &DecoderConfig) -> Result<Vec<Module>, String> {
    let shapes = parameters(&model.clone().into());
    let graph = model.build(model.least());
    let weights: BTreeSet<&str> = adaptable(&graph).into_iter().map(|(path, _)| path).collect();
    let mut modules: Vec<Module> = vec![];
    let shape = |path: &str| shapes[path].0.dims.clone();
    for stored in huggingface::stored(model, shape)?.into_iter().chain(tied_head(model, &shape)) {
        if !weights.contains(stored.ours.as_str()) {
            continue;
        }
        let rows = match &stored.within {
            _ if stored.is_whole() => 0..stored.dims[0],
            // In a tower q, k and v are parts of one tensor; its other weights can have adapters.
            _ if is_of_tower(&stored.ours) => continue,
            Within::Rows(rows) => rows.clone(),
            _ => {
                return Err(format!("`{}` is part of `{}` there, or transposed", stored.ours, stored.theirs));
            }
        };
        let name = stored.theirs.strip_suffix(".weight").unwrap_or(&stored.theirs).to_string();
        let part = WeightRows { weight: stored.ours, first: rows.start, rows: rows.len() };
        match modules.iter_mut().find(|module| module.name == name) {
            Some(module) => module.parts.push(part),
            None => {
                let dims = [stored.dims[0], stored.dims[1..].iter().product()];
                modules.push(Module { name, dims, parts: vec![part] });
            }
        }
    }
    Ok(modules)
}

/// The tied head of a model: the library has a module for it nevertheless.
fn tied_head(model: &DecoderConfig, shape: &dyn Fn(&str) -> Vec<usize>) -> Option<Stored> {
    let apart = DecoderConfig { tied: false, ..model.clone() };
    let shape = |path: &str| shape(if path == HEAD { EMBED } else { path });
    let all = huggingface::stored(&apart, shape).ok().filter(|_| model.tied)?;
    all.into_iter().find(|stored| stored.ours == HEAD)
}

fn is_of_tower(weight: &str) -> bool {
    weight.split('.').next() == Some(vision::SCOPE)
}

impl Module {
    /// Whether it is the token embedding.
    pub fn is_table(&self) -> bool {
        self.parts[0].weight == EMBED
    }

    /// The tensor whose presence identifies an adapter of this module: its first dimension is the rank.
    pub fn first_tensor(&self) -> &'static str {
        if self.is_table() { TABLE[0] } else { LINEAR[0] }
    }

    /// The tensors of an adapter as stored in a file, in our order.
    pub fn tensors(&self, rank: usize, dora: bool) -> Vec<FileTensor> {
        let [out, inner] = self.dims;
        let file_tensor = |name: &'static str, dims: &[usize], turned: bool| FileTensor {
            name,
            dims: dims.to_vec(),
            turned,
        };
        if self.is_table() {
            return vec![
                file_tensor(TABLE[1], &[inner, rank], true),
                file_tensor(TABLE[0], &[rank, out], true),
            ];
        }
        let mut all =
            vec![file_tensor(LINEAR[0], &[rank, inner], false), file_tensor(LINEAR[1], &[out, rank], false)];
        all.extend(dora.then(|| file_tensor(LINEAR[2], &[out], false)));
        all
    }

    /// The location of a part in a tensor; `None` if it is the whole tensor unchanged.
    pub fn place(
        &self,
        part: &WeightRows,
        file_tensor: &FileTensor,
        ours: &str,
        theirs: &str,
    ) -> Option<Stored> {
        // All parts share A; of the other tensors each part has its own rows.
        match self.is_joint() && file_tensor.name != LINEAR[0] {
            true => {
                let within = Within::Rows(part.first..part.first + part.rows);
                let (ours, theirs) = (ours.to_string(), theirs.to_string());
                Some(Stored { ours, theirs, dims: file_tensor.dims.clone(), within })
            }
            false => file_tensor.place(ours, theirs),
        }
    }

    pub fn is_joint(&self) -> bool {
        self.parts.len() > 1
    }
}

/// The adapters of the parts of one module, which the library has as a single adapter.
pub(crate) struct ModuleAdapters<'a> {
    pub module: &'a Module,
    pub adapters: Vec<&'a Adapter>,
}

impl<'a> ModuleAdapters<'a> {
    /// One entry for each module with adapters. The error names a weight that belongs to no module.
    pub fn of(modules: &'a [Module], adapters: &'a [Adapter]) -> Result<Vec<ModuleAdapters<'a>>, String> {
        let has =
            |module: &Module, adapter: &Adapter| module.parts.iter().any(|p| p.weight == adapter.weight);
        if let Some(other) = adapters.iter().find(|a| !modules.iter().any(|module| has(module, a))) {
            return Err(format!("`{}` is part of a larger tensor there", other.weight));
        }
        let mut all = vec![];
        for module in modules {
            let adapters: Vec<&Adapter> = adapters.iter().filter(|adapter| has(module, adapter)).collect();
            if adapters.is_empty() {
                continue;
            }
            if adapters[0].dora && adapters.len() < module.parts.len() {
                let missing =
                    module.parts.iter().find(|part| adapters.iter().all(|a| a.weight != part.weight));
                let missing = missing.map_or("", |part| part.weight.as_str());
                return Err(format!(
                    "`{}` has no adapter, and its rows of `{}` would need a magnitude there",
                    missing, module.name
                ));
            }
            all.push(ModuleAdapters { module, adapters });
        }
        Ok(all)
    }

    pub fn rank(&self) -> usize {
        self.adapters.iter().map(|adapter| adapter.rank).sum()
    }

    /// The scale of the joined product: that of the first adapter. The ratios of the others are multiplied into their parts of B.
    pub fn scale(&self) -> f64 {
        self.adapters[0].scale
    }

    pub fn alpha(&self) -> f64 {
        self.scale() * self.rank() as f64
    }

    fn part(&self, adapter: &Adapter) -> &WeightRows {
        self.module.parts.iter().find(|part| part.weight == adapter.weight).expect("an adapter of the module")
    }

    /// Joins the A of each adapter to A [rank, in].
    pub fn join_a(&self, each: &[Vec<f32>]) -> Vec<f32> {
        each.concat()
    }

    /// Joins the B of each adapter to B [out, rank].
    pub fn join_b(&self, each: &[Vec<f32>]) -> Vec<f32> {
        let rank = self.rank();
        let mut joined = vec![0.0; self.module.dims[0] * rank];
        let mut column = 0;
        for (adapter, b) in self.adapters.iter().zip(each) {
            let factor = adapter.scale / self.scale();
            let first = self.part(adapter).first;
            for (row, values) in b.chunks_exact(adapter.rank).enumerate() {
                let at = (first + row) * rank + column;
                let values =
                    values.iter().map(|x| if factor == 1.0 { *x } else { (*x as f64 * factor) as f32 });
                joined[at..at + adapter.rank].iter_mut().zip(values).for_each(|(to, x)| *to = x);
            }
            column += adapter.rank;
        }
        joined
    }

    /// Joins the magnitudes of each adapter to [out].
    pub fn join_magnitudes(&self, each: &[Vec<f32>]) -> Vec<f32> {
        let mut joined = vec![0.0; self.module.dims[0]];
        for (adapter, magnitudes) in self.adapters.iter().zip(each) {
            let part = self.part(adapter);
            joined[part.first..part.first + part.rows].copy_from_slice(magnitudes);
        }
        joined
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phi3() -> DecoderConfig {
        let config = serde_json::json!({
            "model_type": "phi3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 6, "vocab_size": 11, "sliding_window": 3,
            "partial_rotary_factor": 0.5,
        });
        huggingface::read(&config).expect("a Phi-3").model
    }

    #[test]
    fn modules_of_a_fused_tensor_have_parts() {
        let all = modules(&phi3()).expect("modules");
        let names: Vec<&str> = all.iter().map(|module| module.name.as_str()).collect();
        let layer = "model.layers.0";
        assert_eq!((names[0], names[5]), ("model.embed_tokens", "lm_head"));
        assert_eq!(
            names[1..5],
            ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
                .map(|name| format!("{layer}.{name}"))
        );
        let (qkv, gate_up, down) = (&all[1], &all[3], &all[4]);
        let rows: Vec<(usize, usize)> = qkv.parts.iter().map(|part| (part.first, part.rows)).collect();
        assert_eq!((rows, qkv.dims), (vec![(0, 8), (8, 4), (12, 4)], [16, 8]));
        assert!(gate_up.is_joint() && !down.is_joint());
    }

    /// A tied head has the name that it would have if it were not tied.
    #[test]
    fn both_ends_are_modules() {
        for tied in [true, false] {
            let all = modules(&DecoderConfig { tied, ..phi3() }).expect("modules");
            let [first, .., last] = &all[..] else { panic!("several modules") };
            assert!(first.is_table() && !last.is_table());
            assert_eq!(
                (last.name.as_str(), last.dims, last.parts[0].weight.as_str()),
                ("lm_head", [11, 8], HEAD)
            );
            let turned = first.tensors(3, false);
            assert_eq!((turned[0].name, &turned[0].dims[..]), ("lora_embedding_B", &[8, 3][..]));
            assert_eq!((turned[1].name, &turned[1].dims[..]), ("lora_embedding_A", &[3, 11][..]));
            let ours: Vec<f32> = (0..24).map(|i| i as f32).collect();
            assert_eq!(turned[0].of_ours(ours)[..4], [0.0, 8.0, 16.0, 1.0]);
        }
    }

    /// The joint product equals those of the parts: s B A of the whole has each part's s B A in its rows.
    #[test]
    fn joined_adapters_multiply_out_to_the_parts() {
        let all = modules(&phi3()).expect("modules");
        let adapter = |weight: &str, rank: usize, scale: f64| Adapter {
            name: "default".into(),
            weight: format!("layers.0.attn.{weight}"),
            rank,
            scale,
            dropout: 0.0,
            dora: false,
        };
        let adapters = [adapter("wq", 2, 0.5), adapter("wv", 1, 2.0)];
        let beside = ModuleAdapters::of(&all, &adapters).expect("adapters").remove(0);
        let drawn =
            |n: usize, seed: usize| (0..n).map(|i| ((i * 7 + seed) % 11) as f32 - 5.0).collect::<Vec<_>>();
        let a = [drawn(2 * 8, 1), drawn(8, 2)];
        let b = [drawn(8 * 2, 3), drawn(4, 4)];
        let (joint_a, joint_b) = (beside.join_a(&a), beside.join_b(&b));
        assert_eq!((beside.rank(), beside.alpha()), (3, 1.5));
        let product = |a: &[f32], b: &[f32], rank: usize, scale: f64, row: usize, column: usize| -> f64 {
            let sum: f32 = (0..rank).map(|r| b[row * rank + r] * a[r * 8 + column]).sum();
            scale * sum as f64
        };
        for row in 0..16 {
            for column in 0..8 {
                let joint = product(&joint_a, &joint_b, 3, beside.scale(), row, column);
                let own = match row {
                    0..8 => product(&a[0], &b[0], 2, 0.5, row, column),
                    12..16 => product(&a[1], &b[1], 1, 2.0, row - 12, column),
                    _ => 0.0,
                };
                assert_eq!(joint, own, "row {row}, column {column}");
            }
        }
        let dora = [Adapter { dora: true, ..adapter("wq", 2, 0.5) }];
        let refused = ModuleAdapters::of(&all, &dora).err().expect("k and v have no magnitudes");
        assert!(refused.contains("`layers.0.attn.wk` has no adapter"), "{refused}");
    }
}
