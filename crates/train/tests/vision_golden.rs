//! The vision transformer against `transformers`' DINOv2 and timm's ViT: logits, loss and every gradient of tiny
//! random checkpoints, in f32 on the CPU. `make_vision.py` beside the fixtures made them, in f64.

mod distance;

use std::collections::BTreeMap;
use std::path::Path;

use distance::relative;
use flatout_ir::passes::differentiate::{LOSS_SUM, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::{Options, Program, Recompute, Role, compile};
use flatout_models::config::Model;
use flatout_models::images::ImageForm;
use flatout_models::published;
use flatout_models::stored::Stored;
use flatout_runtime::{Session, cpu};
use flatout_train::checkpoint::TensorFile;
use flatout_train::initial;
use serde_json::Value;

/// Largest relative L2 distance of any tensor.
const BOUND: f64 = 1e-5;
const IMAGES: usize = 3;

/// Positions are resampled from 5 x 5 to 4 x 4.
#[test]
fn dinov2() {
    equals_the_reference("dinov2");
}

#[test]
fn dinov2_with_registers() {
    equals_the_reference("dinov2-registers");
}

#[test]
fn timm() {
    equals_the_reference("timm-vit");
}

/// Positions are resampled from 3 x 3 to 5 x 5.
#[test]
fn timm_with_layer_scale_on_larger_images() {
    equals_the_reference("timm-vit-scaled");
}

fn equals_the_reference(name: &str) {
    let mut golden = Golden::open(name);
    let plain = Options {
        flash_attention: false,
        fuse_qkv: false,
        fuse_gate_up: false,
        fuse_norm: false,
        fuse_elementwise: false,
        fuse_loss: false,
        fuse_optimizer: false,
        recompute: Recompute::None,
        memory_plan: false,
        ..Options::default()
    };
    let full = Options { recompute: Recompute::Full, ..Options::default() };
    for (how, options) in [("fused", Options::default()), ("recompute", full), ("plain", plain)] {
        for (tensor, off) in golden.distances(&options) {
            println!("{name}, {how}: {tensor} is off by {off:.1e}");
            assert!(off < BOUND, "{name}, {how}: {tensor} is off by {off:.1e}");
        }
    }
}

struct Golden {
    model: Model,
    file: TensorFile,
}

impl Golden {
    fn open(name: &str) -> Golden {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden");
        let json = std::fs::read_to_string(folder.join(format!("{name}.json"))).expect("a configuration");
        let json: Value = serde_json::from_str(&json).expect("JSON");
        let mut model = published::read(&json).expect("a vision transformer").model;
        let Model::Vit(vit) = &mut model else { panic!("{name} reads no images") };
        vit.image_size = json["image_side"].as_u64().expect("the images' side") as usize;
        model.validate().expect("a model that exists");
        let file = TensorFile::open(&folder.join(format!("{name}.safetensors"))).expect("tensors");
        Golden { model, file }
    }

    fn bytes(&mut self, name: &str) -> Vec<u8> {
        let mut bytes = vec![0; self.file.entries()[name].bytes()];
        self.file.read_into(name, &mut bytes).expect("a tensor");
        bytes
    }

    fn f32s(&mut self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }

    /// How far every tensor of the file is from what a session compiled with these options computes.
    fn distances(&mut self, options: &Options) -> BTreeMap<String, f64> {
        let places: Vec<Stored> = published::stored(&self.model, |_| vec![]).expect("names");
        let training = ImageForm { dropout: true, ..ImageForm::plain(IMAGES) };
        let programs = [
            Program { role: Role::Grad, graph: self.model.of_images(training) },
            Program { role: Role::Eval, graph: self.model.of_images(ImageForm::plain(IMAGES)) },
        ];
        let plans = compile(&programs, &cpu::target(2), options).expect("plans");
        let mut session = Session::new(plans, 2).expect("a session");
        for at in &places {
            let theirs = self.f32s(&format!("weight.{}", at.theirs));
            session.write_f32(&at.ours, &at.take(&theirs)).expect("a weight");
        }
        initial::write_tables(&mut session).expect("tables");
        let labels: Vec<i32> =
            self.bytes("labels").as_chunks::<4>().0.iter().map(|w| i32::from_le_bytes(*w)).collect();
        let (pixels, weights) = (self.bytes("pixels"), self.f32s("label_weights"));
        for role in [Role::Grad, Role::Eval] {
            session.write_u8(&input_path(role, "pixels"), &pixels).expect("pixels");
            session.write_i32(&input_path(role, "labels"), &labels).expect("labels");
            session.write_f32(&input_path(role, "label_weights"), &weights).expect("weights");
        }
        session.run(Role::Eval).expect("logits");
        let logits = session.result(Role::Eval, "class_logits").expect("logits");
        let loss = session.result(Role::Eval, "loss").expect("a loss");
        session.run(Role::Grad).expect("gradients");
        let sum = session.read_f32(LOSS_SUM).expect("a sum");
        let mut distances = BTreeMap::from([
            ("logits".to_string(), relative(&logits, &self.f32s("logits"))),
            ("loss".to_string(), relative(&loss, &self.f32s("loss_sum"))),
            ("training loss".to_string(), relative(&sum, &self.f32s("loss_sum"))),
        ]);
        let mut gradients: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for at in &places {
            let theirs =
                gradients.entry(at.theirs.clone()).or_insert_with(|| vec![0.0; at.dims.iter().product()]);
            at.put(&session.read_f32(&gradient_path(&at.ours)).expect("a gradient"), theirs);
        }
        let in_file = self.file.entries().keys().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(gradients.len(), in_file, "every gradient of the file is compared");
        for (name, gradient) in &gradients {
            let mut theirs = self.f32s(&format!("grad.{name}"));
            let mut ours = gradient.clone();
            // What is added to every key moves no probability: its gradient is 0 but for rounding, so it is measured
            // beside the queries'.
            if let Some(layer) = name.strip_suffix("key.bias") {
                theirs.extend(self.f32s(&format!("grad.{layer}query.bias")));
                ours.extend(&gradients[&format!("{layer}query.bias")]);
            }
            distances.insert(name.clone(), relative(&ours, &theirs));
        }
        distances
    }
}
