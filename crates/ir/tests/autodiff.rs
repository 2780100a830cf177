//! The nodes that autodiff appends, and those that it does not.

use flatout_ir::autodiff::gradients;
use flatout_ir::check::draw;
use flatout_ir::graph::{Graph, Init};
use flatout_ir::ops::OpKind;
use flatout_ir::oracle::{self, Values, in_f64};
use flatout_ir::replay::without_dead;
use flatout_ir::types::DType;
use flatout_ir::{Builder, Tensor};

/// The nodes that the results depend on, as text: autodiff only appends, and `without_dead` removes unused nodes.
fn live(graph: &Graph) -> String {
    without_dead(graph).to_string()
}

fn ones<'g>(y: Tensor<'g>) -> (Tensor<'g>, Tensor<'g>) {
    (y, y.b.fill(1.0, y.dtype(), &y.dims()))
}

fn count(graph: &Graph, kind: OpKind) -> usize {
    graph.nodes.iter().filter(|n| n.op.kind() == kind).count()
}

#[test]
fn slices_of_one_product_give_one_concat() {
    let b = Builder::new();
    let (x, w) = (b.input("x", DType::F32, &[3, 5]), b.param("wqkv", &[9, 5], Init::Zeros));
    let qkv = x.linear(w);
    let (q, k, v) = (qkv.slice(1, 0, 5), qkv.slice(1, 5, 2), qkv.slice(1, 7, 2));
    let seeds = [ones(v.exp()), ones(q.square()), ones(k.exp())];
    let d = gradients(&b, &seeds, &[w])[0];
    b.result("d", d);
    let text = live(&b.finish());
    assert_eq!(text.matches(" = concat{axis=1} ").count(), 1, "{text}");
    assert_eq!(text.matches(" = pad{").count(), 0, "{text}");
    assert_eq!(text.matches(" = map{f=add}").count(), 0, "{text}");
    assert_eq!(text.matches(" = product{ta=true, tb=false, ").count(), 1, "{text}");
}

#[test]
fn a_slice_with_a_gap_is_padded() {
    let b = Builder::new();
    let x = b.param("x", &[3, 5], Init::Zeros);
    let d = gradients(&b, &[ones(x.slice(1, 1, 2).exp())], &[x])[0];
    b.result("d", d);
    let text = live(&b.finish());
    assert_eq!(text.matches(" = pad{axis=1, before=1, after=2} ").count(), 1, "{text}");
}

/// Two layers, the first frozen: nothing below the trained weight is differentiated.
#[test]
fn frozen_weights_append_nothing() {
    let appended = |train_first: bool| {
        let b = Builder::new();
        let x = b.input("x", DType::F32, &[3, 5]);
        let (w0, w1) = (b.param("w0", &[7, 5], Init::Zeros), b.param("w1", &[3, 7], Init::Zeros));
        let seed = ones(x.linear(w0).exp().linear(w1));
        let before = b.with_graph(|g| g.nodes.len());
        let trained = if train_first { vec![w0, w1] } else { vec![w1] };
        gradients(&b, &[seed], &trained);
        let mut graph = b.finish();
        graph.nodes.drain(..before);
        graph
    };
    let frozen = appended(false);
    assert_eq!(frozen.nodes.len(), 1, "{frozen}");
    assert_eq!(count(&frozen, OpKind::Product), 1, "only the weight's own gradient");
    let trained = appended(true);
    assert_eq!((count(&trained, OpKind::Product), count(&trained, OpKind::Map)), (3, 1), "{trained}");
}

#[test]
fn unreached_inputs_have_zero_gradients() {
    let b = Builder::new();
    let (x, y) = (b.param("x", &[3, 5], Init::Zeros), b.param("y", &[7], Init::Zeros));
    let from_nothing = gradients(&b, &[], &[x, y]);
    let from_y = gradients(&b, &[ones(y.exp())], &[x]);
    for (i, d) in [from_nothing[0], from_nothing[1], from_y[0]].into_iter().enumerate() {
        b.result(&format!("d{i}"), d);
    }
    let values = Values::from([("x".into(), draw("x", 15)), ("y".into(), draw("y", 7))]);
    let results = oracle::run(&in_f64(&b.finish()), &values).results;
    assert_eq!(
        [&results["d0"], &results["d1"], &results["d2"]],
        [&vec![0.0; 15], &vec![0.0; 7], &vec![0.0; 15]]
    );
}

/// A gradient stops at an inner value to differentiate: nodes before it are not differentiated through it.
#[test]
fn an_inner_value_is_a_leaf() {
    let b = Builder::new();
    let x = b.param("x", &[5], Init::Zeros);
    let h = x.exp();
    let d = gradients(&b, &[ones(h.square() * x)], &[h, x]);
    b.result("dh", d[0]);
    b.result("dx", d[1]);
    let values = Values::from([("x".into(), draw("x", 5))]);
    let results = oracle::run(&in_f64(&b.finish()), &values).results;
    for (i, x) in values["x"].iter().enumerate() {
        assert!((results["dh"][i] - 2.0 * x.exp() * x).abs() < 1e-12);
        assert!((results["dx"][i] - (2.0 * x).exp()).abs() < 1e-12, "h counts as a constant here");
    }
}

#[test]
fn gradients_carry_the_path_of_what_they_differentiate() {
    let b = Builder::new();
    let x = b.param("x", &[3, 5], Init::Zeros);
    let y = b
        .scope("layers", || b.scope("0", || x.rms_norm(1e-6, flatout_ir::ops::norm::NormWeight::None, None)));
    let d = gradients(&b, &[ones(y)], &[x])[0];
    assert_eq!((d.source().op.name(), d.source().path.as_str()), ("rms_norm_grad", "layers.0"));
}
