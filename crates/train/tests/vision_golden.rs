//! Compares the vision transformer with `transformers`' DINOv2 and timm's ViT: logits, loss and every gradient of tiny random
//! checkpoints, in f32 on the CPU. `make_vision.py` beside the fixtures made them, in f64.

use std::collections::BTreeMap;

use flatout_ir::passes::differentiate::{LOSS_SUM, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::{Options, Program, Recompute, Role, compile};
use flatout_models::config::{Model, VitConfig};
use flatout_models::form::{Form, ImageForm};
use flatout_models::library;
use flatout_models::library::stored::Stored;
use flatout_runtime::{Session, cpu};
use flatout_train::weights::initial;

use crate::distance::relative;
use crate::fixture::Fixture;
use crate::unfused;

/// The largest relative L2 distance of any tensor.
const BOUND: f64 = 1e-5;
const IMAGES: usize = 3;

/// Positions are resampled from 5 x 5 to 4 x 4.
#[test]
fn dinov2() {
    equals_the_reference("dinov2");
}

/// Positions are resampled from 5 x 5 to 4 x 4, with antialiasing.
#[test]
fn dinov2_with_registers() {
    equals_the_reference("dinov2-registers");
}

/// Gate and up are one tensor of the file.
#[test]
fn dinov2_with_a_gated_feed_forward() {
    equals_the_reference("dinov2-swiglu");
}

/// Positions are resampled from 5 x 5 to 4 x 4.
#[test]
fn vit_of_transformers() {
    equals_the_reference("vit");
}

/// A distillation token with a position; positions are resampled from 5 x 5 to 4 x 4.
#[test]
fn deit() {
    equals_the_reference("deit");
}

/// A norm before the blocks and none after them, quick GELU; positions are resampled from 5 x 5 to 4 x 4.
#[test]
fn clip() {
    equals_the_reference("clip");
}

/// No class token; positions are resampled from 5 x 5 to 4 x 4.
#[test]
fn siglip() {
    equals_the_reference("siglip");
}

/// Only patches have positions, which are resampled from 5 x 5 to 3 x 3.
#[test]
fn timm_with_registers() {
    equals_the_reference("timm-registers");
}

#[test]
fn timm_of_clip() {
    equals_the_reference("timm-clip");
}

/// No class token, registers with positions, and a norm of the mean; positions are resampled from 3 x 3 to 5 x 5.
#[test]
fn timm_whose_norm_is_of_the_mean() {
    equals_the_reference("timm-pooled");
}

#[test]
fn timm() {
    equals_the_reference("timm-vit");
}

#[test]
fn timm_whose_head_reads_the_mean_of_the_patches() {
    equals_the_reference("timm-vit-mean");
}

/// Positions are resampled from 3 x 3 to 5 x 5.
#[test]
fn timm_with_layer_scale_on_larger_images() {
    equals_the_reference("timm-vit-scaled");
}

/// Positions are resampled from 5 x 5 to 3 x 3.
#[test]
fn timm_on_smaller_images() {
    equals_the_reference("timm-vit-small");
}

/// Positions are resampled from 3 x 3 to 2 x 5.
#[test]
fn timm_on_images_that_are_not_square() {
    equals_the_reference("timm-vit-wide");
}

fn equals_the_reference(name: &str) {
    let mut golden = Golden::open(name);
    let plain = unfused::options();
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
    fixture: Fixture,
}

impl Golden {
    fn open(name: &str) -> Golden {
        let fixture = Fixture::open(name);
        let json = &fixture.json;
        let mut model = library::read(json).expect("a vision transformer").model;
        let Model::Vit(vit) = &mut model else { panic!("{name} reads no images") };
        if name == "vit" {
            // Its pixels were made with ImageNet's, which a processor's file says beside a published model.
            let VitConfig { mean, std, .. } = VitConfig::default();
            (vit.mean, vit.std) = (mean, std);
        }
        vit.image_size = json["image_side"].as_u64().expect("the images' side") as usize;
        vit.image_height = json["image_height"].as_u64().map(|height| height as usize);
        model.validate().expect("a model that exists");
        Golden { model, fixture }
    }

    /// The distance of every tensor of the file from the one that a session compiled with these options computes.
    fn distances(&mut self, options: &Options) -> BTreeMap<String, f64> {
        let places: Vec<Stored> =
            self.model.published().and_then(|published| published.stored(&|_| vec![])).expect("names");
        let training = ImageForm { dropout: true, ..ImageForm::plain(IMAGES) };
        let programs = [
            Program { role: Role::GRAD, graph: self.model.build(Form::Images(training)) },
            Program { role: Role::Eval, graph: self.model.build(Form::Images(ImageForm::plain(IMAGES))) },
        ];
        let plans = compile(&programs, &cpu::target(2), options).expect("plans");
        let mut session = Session::new(plans, 2).expect("a session");
        for at in &places {
            let theirs = self.fixture.f32s(&format!("weight.{}", at.theirs));
            session.write_f32(&at.ours, &at.take(&theirs)).expect("a weight");
        }
        initial::write_tables(&mut session).expect("tables");
        let labels = self.fixture.i32s("labels");
        let (pixels, weights) = (self.fixture.bytes("pixels"), self.fixture.f32s("label_weights"));
        for role in [Role::GRAD, Role::Eval] {
            session.write_u8(&input_path(role, "pixels"), &pixels).expect("pixels");
            session.write_i32(&input_path(role, "labels"), &labels).expect("labels");
            session.write_f32(&input_path(role, "label_weights"), &weights).expect("weights");
        }
        session.run(Role::Eval).expect("logits");
        let logits = session.result(Role::Eval, "class_logits").expect("logits");
        let loss = session.result(Role::Eval, "loss").expect("a loss");
        session.run(Role::GRAD).expect("gradients");
        let sum = session.read_f32(LOSS_SUM).expect("a sum");
        let mut distances = BTreeMap::from([
            ("logits".to_string(), relative(&logits, &self.fixture.f32s("logits"))),
            ("loss".to_string(), relative(&loss, &self.fixture.f32s("loss_sum"))),
            ("training loss".to_string(), relative(&sum, &self.fixture.f32s("loss_sum"))),
        ]);
        let mut gradients: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for at in &places {
            let theirs =
                gradients.entry(at.theirs.clone()).or_insert_with(|| vec![0.0; at.dims.iter().product()]);
            at.put(&session.read_f32(&gradient_path(&at.ours)).expect("a gradient"), theirs);
        }
        let in_file = self.fixture.file.entries().keys().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(gradients.len(), in_file, "every gradient of the file is compared");
        for (name, gradient) in &gradients {
            let mut theirs = self.fixture.f32s(&format!("grad.{name}"));
            let mut ours = gradient.clone();
            // A bias added to every key changes no probability: its gradient is 0 except for rounding, so it is measured relative
            // to that of the queries.
            for (key, query) in [("key.bias", "query.bias"), ("k_proj.bias", "q_proj.bias")] {
                if let Some(layer) = name.strip_suffix(key) {
                    theirs.extend(self.fixture.f32s(&format!("grad.{layer}{query}")));
                    ours.extend(&gradients[&format!("{layer}{query}")]);
                }
            }
            distances.insert(name.clone(), relative(&ours, &theirs));
        }
        distances
    }
}
