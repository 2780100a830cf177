//! Compares class heads with Hugging Face's logits, loss and gradients.

use std::collections::BTreeMap;

use flatout_ir::passes::differentiate::{LOSS_SUM, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::{Options, Program, Recompute, Role, compile};
use flatout_models::config::{DecoderConfig, Head, Pooling, Positions};
use flatout_models::decoder::build;
use flatout_models::form::Form;
use flatout_models::library::huggingface;
use flatout_models::library::stored::Stored;
use flatout_runtime::{Session, cpu};
use flatout_train::weights::initial;
use flatout_train::weights::pretrained;

use crate::distance::relative;
use crate::fixture::Fixture;
use crate::unfused;

struct Golden {
    model: DecoderConfig,
    /// The reference's weights, under a name.
    weights: Fixture,
    below: &'static str,
    /// Texts, logits, loss and gradients.
    fixture: Fixture,
}

impl Golden {
    fn open() -> Golden {
        let weights = Fixture::open("gemma3-classes");
        let model = huggingface::read(&weights.json).expect("a Gemma-3 with a head of classes").model;
        Golden { model, weights, below: "weight.", fixture: Fixture::tensors("gemma3-classes") }
    }

    /// A checkpoint as the library writes it.
    fn checkpoint(folder: &str) -> Golden {
        let weights = Fixture::checkpoint(folder);
        let model = huggingface::read(&weights.json).expect("a model").model;
        Golden { model, weights, below: "", fixture: Fixture::tensors(&format!("{folder}/expected")) }
    }

    fn places(&self) -> Vec<Stored> {
        let shapes = pretrained::parameters(&self.model.clone().into());
        huggingface::stored(&self.model, |path| shapes[path].0.dims.clone()).expect("names")
    }

    /// A session with the file's weights and texts. There is padding between the texts, and capacity for two more.
    fn session(&mut self, pooling: Pooling, options: &Options) -> Session {
        const GAP: usize = 3;
        let (ids, lengths) = (self.fixture.i32s("input_ids"), self.fixture.i32s("lengths"));
        let context = if self.model.positions == Positions::Learned { self.model.context } else { 32 };
        let model = DecoderConfig { pooling, context, ..self.model.clone() };
        let texts = lengths.len() + 2;
        let tokens = ids.len() + GAP * lengths.len();
        let form = Form::Classes { tokens, texts, longest: 24, dropout: false };
        let program = |role: Role| Program { role, graph: build(&model, form) };
        let plans = compile(&[program(Role::GRAD), program(Role::Eval)], &cpu::target(2), options);
        let mut session = Session::new(plans.expect("plans"), 2).expect("a session");
        for at in self.places() {
            // For a body without a head, the head is stored with the results.
            let theirs = match self.fixture.file.entries().contains_key(&at.theirs) {
                true => self.fixture.f32s(&at.theirs),
                false => {
                    let name = self.weights.name_of(&format!("{}{}", self.below, at.theirs));
                    self.weights.f32s(&name)
                }
            };
            session.write_f32(&at.ours, &at.take(&theirs)).expect("a weight");
        }
        initial::write_tables(&mut session).expect("tables");
        let mut inputs: BTreeMap<&str, Vec<i32>> = BTreeMap::from([
            ("tokens", vec![0; tokens]),
            ("positions", vec![0; tokens]),
            ("segment_start", vec![0; texts]),
            ("segment_len", vec![0; texts]),
            ("labels", vec![-1; texts]),
        ]);
        let types = (model.token_types > 1).then(|| self.fixture.i32s("types"));
        inputs.extend(types.iter().map(|_| ("types", vec![0; tokens])));
        let (mut from, mut to) = (0, 0);
        for (number, len) in lengths.iter().enumerate() {
            let count = *len as usize;
            inputs.get_mut("tokens").unwrap()[to..to + count].copy_from_slice(&ids[from..from + count]);
            inputs.get_mut("positions").unwrap()[to..to + count]
                .copy_from_slice(&(0..*len).collect::<Vec<_>>());
            if let Some(types) = &types {
                inputs.get_mut("types").unwrap()[to..to + count].copy_from_slice(&types[from..from + count]);
            }
            inputs.get_mut("segment_start").unwrap()[number] = to as i32;
            inputs.get_mut("segment_len").unwrap()[number] = *len;
            (from, to) = (from + count, to + count + GAP);
        }
        inputs.get_mut("labels").unwrap()[..lengths.len()].copy_from_slice(&self.fixture.i32s("labels"));
        let mut weights = self.fixture.f32s("label_weights");
        weights.resize(texts, 0.0);
        for role in [Role::GRAD, Role::Eval] {
            for (name, values) in &inputs {
                session.write_i32(&input_path(role, name), values).expect("an input");
            }
            session.write_f32(&input_path(role, "label_weights"), &weights).expect("an input");
        }
        session
    }
}

#[test]
fn every_pooling_has_the_references_logits() {
    let mut golden = Golden::open();
    for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::Max] {
        let mut session = golden.session(pooling, &Options::default());
        session.run(Role::Eval).expect("logits");
        let got = session.result(Role::Eval, "class_logits").expect("logits");
        let wanted = golden.fixture.f32s(&format!("logits.{pooling}"));
        let off = relative(&got[..wanted.len()], &wanted);
        assert!(off < 1e-5, "{pooling} is off by {off:.1e}");
    }
}

