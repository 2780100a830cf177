//! Plans of the decoder that looks at frames, run launch by launch with the oracle, against the oracle on the unmodified graph.

use std::collections::{BTreeSet, HashMap};

use flatout_ir::interpreter::Interpreter;
use flatout_ir::passes::differentiate::{differentiate, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::passes::recompute::layers_of;
use flatout_ir::target::paper;
use flatout_ir::{
    Class, Graph, Init, Op, Options, Precision, Program, Recompute, Role, bicubic, compile, oracle, random,
};
use flatout_models::config::{DecoderConfig, FoveaConfig, Look, Vision};
use flatout_models::decoder::build;
use flatout_models::form::{Documents, Form, ImageExtents, LossForm, SeenFrames};

use crate::plans::choices_of_passes;
use crate::small;

fn model(mode: Look) -> DecoderConfig {
    let tower = FoveaConfig {
        width: 8,
        layers: 2,
        heads: 2,
        ffn: 12,
        patch: 2,
        image_size: 4,
        positions: 3,
        query: 6,
        mode,
        ..FoveaConfig::default()
    };
    let model = DecoderConfig { vision: Some(Vision::Fovea(tower)), ..small::decoder() };
    assert_eq!(model.validate(), Ok(()));
    model
}

/// Two frames and three tokens, then a still image as three frames and two tokens, with spare capacity everywhere.
fn graph(mode: Look) -> Graph {
    let seen = SeenFrames { images: 4, frames: 6, videos: 3, longest: 3, repeats: 3 };
    let documents = Documents::Apart { most: 3 };
    let form = LossForm { documents, seen: Some(ImageExtents::Frames(seen)), ..LossForm::rows(1, 11) };
    build(&model(mode), Form::Loss(form))
}

/// Values of every slot, drawn by its path, so that graphs with the same paths have the same values.
fn values(g: &Graph, mode: Look) -> HashMap<String, Vec<f64>> {
    let mut values = HashMap::new();
    for slot in &g.slots {
        let (path, n) = (slot.path.as_str(), slot.ty.elements());
        let stream = path.bytes().fold(7_u64, |h, b| h.wrapping_mul(31).wrapping_add(b as u64));
        let draw = |k: usize| random::normal(3, stream, k as u64) as f64;
        let seen = match mode {
            Look::Fine => vec![0, 1, -1, -1, -1, 2, 3, 4, -1, -1, -1],
            Look::Coarse => vec![0, 1, -1, -1, -1, 2, 2, 2, -1, -1, -1],
        };
        let whole = |values: &[i32]| values.iter().map(|x| *x as f64).collect();
        let value: Vec<f64> = match (path, slot.init) {
            ("tokens", _) => whole(&[-1, -1, 3, 8, 1, -1, -1, -1, 12, 5, 4]),
            ("positions", _) => whole(&[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]),
            ("targets", _) => whole(&[-1, 3, 8, 1, -1, -1, -1, 12, 5, -1, -1]),
            ("weights", _) => whole(&[0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0]),
            ("segment_start", _) => whole(&[0, 5, 0]),
            ("segment_len", _) => whole(&[5, 5, 0]),
            ("seen", _) => whole(&seen),
            ("frame_images", _) => whole(&[0, 1, 2, 2, 2, -1]),
            ("frame_positions", _) => whole(&[0, 1, 0, 1, 2, 0]),
            ("video_start", _) => whole(&[0, 2, 0]),
            ("video_len", _) => whole(&[2, 3, 0]),
            ("look_start", _) => whole(&[0, 1, 2, 0]),
            ("look_len", _) => whole(&[1, 1, 3, 0]),
            ("previous", _) => whole(&[6, 0, 6, 2, 3, -1]),
            ("pixels", _) => (0..n).map(|k| ((k * 37 + k * k * 11) % 256) as f64).collect(),
            (_, Init::Bicubic { from, to, antialias }) => bicubic::matrix(from, to, antialias),
            (_, Init::Ones) | (_, Init::Constant { .. }) => (0..n).map(|k| 1.0 + 0.2 * draw(k)).collect(),
            _ => (0..n).map(|k| 0.3 * draw(k)).collect(),
        };
        values.insert(slot.path.clone(), value.into_iter().map(|x| x as f32 as f64).collect());
    }
    values
}

fn length(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

/// Every gradient and the loss of a compiled plan, relative to the plain graph's.
fn compare(mode: Look, options: &Options, bound: f64) {
    let g = graph(mode);
    let values = values(&g, mode);
    let want = oracle::run(&differentiate(&g).graph, &values).writes;
    let programs = [Program { role: Role::GRAD, graph: g.clone() }];
    let mut run = Interpreter::new(compile(&programs, &paper(), options).expect("a plan"));
    for (path, value) in &values {
        let class = g.slot(g.find_slot(path).expect("a slot")).class;
        run.set(&if class == Class::Input { input_path(Role::GRAD, path) } else { path.clone() }, value);
    }
    if run.plans.plan(Role::Derive).is_some() {
        run.run(Role::Derive);
    }
    run.run(Role::GRAD);
    for (path, value) in &want {
        let got = run.get(path);
        let off = length(got.iter().zip(value).map(|(a, b)| a - b));
        // A shift shared by all keys changes no probability, so its gradient is rounding error; the text's keys rotate.
        let size = match path.contains("vision") && path.ends_with("wk_bias") {
            true => length(want[&path.replace("wk_bias", "wq_bias")].iter().copied()),
            false => length(value.iter().copied()),
        };
        assert!(off <= bound * size, "{mode}: {path} is off by {off:e} of {size:e} with {options:?}");
    }
    assert!(want.contains_key(&gradient_path("vision.layers.1.attn.wk")) && want.len() > 50);
}

#[test]
fn every_choice_of_passes_gives_the_gradients_of_the_plain_graph() {
    for options in choices_of_passes(3) {
        compare(Look::Fine, &options, 3e-6);
        compare(Look::Coarse, &options, 3e-6);
    }
}

#[test]
fn bf16_stays_within_its_rounding() {
    for recompute in [Recompute::None, Recompute::Cheap, Recompute::Full] {
        let options = Options { precision: Precision::BF16, recompute, ..Options::default() };
        compare(Look::Fine, &options, 0.15);
    }
}

/// The plan that reads a frame of every sequence over a cache stores states, whatever the precision of products.
#[test]
fn states_are_kept_in_every_precision() {
    let seen = Some(ImageExtents::Frames(SeenFrames::next_of(2)));
    let form = Form::Cached { sequences: 2, tokens: 4, capacity: 8, read: 2, seen };
    for (mode, is_kept) in [(Look::Fine, true), (Look::Coarse, false)] {
        for precision in [Precision::F32, Precision::BF16] {
            let programs = [Program { role: Role::Prefill, graph: build(&model(mode), form) }];
            let options = Options { precision, ..Options::default() };
            let plans = compile(&programs, &paper(), &options).expect("a plan");
            let is_there = plans.slots.iter().any(|slot| slot.path == "cache.states");
            assert_eq!(is_there, is_kept, "{mode} in {precision:?}");
        }
    }
}

/// Recomputation treats each use of a block as a separate layer.
#[test]
fn every_use_of_a_block_is_a_layer() {
    let g = graph(Look::Fine);
    // The read of a weight has the weight's own path.
    let computed = g.nodes.iter().filter(|node| !matches!(node.op, Op::Read { .. }));
    let layers: BTreeSet<&str> = layers_of(computed).into_iter().collect();
    let uses = ["vision.patches.", "vision.coarse.", "vision.fine.", "coarse.", ""];
    let wanted: Vec<String> =
        uses.iter().flat_map(|of| (0..2).map(move |i| format!("{of}layers.{i}"))).collect();
    assert_eq!(layers, wanted.iter().map(String::as_str).collect());
}

/// A text draws the same random numbers with and without frames, and a graph without frames has no tower.
#[test]
fn a_text_has_the_same_keys_beside_frames() {
    let (beside, alone) = (graph(Look::Fine), {
        let documents = Documents::Apart { most: 3 };
        build(&model(Look::Fine), Form::Loss(LossForm { documents, ..LossForm::rows(1, 11) }))
    });
    assert!(alone.slots.iter().all(|slot| !slot.path.starts_with("vision")));
    let keys = |g: &Graph, path: &str| -> Vec<u64> {
        let computed = g.nodes.iter().filter(|node| !matches!(node.op, Op::Read { .. }));
        computed.filter(|node| node.path == path).map(|node| node.key).collect()
    };
    for path in ["layers.0.attn", "layers.1.ffn", "norm", "head"] {
        assert!(!keys(&alone, path).is_empty());
        assert_eq!(keys(&alone, path), keys(&beside, path), "{path}");
    }
}
