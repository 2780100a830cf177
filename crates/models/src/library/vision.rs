//! Vision transformers in the formats of other libraries: one row for each `transformers` format, and timm's.

use serde_json::{Map, Value};

use super::fields::Fields;
use super::processor::{self, Processor};
use super::stored::{Resampled, Stored};
use super::{Published, clip, dinov2, timm, vit};
use crate::config::VitConfig;

/// A model with the names of its classes and the preprocessing of its images, as far as its files describe them.
pub(crate) type VitDescription = (VitConfig, Vec<String>, Processor);

/// A format of vision transformers.
pub(crate) struct Files {
    /// The `model_type`s of its `config.json`; timm has none.
    pub model_types: &'static [&'static str],
    pub read: fn(&Fields<'_>) -> Result<VitDescription, String>,
    /// Whether a vision transformer is written in this format, if no earlier format applies.
    pub holds: fn(&VitConfig) -> bool,
    /// The `config.json`, or the key that the format does not support.
    pub write: fn(&VitConfig, &str) -> Result<Value, String>,
    /// Location of every weight.
    pub stored: fn(&VitConfig) -> Result<Vec<Stored>, String>,
    /// Prefixes of the body's tensors, which files of the body alone omit.
    pub bases: &'static [&'static str],
    /// Whether a tensor, by its name after the base, belongs to a part that the classifier does not read.
    pub is_redundant: fn(&str) -> bool,
    /// Positions to resample to the grid of the model's own images, where the format requires it.
    pub resampled: fn(&VitConfig) -> Option<Resampled>,
    /// The fields of `config.json` that name the classes.
    pub label_fields: fn(&[String]) -> Map<String, Value>,
}

/// In the order in which a vision transformer is compared with them; the last accepts all others.
const ALL: [&Files; 6] = [&clip::CLIP, &clip::SIGLIP, &vit::DEIT, &dinov2::DINOV2, &vit::VIT, &timm::TIMM];

/// Reads a parsed `config.json` that describes one.
pub(crate) fn read(config: &Value) -> Option<Result<VitDescription, String>> {
    let fields = Fields(config.as_object()?);
    let kind = fields.get("model_type").and_then(Value::as_str);
    if kind.is_some_and(|kind| kind.starts_with("siglip2")) {
        return Some(Err(
            "its `model_type` is siglip2, whose tower reads images of any shape, and here all have one: \
                         SigLIP-2 with one size of images is of model_type siglip"
                .into(),
        ));
    }
    let files = match kind {
        Some(kind) => ALL.into_iter().find(|files| files.model_types.contains(&kind))?,
        None if timm::is_ours(&fields) => &timm::TIMM,
        None => return None,
    };
    Some((files.read)(&fields).and_then(|(vit, classes, processor)| {
        vit.validate_body().map_err(|sentence| format!("it describes no model: {sentence}"))?;
        Ok((vit, classes, processor))
    }))
}

/// Every `model_type` that is read, in a sentence.
pub(super) fn model_types() -> String {
    let all: Vec<&str> = ALL.iter().flat_map(|files| files.model_types).copied().collect();
    all.join(", ")
}

impl Files {
    fn of(vit: &VitConfig) -> &'static Files {
        ALL.into_iter().find(|files| (files.holds)(vit)).expect("the last holds all")
    }

    /// A name without its base, if it begins with one.
    pub fn bare<'n>(&self, name: &'n str) -> Option<&'n str> {
        self.bases.iter().find_map(|base| name.strip_prefix(base)?.strip_prefix('.'))
    }
}

/// The positions to resample, by the name of their tensor, if their grid differs from the images': these libraries require the
/// positions of the model's own images.
pub(super) fn of_its_images(c: &VitConfig, theirs: &'static str) -> Option<Resampled> {
    let (from, to) = ([c.grid(); 2], c.patches());
    let prefix = c.prefix_positions();
    (from != to).then_some(Resampled { theirs, prefix, from, to, antialias: c.antialias })
}

