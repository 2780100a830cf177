//! Compares BDH with a model written from its equations in PyTorch: logits, every gradient and a hundred steps of AdamW from the
//! same weights, in f32 on the CPU. `make_bdh.py` beside the fixtures made them, in f64.

use flatout_ir::ops::linear_attention::Accumulate;
use flatout_ir::passes::differentiate::{LOSS_SUM, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::passes::update::LR;
use flatout_ir::target::paper;
use flatout_ir::{Class, Graph, Launch, Op, OpKind, Options, Precision, Program, Recompute, Role, compile};
use flatout_models::bdh::build;
use flatout_models::config::{BdhConfig, Head};
use flatout_models::form::{Form, ImageForm, LossForm};
use flatout_models::registry::Family;
use flatout_runtime::{Session, cpu};
use flatout_train::weights::initial;

use crate::distance::relative;
use crate::fixture::Fixture;

/// The largest relative L2 distance of logits and gradients.
const BOUND: f64 = 1e-5;
/// Bound for each of the hundred losses; PyTorch in f32 is off by up to 4.5e-5.
const LOSS_BOUND: f64 = 2e-4;
const LR_OF_ALL: f32 = 2e-4;
const STEPS: usize = 100;
const BATCHES: usize = 4;
const ROWS: usize = 4;

#[test]
fn images() {
    equals_the_equations("bdh-images");
}

#[test]
fn images_with_the_plain_residual() {
    equals_the_equations("bdh-images-plain");
}

#[test]
fn texts() {
    equals_the_equations("bdh-texts");
}

#[test]
fn the_model_of_cifar_has_its_parameters() {
    let c = BdhConfig { classes: Some(10), ..BdhConfig::default() };
    let graph = build(&c, c.least());
    let parameters = |graph: &Graph| -> usize {
        graph.slots.iter().filter(|s| s.class == Class::Weight).map(|s| s.ty.elements()).sum()
    };
    assert_eq!((parameters(&graph), c.parameters()), (3_562_954, 3_562_954));
    assert!((c.encoder_bound() - 0.00544).abs() < 5e-6);
    let texts = BdhConfig { head: Head::Tokens, ..BdhConfig::default() };
    let graph = build(&texts, texts.least());
    assert_eq!(parameters(&graph) as u64, texts.parameters());
}

/// Rotations, the sum of the latents' gradients and the slope of their ReLU are not launches of their own.
#[test]
fn operations_around_scores_are_fused() {
    let c = BdhConfig { classes: Some(10), ..BdhConfig::default() };
    let graph = build(&c, Form::Images(ImageForm::plain(2)));
    let launches = |fuse_elementwise: bool| {
        let options = Options {
            precision: Precision::BF16,
            recompute: Recompute::Cheap,
            rope_positions: Some(65),
            fuse_elementwise,
            ..Options::default()
        };
        let programs = [Program { role: Role::GRAD, graph: graph.clone() }];
        let plans = compile(&programs, &paper(), &options).expect("plans");
        plans.plan(Role::GRAD).expect("a plan").launches.clone()
    };
    let latents = [2 * 65, c.heads * c.latent];
    let over_latents = |l: &&Launch, fs: &[&str]| {
        let text = format!("{:?}", l.op);
        matches!(l.op, Op::Map { .. } | Op::Region { .. })
            && l.outs.iter().flatten().any(|out| out.dims == latents)
            && fs.iter().any(|f| text.contains(f))
    };
    let count = |launches: &[Launch], kind: OpKind| launches.iter().filter(|l| l.op.kind() == kind).count();
    let (joined, apart) = (launches(true), launches(false));
    assert_eq!((count(&joined, OpKind::Rope), count(&apart, OpKind::Rope)), (0, 3 * c.layers));
    let accumulating =
        |launches: &[Launch]| launches.iter().filter(|l| Accumulate::of(&l.op) == Accumulate::Relu).count();
    assert_eq!((accumulating(&joined), accumulating(&apart)), (c.layers, 0));
    assert_eq!(joined.iter().filter(|l| over_latents(l, &["Add", "Step"])).count(), 0);
    assert_eq!(apart.iter().filter(|l| over_latents(l, &["Add"])).count(), c.layers);
    // The sum is written in place over one of its addends.
    let in_place = |l: &&Launch| {
        Accumulate::of(&l.op) == Accumulate::Relu
            && l.outs[0].as_ref().map(|o| o.offset) == l.ins.last().map(|i| i.offset)
    };
    assert_eq!(joined.iter().filter(in_place).count(), c.layers);
}

fn equals_the_equations(name: &str) {
    for recompute in [Recompute::None, Recompute::Cheap, Recompute::Full] {
        for table in [None, Some(64)] {
            let options = Options { recompute, rope_positions: table, ..Options::default() };
            let mut golden = Golden::open(name);
            let mut session = golden.session(&options);
            golden.compare_the_first(&mut session);
            golden.compare_the_losses(&mut session);
        }
    }
}

struct Golden {
    name: String,
    model: BdhConfig,
    fixture: Fixture,
}

impl Golden {
    fn open(name: &str) -> Golden {
        let fixture = Fixture::open(name);
        let model: BdhConfig = serde_json::from_value(fixture.json.clone()).expect("keys of a BDH");
        model.validate().expect("a model that exists");
        Golden { name: name.into(), model, fixture }
    }

    fn of_images(&self) -> bool {
        self.model.head == Head::Classes
    }

    fn names(&self, prefix: &str) -> Vec<String> {
        self.fixture
            .file
            .entries()
            .keys()
            .filter_map(|name| name.strip_prefix(prefix))
            .map(String::from)
            .collect()
    }

    fn session(&mut self, options: &Options) -> Session {
        let (rows, len) = (ROWS, self.model.context);
        let programs = match self.of_images() {
            true => [(Role::GRAD, true), (Role::Eval, false)]
                .map(|(role, dropout)| (role, Form::Images(ImageForm { dropout, ..ImageForm::plain(rows) }))),
            false => [
                (Role::GRAD, Form::Loss(LossForm { dropout: true, ..LossForm::rows(rows, len) })),
                (Role::Logits, Form::Logits { rows, len, seen: None }),
            ],
        };
        let model = BdhConfig { dropout: 0.0, ..self.model.clone() };
        let programs = programs.map(|(role, form)| Program { role, graph: build(&model, form) });
        let plans = compile(&programs, &cpu::target(2), options).expect("plans");
        let mut session = Session::new(plans, 2).expect("a session");
        for name in self.names("weight.") {
            session.write_f32(&name, &self.fixture.f32s(&format!("weight.{name}"))).expect("a weight");
        }
        initial::write_tables(&mut session).expect("tables");
        session
    }

    /// Writes the inputs of a plan that a batch has.
    fn feed(&mut self, session: &mut Session, role: Role, batch: usize) {
        let part = |n: usize| batch * n / BATCHES..(batch + 1) * n / BATCHES;
        let at = |name: &str| input_path(role, name);
        if self.of_images() {
            let (pixels, labels) = (self.fixture.bytes("pixels"), self.fixture.i32s("labels"));
            session.write_u8(&at("pixels"), &pixels[part(pixels.len())]).expect("pixels");
            session.write_i32(&at("labels"), &labels[part(labels.len())]).expect("labels");
            session.write_f32(&at("label_weights"), &[1.0; ROWS]).expect("weights");
            return;
        }
        let (tokens, targets) = (self.fixture.i32s("tokens"), self.fixture.i32s("targets"));
        let count = tokens.len() / BATCHES;
        let positions: Vec<i32> = (0..count).map(|i| (i % self.model.context) as i32).collect();
        session.write_i32(&at("tokens"), &tokens[part(tokens.len())]).expect("tokens");
        session.write_i32(&at("positions"), &positions).expect("positions");
        if role == Role::GRAD {
            session.write_i32(&at("targets"), &targets[part(targets.len())]).expect("targets");
            session.write_f32(&at("weights"), &vec![1.0; count]).expect("weights");
        }
    }

    /// Losses, gradients and their sums are over the counted targets; those of the file are means.
    fn counted(&mut self) -> f64 {
        let all = if self.of_images() { "labels" } else { "targets" };
        (self.fixture.i32s(all).len() / BATCHES) as f64
    }

    fn assert_close(&self, what: &str, off: f64, bound: f64) {
        println!("{}: {what} is off by {off:.1e}", self.name);
        assert!(off < bound, "{}: {what} is off by {off:.1e}", self.name);
    }

    fn compare_the_first(&mut self, session: &mut Session) {
        let (role, result) =
            if self.of_images() { (Role::Eval, "class_logits") } else { (Role::Logits, "logits") };
        self.feed(session, role, 0);
        session.run(role).expect("logits");
        let logits = session.result(role, result).expect("logits");
        let off = relative(&logits, &self.fixture.f32s("logits"));
        self.assert_close("logits", off, BOUND);
    }

    fn compare_the_losses(&mut self, session: &mut Session) {
        let (losses, counted) = (self.fixture.f32s("loss"), self.counted());
        assert_eq!(losses.len(), STEPS);
        for (step, &wanted) in losses.iter().enumerate() {
            self.feed(session, Role::GRAD, step % BATCHES);
            session.run(Role::GRAD).expect("gradients");
            let loss = session.read_f32(LOSS_SUM).expect("a sum")[0] as f64 / counted;
            self.assert_close(&format!("the loss of step {step}"), relative(&[loss], &[wanted]), LOSS_BOUND);
            if step == 0 {
                for name in self.names("grad.") {
                    let sums = session.read_f32(&gradient_path(&name)).expect("a gradient");
                    let mean: Vec<f64> = sums.iter().map(|x| *x as f64 / counted).collect();
                    let wanted = self.fixture.f32s(&format!("grad.{name}"));
                    self.assert_close(&name, relative(&mean, &wanted), BOUND);
                }
            }
            session.write_f32(&input_path(Role::Apply, LR), &[LR_OF_ALL]).expect("a rate");
            session.run(Role::Apply).expect("an update");
        }
    }
}
