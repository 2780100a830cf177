//! Models as parts of a larger graph: weights that are declared once and applied several times, and two models side by side,
//! each compared with the oracle.

use std::collections::HashMap;

use flatout_ir::interpreter::Interpreter;
use flatout_ir::ops::cap::Cap;
use flatout_ir::passes::differentiate::{differentiate, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::target::paper;
use flatout_ir::{
    Builder, Class, DType, Graph, Init, Op, Options, Program, Role, Tensor, compile, oracle, random,
};
use flatout_models::config::{DecoderConfig, VitConfig};
use flatout_models::decoder::{self, Pass};
use flatout_models::form::{Form, LossForm};
use flatout_models::images::CHANNELS;
use flatout_models::layers::Sight;
use flatout_models::{objectives, vit};

use crate::small;

/// Values of every slot, drawn by its path, so that graphs with the same paths have the same values.
fn values(g: &Graph) -> HashMap<String, Vec<f64>> {
    let value = |path: &str, n: usize, init: Init| -> Vec<f64> {
        let stream = path.bytes().fold(7_u64, |h, b| h.wrapping_mul(31).wrapping_add(b as u64));
        let draw = |k: usize| random::normal(3, stream, k as u64) as f64;
        let of = |k: usize| match (path, init) {
            ("tokens" | "targets", _) => ((k * 7 + 3) % 13) as f64,
            ("positions", _) => (k % 5) as f64,
            ("weights", _) => 1.0,
            (_, Init::Ones) => 1.0 + 0.2 * draw(k),
            _ => 0.3 * draw(k),
        };
        (0..n).map(|k| of(k) as f32 as f64).collect()
    };
    let slots = g.slots.iter().map(|s| (s.path.clone(), value(&s.path, s.ty.elements(), s.init)));
    slots.collect()
}

/// Sums of gradients and loss, by the oracle on the plain graph and by a compiled plan, which must agree.
fn gradients(g: &Graph) -> HashMap<String, Vec<f64>> {
    let want = oracle::run(&differentiate(g).graph, &values(g)).writes;
    let programs = [Program { role: Role::GRAD, graph: g.clone() }];
    let mut run = Interpreter::new(compile(&programs, &paper(), &Options::default()).expect("a plan"));
    for (path, value) in values(g) {
        let class = g.slot(g.find_slot(&path).expect("a slot")).class;
        run.set(&if class == Class::Input { input_path(Role::GRAD, &path) } else { path }, &value);
    }
    run.run(Role::GRAD);
    for (path, value) in &want {
        let off = distance(&run.get(path), value);
        assert!(off < 2e-6, "{path} is off by {off:e}");
    }
    want
}

/// The distance of two vectors, relative to the second's norm.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let off: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (off / b.iter().copied().map(square).sum::<f64>().max(1e-30)).sqrt()
}

fn pass(b: &Builder) -> Pass<'_> {
    let positions = b.input("positions", DType::I32, &[1, 10]);
    Pass {
        positions,
        tokens: None,
        types: None,
        sight: Sight::rows(5),
        draw: None,
        images: None,
        window: None,
        read: None,
    }
}

/// The loss of states x [10, D] under a separate head.
fn next_token<'g>(b: &'g Builder, c: &DecoderConfig, x: Tensor<'g>) {
    let head = b.param("head", &[c.vocab, c.width], Init::Normal { std: 0.3 });
    let form = Form::Loss(LossForm::rows(2, 5));
    objectives::next_token::results(b, form, x, head, Cap::NONE);
}

/// A block applied twice, with the same weights or with copies of them under other names.
fn twice(shares: bool) -> Graph {
    let (b, c) = (Builder::new(), small::decoder());
    let x = b.input("x", DType::F32, &[10, c.width]);
    let pass = pass(&b);
    let first = b.scope("block", || decoder::Block::declare(&b, &c, 0));
    let second = match shares {
        true => first.clone(),
        false => b.scope("copied", || decoder::Block::declare(&b, &c, 0)),
    };
    let x = b.scope("coarse.layers.0", || first.apply(&b, &c, 0, x, &pass));
    let x = b.scope("fine.layers.0", || second.apply(&b, &c, 0, x, &pass));
    next_token(&b, &c, x);
    b.finish()
}

#[test]
fn a_block_is_applied_twice_with_the_same_weights() {
    let g = twice(true);
    let reads = |path: &str| {
        let slot = g.find_slot(path).expect("declared once");
        g.nodes.iter().filter(|node| node.op == Op::Read { slot }).count()
    };
    assert_eq!((reads("block.attn.wq"), reads("block.ffn.down"), reads("head")), (2, 2, 1));
    for scope in ["coarse.layers.0", "fine.layers.0"] {
        assert!(g.nodes.iter().any(|node| node.path == format!("{scope}.attn")), "{scope}");
    }
    let shared = gradients(&g);
    // A shared weight's gradient is the sum of those of two separate weights with the same values.
    let apart = twice(false);
    let mut same = values(&apart);
    for slot in apart.slots.iter().filter(|slot| slot.path.starts_with("copied")) {
        same.insert(slot.path.clone(), same[&slot.path.replace("copied", "block")].clone());
    }
    let apart = oracle::run(&differentiate(&apart).graph, &same).writes;
    for weight in ["attn.wq", "attn.wo", "attn.q_norm", "attn_norm", "ffn.gate", "ffn.down"] {
        let of = |scope: &str| &apart[&gradient_path(&format!("{scope}.{weight}"))];
        let sum: Vec<f64> = of("block").iter().zip(of("copied")).map(|(a, b)| a + b).collect();
        let off = distance(&shared[&gradient_path(&format!("block.{weight}"))], &sum);
        assert!(off < 1e-6, "{weight} is off by {off:e}");
    }
}

/// A tower's states as rows before those of a text, in one graph under separate scopes.
#[test]
fn a_tower_and_a_decoder_share_a_graph() {
    let (b, c) = (Builder::new(), small::decoder());
    let tower =
        VitConfig { width: c.width, layers: 2, heads: 2, patch: 2, image_size: 2, ..VitConfig::default() };
    let patches = b.input("patches", DType::F32, &[2, 2 * 2 * CHANNELS]);
    let tokens = b.input("tokens", DType::I32, &[6]);
    let pass = pass(&b);
    let seeing = b.scope("vision", || vit::weights(&b, &tower));
    let reading = decoder::weights(&b, &DecoderConfig { tied: true, ..c.clone() });
    // Two images of two tokens each, and three tokens of text after each.
    let seen = b.scope("vision", || vit::apply(&b, &tower, &seeing, patches, None)).reshape(&[2, 2, c.width]);
    let table = b.read(reading.embed);
    let text = b.scope("embed", || table.gather(tokens)).reshape(&[2, 3, c.width]);
    let x = b.concat(&[seen, text], 1).reshape(&[10, c.width]);
    let x = decoder::apply(&b, &c, &reading, x, &pass);
    next_token(&b, &c, x);
    let g = b.finish();
    let widths = ["vision.layers.0.attn.wq", "layers.0.attn.wq"].map(|path| g.find_slot(path).is_some());
    assert_eq!(widths, [true, true]);
    let found = gradients(&g);
    for path in ["vision.patch.weight", "vision.layers.1.ffn.up", "layers.1.ffn.up", "embed.weight"] {
        assert!(found[&gradient_path(path)].iter().any(|x| x.abs() > 1e-6), "{path}");
    }
}