impl Published for VitConfig {
    fn stored(&self, _shape: &dyn Fn(&str) -> Vec<usize>) -> Result<Vec<Stored>, String> {
        (Files::of(self).stored)(self)
    }

    fn other_names(&self, name: &str) -> Vec<String> {
        Files::of(self).bare(name).map(str::to_string).into_iter().collect()
    }

    fn is_redundant(&self, name: &str) -> bool {
        let files = Files::of(self);
        (files.is_redundant)(files.bare(name).unwrap_or(name))
    }

    fn write(&self, dtype: &str, _bos: &[u32], _eos: &[u32]) -> Result<Value, String> {
        if self.sides()[0] != self.sides()[1] {
            return Err(
                "published vision transformers have square images, and `model.image_height` is given".into(),
            );
        }
        (Files::of(self).write)(self, dtype)
    }

    fn resampled(&self) -> Option<Resampled> {
        (Files::of(self).resampled)(self)
    }

    fn label_fields(&self, names: &[String]) -> Map<String, Value> {
        (Files::of(self).label_fields)(names)
    }

    fn processor(&self, processor: &Processor) -> Option<Value> {
        Some(processor::write(self, processor))
    }

    fn describe_processor(&self, config: &mut Value, processor: &Processor) {
        if let Some(cfg) = config.get_mut("pretrained_cfg").and_then(Value::as_object_mut) {
            cfg.extend(processor::write_timm(self, processor));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::{Activation, FinalNorm, Pooling, VitLibrary};
    use crate::library::read;
    use crate::library::stored::assert_filled;
    use crate::registry::Model;

    fn read_vit(config: &Value) -> VitConfig {
        match read(config).expect("a model").model {
            Model::Vit(vit) => vit,
            other => panic!("{other:?}"),
        }
    }

    /// The published file of facebook/dinov2-small, reduced to the fields that are read.
    fn dinov2_small() -> Value {
        json!({
            "architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 384, "image_size": 518,
            "patch_size": 14, "num_attention_heads": 6, "num_hidden_layers": 12, "mlp_ratio": 4,
            "layerscale_value": 1.0, "layer_norm_eps": 1e-6, "hidden_act": "gelu", "qkv_bias": true,
            "use_swiglu_ffn": false, "num_channels": 3,
        })
    }

    #[test]
    fn dinov2_reads_and_is_written_back() {
        let small = read_vit(&dinov2_small());
        assert_eq!((small.width, small.heads, small.grid, small.classes), (384, 6, Some(37), None));
        let classes = VitConfig { classes: Some(3), ..small };
        let written = classes.write("float32", &[], &[]).unwrap();
        assert_eq!(written["architectures"][0], "Dinov2ForImageClassification");
        assert_eq!(read_vit(&written), classes);
        let registers = VitConfig { registers: 4, antialias: true, ..classes };
        let written = registers.write("float32", &[], &[]).unwrap();
        assert_eq!(read_vit(&written), registers);
    }

    /// The giant model has a gated feed-forward of two thirds of four widths: 4096 for 1536.
    #[test]
    fn a_gated_dinov2_reads_and_is_written_back() {
        let mut config = dinov2_small();
        config["hidden_size"] = json!(1536);
        config["num_attention_heads"] = json!(24);
        config["use_swiglu_ffn"] = json!(true);
        let giant = read_vit(&config);
        assert_eq!((giant.swiglu, giant.ffn()), (true, 4096));
        let classes = VitConfig { classes: Some(3), ..giant };
        assert_eq!(read_vit(&classes.write("float32", &[], &[]).unwrap()), classes);
        let odd = VitConfig { ffn: Some(4100), ..classes };
        assert!(odd.write("float32", &[], &[]).unwrap_err().contains("`model.ffn`"));
    }

    /// The published file of google/vit-base-patch16-224, reduced to the fields that are read.
    #[test]
    fn vit_reads_and_is_written_back() {
        let base = read_vit(&json!({
            "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 768, "image_size": 224,
            "patch_size": 16, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072,
            "layer_norm_eps": 1e-12, "hidden_act": "gelu", "qkv_bias": true, "id2label": { "0": "tench", "1": "goldfish" },
        }));
        assert_eq!((base.width, base.grid, base.classes, base.norm_eps), (768, Some(14), Some(2), 1e-12));
        assert_eq!((base.mean, base.std), ([0.5; 3], [0.5; 3]), "those of the library's processor");
        assert_eq!(base.parameters(), 85_798_656 + 2 * 769);
        let written = base.write("float32", &[], &[]).unwrap();
        assert_eq!(written["architectures"][0], "ViTForImageClassification");
        assert_eq!(read_vit(&written), base);
        let timm = VitConfig { library: VitLibrary::Timm, norm_eps: 1e-6, ..base.clone() };
        assert!(timm.write("float32", &[], &[]).unwrap().get("architecture").is_some());
        let scaled = VitConfig { layer_scale: Some(1.0), ..base };
        assert!(scaled.write("float32", &[], &[]).unwrap_err().contains("`model.layer_scale`: none"));
    }

    /// The published file of facebook/deit-base-distilled-patch16-224, reduced to the fields that are read; its two heads are
    /// not read.
    #[test]
    fn deit_reads_and_is_written_back() {
        let config = |class: &str| {
            json!({
                "architectures": [class], "model_type": "deit", "hidden_size": 768, "image_size": 224, "patch_size": 16,
                "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
                "hidden_act": "gelu", "qkv_bias": true, "id2label": { "0": "tench", "1": "goldfish" },
            })
        };
        let body = read_vit(&config("DeiTForImageClassificationWithTeacher"));
        assert_eq!((body.registers, body.prefix_positions(), body.tokens()), (1, 2, 198));
        assert_eq!(
            (body.classes, body.parameters()),
            (None, 85_800_192),
            "DeiTModel's own count without its pooler"
        );
        assert!(
            body.is_redundant("cls_classifier.weight") && body.is_redundant("distillation_classifier.bias")
        );
        let classes = read_vit(&config("DeiTForImageClassification"));
        let written = classes.write("float32", &[], &[]).unwrap();
        assert_eq!(written["architectures"][0], "DeiTForImageClassification");
        assert_eq!(read_vit(&written), classes);
    }

    /// timm's variants with registers, of CLIP and of SigLIP, under their published names.
    #[test]
    fn timms_towers_read_and_are_written_back() {
        let read = |name: &str| read_vit(&json!({ "architecture": name, "num_classes": 10 }));
        let dino = read("vit_small_patch14_reg4_dinov2.lvd142m");
        assert_eq!((dino.registers, dino.prefix_positions(), dino.layer_scale), (4, 0, Some(1e-5)));
        let gap = read("vit_medium_patch16_reg4_gap_256.sbb_in12k_ft_in1k");
        assert_eq!((gap.class_token, gap.final_norm, gap.width), (false, FinalNorm::Pooled, 512));
        let clip = read("vit_base_patch32_clip_quickgelu_224.openai");
        assert_eq!((clip.activation, clip.norm_eps, clip.patch), (Activation::QuickGelu, 1e-5, 32));
        let siglip = read("vit_base_patch16_siglip_gap_224.v2_webli");
        assert_eq!((siglip.class_token, siglip.pooling, siglip.mean), (false, Pooling::Mean, [0.5; 3]));
        assert_eq!((siglip.final_norm, siglip.activation), (FinalNorm::Tokens, Activation::GeluExact));
        for vit in [dino, gap, clip, siglip] {
            let odd = VitConfig {
                width: 60,
                heads: 3,
                ffn: Some(150),
                grid: Some(9),
                patch: 7,
                image_size: 63,
                ..vit
            };
            assert_eq!(read_vit(&odd.write("", &[], &[]).unwrap()), odd);
        }
    }

    /// The library only accepts positions for a model's own images: ViT, DeiT, CLIP and SigLIP are exported with those.
    #[test]
    fn exports_have_positions_of_the_training_size() {
        for (kind, class) in [
            ("vit", "ViTForImageClassification"),
            ("deit", "DeiTForImageClassification"),
            ("clip", "CLIPForImageClassification"),
            ("siglip", "SiglipForImageClassification"),
        ] {
            let read = read_vit(&json!({
                "model_type": kind, "architectures": [class], "id2label": { "0": "a", "1": "b" },
            }));
            assert_eq!(read.resampled(), None, "{kind}");
            let run = VitConfig { image_size: 8 * read.patch, ..read.clone() };
            let back = read_vit(&run.write("float32", &[], &[]).unwrap());
            assert_eq!(back, VitConfig { grid: Some(8), ..run.clone() }, "{kind}");
            let resampled = run.resampled().expect(kind);
            let positions = |vit: &VitConfig| {
                let table = vit.stored(&|_| vec![]).unwrap();
                table.into_iter().find(|at| at.ours == "positions.weight").expect("positions")
            };
            assert_eq!(resampled.theirs, positions(&run).theirs, "{kind}");
            assert_eq!(resampled.dims(&positions(&run).dims), positions(&back).dims, "{kind}");
            assert_eq!((resampled.from, resampled.to), ([read.grid(); 2], [8; 2]), "{kind}");
        }
    }

    #[test]
    fn normalisation_is_read_from_the_processor() {
        let mut model = read(&dinov2_small()).unwrap().model;
        let Model::Vit(vit) = &model else { panic!("a vision transformer") };
        let half = VitConfig { mean: [0.5; 3], std: [0.25; 3], image_size: 224, ..vit.clone() };
        let written = half.processor(&Processor { resize: vec![256], ..Processor::default() }).unwrap();
        assert_eq!(written["size"]["shortest_edge"], 256);
        model.normalise(&written).unwrap();
        assert_eq!(model, Model::Vit(VitConfig { image_size: 518, ..half }));
        assert!(model.normalise(&json!({ "image_std": [0, 1, 1] })).unwrap_err().contains("`model.std`"));
        assert!(model.normalise(&json!({ "image_mean": [0] })).unwrap_err().contains("three numbers"));
    }

    #[test]
    fn timm_reads_and_is_written_back() {
        let tiny =
            read_vit(&json!({ "architecture": "vit_tiny_patch16_224.augreg_in21k", "num_classes": 1000 }));
        assert_eq!((tiny.width, tiny.heads, tiny.patch, tiny.classes), (192, 3, 16, Some(1000)));
        assert_eq!((tiny.grid, tiny.layer_scale, tiny.mean), (Some(14), None, [0.5; 3]));
        let odd = VitConfig { width: 60, ffn: Some(150), grid: Some(9), patch: 7, image_size: 63, ..tiny };
        assert_eq!(read_vit(&odd.write("", &[], &[]).unwrap()), odd);
        let dino = read_vit(&json!({ "architecture": "vit_base_patch14_dinov2", "num_classes": 0 }));
        assert_eq!((dino.grid, dino.layer_scale, dino.classes), (Some(37), Some(1e-5), None));
    }

    #[test]
    fn fields_that_change_results_are_refused_by_name() {
        let refused = |config: Value| read(&config).expect_err("a refusal");
        let changed = |name: &str, value: Value| {
            let mut config = dinov2_small();
            config[name] = value;
            refused(config)
        };
        assert!(changed("use_swiglu_ffn", json!("yes")).contains("its `use_swiglu_ffn` is \"yes\""));
        assert!(changed("qkv_bias", json!(false)).contains("its `qkv_bias` is false"));
        assert!(
            refused(json!({ "model_type": "vit", "architectures": ["ViTForMaskedImageModeling"] }))
                .contains("Masked")
        );
        assert!(
            refused(json!({ "model_type": "vit", "hidden_act": "relu" }))
                .contains("`hidden_act` is \"relu\"")
        );
        assert!(changed("image_size", json!(515)).contains("does not divide its `image_size` 515"));
        assert!(changed("architectures", json!(["Dinov2Backbone"])).contains("Dinov2Backbone"));
        assert!(changed("num_attention_heads", json!(7)).contains("`model.heads` = 7"));
        assert!(refused(json!({ "architecture": "resnet50" })).contains("resnet50"));
        let pooled = json!({ "architecture": "vit_tiny_patch16_224", "model_args": { "fc_norm": true } });
        assert!(refused(pooled).contains("`fc_norm`"));
        let args = json!({ "global_pool": "avg", "pool_include_prefix": true });
        let all = json!({ "architecture": "vit_tiny_patch16_224", "model_args": args });
        assert!(refused(all).contains("`pool_include_prefix` = true"));
        let wide = json!({ "architecture": "vit_tiny_patch16_224", "model_args": { "img_size": [32, 16] } });
        assert!(refused(wide).contains("here images and patches are square"));
        let square =
            json!({ "architecture": "vit_tiny_patch16_224", "model_args": { "img_size": [32, 32] } });
        assert_eq!(read_vit(&square).image_size, 32, "as newer versions write it");
        let attending = json!({ "architecture": "vit_base_patch16_siglip_224", "global_pool": "map" });
        assert!(refused(attending).contains("vit_base_patch16_siglip_gap_224"));
        let args = json!({ "global_pool": "map", "fc_norm": false });
        let pooled = json!({ "architecture": "vit_tiny_patch16_224", "model_args": args });
        assert!(refused(pooled).contains("only token and avg"));
        let vit = read_vit(&dinov2_small());
        let write = |vit: VitConfig| vit.write("float32", &[], &[]).expect_err("a refusal");
        assert!(write(VitConfig { layer_scale: None, ..vit.clone() }).contains("`model.layer_scale`"));
        assert!(write(VitConfig { pooling: Pooling::Mean, registers: 1, ..vit }).contains("`model.pooling`"));
    }

    /// Every parameter of the graph has one location of its size, and the locations fill each tensor.
    #[test]
    fn every_weight_has_one_location() {
        let vit = VitConfig {
            width: 6,
            layers: 2,
            heads: 2,
            patch: 2,
            image_size: 4,
            grid: Some(3),
            classes: Some(4),
            layer_scale: Some(0.5),
            ..VitConfig::default()
        };
        let dinov2 = VitConfig { pooling: Pooling::ClsMean, ..vit.clone() };
        let registers = VitConfig { registers: 2, grid: None, ..dinov2.clone() };
        let plain = VitConfig { layer_scale: None, ..vit.clone() };
        let transformers = VitConfig { library: VitLibrary::Transformers, ..plain.clone() };
        let gated = VitConfig { swiglu: true, ffn: Some(16), ..dinov2.clone() };
        let deit = VitConfig { registers: 1, prefix_positions: Some(2), ..transformers.clone() };
        let clip = VitConfig {
            input_norm: true,
            final_norm: FinalNorm::None,
            pooling: Pooling::Mean,
            ..transformers.clone()
        };
        let siglip = VitConfig { class_token: false, pooling: Pooling::Mean, ..transformers.clone() };
        let timm_registers = VitConfig { registers: 3, prefix_positions: Some(0), ..plain.clone() };
        let timm_clip = VitConfig { input_norm: true, norm_eps: 1e-5, ..plain.clone() };
        let pooled = VitConfig {
            class_token: false,
            final_norm: FinalNorm::Pooled,
            pooling: Pooling::Mean,
            ..timm_registers.clone()
        };
        let plain_ones = [plain, vit, dinov2, registers, transformers, gated];
        for vit in plain_ones.into_iter().chain([deit, clip, siglip, timm_registers, timm_clip, pooled]) {
            let model = Model::Vit(vit);
            let graph = model.build(model.least());
            let table = model.published().unwrap().stored(&|_| vec![]).unwrap();
            assert_filled(&graph, &table);
        }
    }
}
