//! Vision transformers as other libraries publish them: DINOv2 and ViT of `transformers`, or timm's.

use serde_json::{Map, Value};

use super::fields::Fields;
use super::processor::{self, Processor};
use super::stored::{Resampled, Stored};
use super::{Published, class_heads, dinov2, timm, vit};
use crate::config::{Pooling, VitConfig, VitLibrary};

/// A model with the names of its classes and how its images are made, as far as its files say so.
type Seen = (VitConfig, Vec<String>, Processor);

/// Reads a parsed `config.json` that describes one.
pub(crate) fn read(config: &Value) -> Option<Result<Seen, String>> {
    let fields = Fields(config.as_object()?);
    let plain = |(vit, classes)| (vit, classes, Processor::default());
    let read = match fields.get("model_type").and_then(Value::as_str) {
        Some(dinov2::PLAIN | dinov2::WITH_REGISTERS) => dinov2::read(&fields).map(plain),
        Some(vit::MODEL_TYPE) => vit::read(&fields).map(plain),
        _ if timm::is_ours(&fields) => timm::read(&fields),
        _ => return None,
    };
    Some(read.and_then(|(vit, classes, processor)| {
        vit.validate_body().map_err(|sentence| format!("it describes no model: {sentence}"))?;
        Ok((vit, classes, processor))
    }))
}

/// Whose files a vision transformer is published in.
enum Files {
    Dinov2,
    Vit,
    Timm,
}

impl Files {
    fn of(vit: &VitConfig) -> Files {
        match vit.library {
            _ if vit.pooling == Pooling::ClsMean || vit.registers > 0 || vit.swiglu => Files::Dinov2,
            VitLibrary::Transformers => Files::Vit,
            VitLibrary::Timm => Files::Timm,
        }
    }
}

impl Published for VitConfig {
    fn stored(&self, _shape: &dyn Fn(&str) -> Vec<usize>) -> Result<Vec<Stored>, String> {
        match Files::of(self) {
            Files::Dinov2 => dinov2::stored(self),
            Files::Vit => vit::stored(self),
            Files::Timm => timm::stored(self),
        }
    }

    fn other_names(&self, name: &str) -> Vec<String> {
        dinov2::other_names(name).into_iter().chain(vit::other_names(name)).collect()
    }

    fn is_redundant(&self, name: &str) -> bool {
        dinov2::is_redundant(name) || vit::is_redundant(name)
    }

    fn write(&self, dtype: &str, _bos: &[u32], _eos: &[u32]) -> Result<Value, String> {
        if self.sides()[0] != self.sides()[1] {
            return Err(
                "published vision transformers have square images, and `model.image_height` is given".into(),
            );
        }
        match Files::of(self) {
            Files::Dinov2 => dinov2::write(self, dtype),
            Files::Vit => vit::write(self, dtype),
            Files::Timm => timm::write(self),
        }
    }

    fn resampled(&self) -> Option<Resampled> {
        match Files::of(self) {
            Files::Timm => timm::resampled(self),
            Files::Dinov2 | Files::Vit => None,
        }
    }

    fn label_fields(&self, names: &[String]) -> Map<String, Value> {
        match Files::of(self) {
            Files::Timm => timm::label_fields(names),
            Files::Dinov2 | Files::Vit => class_heads::label_fields(names),
        }
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
    use crate::library::read;
    use crate::library::stored::assert_filled;
    use crate::registry::Model;

    fn read_vit(config: &Value) -> VitConfig {
        match read(config).expect("a model").model {
            Model::Vit(vit) => vit,
            other => panic!("{other:?}"),
        }
    }

    /// The published file of facebook/dinov2-small, shortened to what is read.
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

    /// The giant has a gated feed-forward of two thirds of four widths: 4096 for 1536.
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

    /// The published file of google/vit-base-patch16-224, shortened to what is read.
    #[test]
    fn vit_reads_and_is_written_back() {
        let base = read_vit(&json!({
            "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 768, "image_size": 224,
            "patch_size": 16, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072,
            "layer_norm_eps": 1e-12, "hidden_act": "gelu", "qkv_bias": true, "id2label": { "0": "tench", "1": "goldfish" },
        }));
        assert_eq!((base.width, base.grid, base.classes, base.norm_eps), (768, Some(14), Some(2), 1e-12));
        assert_eq!(base.parameters(), 85_798_656 + 2 * 769);
        let written = base.write("float32", &[], &[]).unwrap();
        assert_eq!(written["architectures"][0], "ViTForImageClassification");
        assert_eq!(read_vit(&written), base);
        let timm = VitConfig { library: VitLibrary::Timm, norm_eps: 1e-6, ..base.clone() };
        assert!(timm.write("float32", &[], &[]).unwrap().get("architecture").is_some());
        let scaled = VitConfig { layer_scale: Some(1.0), ..base };
        assert!(scaled.write("float32", &[], &[]).unwrap_err().contains("`model.layer_scale`: none"));
    }

    #[test]
    fn what_is_taken_off_pixels_is_read_beside_the_model() {
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
    fn what_would_change_numbers_is_refused_by_name() {
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
        let pooled = json!({ "architecture": "vit_tiny_patch16_224", "global_pool": "avg" });
        assert!(refused(pooled).contains("`fc_norm`"));
        let args = json!({ "global_pool": "map", "fc_norm": false });
        let pooled = json!({ "architecture": "vit_tiny_patch16_224", "model_args": args });
        assert!(refused(pooled).contains("only token and avg"));
        let vit = read_vit(&dinov2_small());
        let write = |vit: VitConfig| vit.write("float32", &[], &[]).expect_err("a refusal");
        assert!(write(VitConfig { layer_scale: None, ..vit.clone() }).contains("`model.layer_scale`"));
        assert!(write(VitConfig { pooling: Pooling::Mean, registers: 1, ..vit }).contains("`model.pooling`"));
    }

    /// Every parameter of the graph has one place, of its size, and the places of a tensor of theirs fill it.
    #[test]
    fn every_weight_has_its_place() {
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
        for vit in [plain, vit, dinov2, registers, transformers, gated] {
            let model = Model::Vit(vit);
            let graph = model.build(model.least());
            let table = model.published().unwrap().stored(&|_| vec![]).unwrap();
            assert_filled(&graph, &table);
        }
    }
}