#[test]
fn the_weighted_loss_and_every_gradient_are_the_references() {
    let golden = Golden::open();
    assert_eq!(golden.model.pooling, Pooling::Mean);
    golden.trains_as_the_reference(&Options::default());
}

macro_rules! encoders {
    ($($test:ident = $folder:literal;)*) => {
        $(#[test]
        fn $test() {
            let full = Options { recompute: Recompute::Full, ..Options::default() };
            for options in [Options::default(), full, unfused::options()] {
                Golden::checkpoint(&format!("families/{}", $folder)).equals_the_reference(&options);
            }
        })*
    };
}

// Logits, loss and every gradient of encoders, whose heads have a layer of their own and biases.
encoders! {
    modernbert = "modernbert";
    bert = "bert";
    roberta = "roberta";
    distilbert = "distilbert";
}

/// Logits, loss and every gradient of a decoder body with a class head added.
#[test]
fn a_body_without_a_head() {
    let mut golden = Golden::checkpoint("families/mistral-body");
    golden.model =
        DecoderConfig { head: Head::Classes, classes: Some(3), pooling: Pooling::Last, ..golden.model };
    golden.equals_the_reference(&Options::default());
}

impl Golden {
    fn equals_the_reference(mut self, options: &Options) {
        let mut session = self.session(self.model.pooling, options);
        session.run(Role::Eval).expect("logits");
        let got = session.result(Role::Eval, "class_logits").expect("logits");
        let wanted = self.fixture.f32s("logits");
        let off = relative(&got[..wanted.len()], &wanted);
        assert!(off < 1e-5, "logits are off by {off:.1e}");
        self.trains_as_the_reference(options);
    }

    fn trains_as_the_reference(mut self, options: &Options) {
        let mut session = self.session(self.model.pooling, options);
        session.run(Role::GRAD).expect("gradients");
        let off = relative(&session.read_f32(LOSS_SUM).expect("a sum"), &self.fixture.f32s("loss_sum"));
        assert!(off < 1e-5, "the loss is off by {off:.1e}");
        let mut gradients: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for at in self.places() {
            let theirs =
                gradients.entry(at.theirs.clone()).or_insert_with(|| vec![0.0; at.dims.iter().product()]);
            at.put(&session.read_f32(&gradient_path(&at.ours)).expect("a gradient"), theirs);
        }
        let in_file = self.fixture.file.entries().keys().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(gradients.len(), in_file, "every gradient of the file is compared");
        for (theirs, got) in &gradients {
            let (mut got, mut wanted) = (got.clone(), self.fixture.f32s(&format!("grad.{theirs}")));
            // A term that is added to every key changes no probability without rotary positions: its gradient is 0 except for
            // rounding, so it is measured relative to that of the queries.
            for (key, query) in [("key.bias", "query.bias"), ("k_lin.bias", "q_lin.bias")] {
                if let Some(layer) = theirs.strip_suffix(key) {
                    wanted.extend(self.fixture.f32s(&format!("grad.{layer}{query}")));
                    got.extend(&gradients[&format!("{layer}{query}")]);
                }
            }
            let off = relative(&got, &wanted);
            assert!(off < 1e-5, "{theirs} is off by {off:.1e}");
        }
    }
}
