//! The check that every operation must pass, and the table of cases it runs over.
//!
//! A case is a small graph whose inputs carry their values. `check` shows, in f64: the graph verifies, its text parses back to
//! the same graph, every expansion has the types of the shape rule, the gradients equal central differences of the forward
//! evaluation, and they equal the gradients of the forward's expansion. The differences are the independent evidence: a fused
//! gradient's expansion is itself derived, so comparing it with derivatives alone would prove nothing. Backends run the same
//! cases against the oracle.

pub mod cases;

use std::cell::RefCell;

use crate::autodiff::gradients;
use crate::builder::{Builder, Tensor};
use crate::expand::to_primitives;
use crate::graph::{Class, Graph, Init, Value};
use crate::ops::{Op, OpKind};
use crate::oracle::{self, Values, in_f64};
use crate::random::normal;
use crate::types::DType;
use crate::verify::verify;

/// Runs one case. Returns the kinds of operation in its forward and its gradient graph.
pub fn check(case: &Case) -> Result<Vec<OpKind>, String> {
    let (forward, values) = case.forward();
    let trained = differentiate(&forward);
    for graph in [&forward, &trained] {
        sound(graph).map_err(|why| format!("{}: {why}", case.name))?;
    }
    let (forward, mut values) = (in_f64(&forward), values);
    seed(&forward, &mut values);
    let analytic = gradients_of(&differentiate(&forward), &values);
    let expanded = gradients_of(&differentiate(&to_primitives(&forward)), &values);
    for (path, gradient) in &analytic {
        let differences = central_differences(&forward, &values, path);
        within(1e-6, gradient, &differences)
            .map_err(|why| format!("{}: gradient of {path} against differences: {why}", case.name))?;
        let (_, of_expansion) = expanded.iter().find(|(p, _)| p == path).expect("the same parameters");
        within(1e-10, gradient, of_expansion)
            .map_err(|why| format!("{}: gradient of {path} against the expansion's: {why}", case.name))?;
    }
    Ok(trained.nodes.iter().map(|n| n.op.kind()).collect())
}

/// A function that builds the graph of a case and returns the outputs to differentiate.
pub type Build = for<'g> fn(&'g Trial) -> Vec<Tensor<'g>>;

pub struct Case {
    pub name: &'static str,
    pub build: Build,
}

impl Case {
    /// The forward graph in f32 with results `y0`, `y1`, ..., and the values of its slots.
    pub fn forward(&self) -> (Graph, Values) {
        let trial = Trial::default();
        for (i, y) in (self.build)(&trial).into_iter().enumerate() {
            trial.b.result(&format!("y{i}"), y);
        }
        (trial.b.finish(), trial.values.into_inner())
    }

    /// The forward graph with the gradients of all parameters, and the values of its slots: a backend runs this.
    pub fn with_gradients(&self) -> (Graph, Values) {
        let (forward, mut values) = self.forward();
        seed(&forward, &mut values);
        (differentiate(&forward), values)
    }
}

/// A graph under construction whose inputs carry their values.
#[derive(Default)]
pub struct Trial {
    pub b: Builder,
    values: RefCell<Values>,
}

impl Trial {
    /// A parameter of standard normal values, named `x0`, `x1`, ... in order of creation.
    #[track_caller]
    pub fn x(&self, dims: &[usize]) -> Tensor<'_> {
        let path = format!("x{}", self.b.with_graph(|g| g.slots.len()));
        let t = self.b.param(&path, dims, Init::Normal { std: 1.0 });
        self.values.borrow_mut().insert(path.clone(), draw(&path, dims.iter().product()));
        t
    }

    #[track_caller]
    pub fn index(&self, dims: &[usize], values: &[i32]) -> Tensor<'_> {
        assert_eq!(dims.iter().product::<usize>(), values.len(), "values for {dims:?}");
        let path = format!("i{}", self.b.with_graph(|g| g.slots.len()));
        let t = self.b.input(&path, DType::I32, dims);
        self.values.borrow_mut().insert(path, values.iter().map(|&i| i as f64).collect());
        t
    }
}

/// Standard normal numbers, a function of the path.
pub fn draw(path: &str, count: usize) -> Vec<f64> {
    let stream = path.bytes().fold(0, |h: u64, b| h * 257 + b as u64);
    (0..count as u64).map(|i| normal(1, stream, i) as f64).collect()
}

/// Checks the largest difference, relative to the largest finite wanted value; infinities must be equal.
pub fn within(bound: f64, got: &[f64], wanted: &[f64]) -> Result<(), String> {
    if got.len() != wanted.len() {
        return Err(format!("{} values, wanted {}", got.len(), wanted.len()));
    }
    // Central differences of a function of size 1 have rounding errors of 1e-11: below 1e-3 gradients are compared absolutely.
    let scale = wanted.iter().filter(|x| x.is_finite()).fold(1e-3, |m: f64, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(wanted).enumerate() {
        let apart = if g == w { 0.0 } else { (g - w).abs() / scale };
        if apart.is_nan() || apart > bound {
            return Err(format!("element {i} is {g}, wanted {w} ({apart:.1e} apart, bound {bound:.0e})"));
        }
    }
    Ok(())
}

/// Checks that the graph verifies, survives its text form, and that its expansions have the types of the shape rules.
pub fn sound(graph: &Graph) -> Result<(), String> {
    verify(graph)?;
    let text = graph.to_string();
    let read: Graph = text.parse().map_err(|why| format!("{why} in\n{text}"))?;
    if read != *graph || read.to_string() != text {
        return Err(format!("the text reads back as another graph:\n{text}\n{read}"));
    }
    for node in &graph.nodes {
        let b = Builder::from_graph(graph.clone());
        let ins: Vec<_> = node.ins.iter().map(|v| b.tensor(*v)).collect();
        let Some(outs) = node.op.expand(&b, node.key, &ins) else { continue };
        let types: Vec<_> = outs.iter().map(|t| t.ty()).collect();
        if types != node.outs {
            return Err(format!("{} expands to {types:?}, wanted {:?}", node.op.name(), node.outs));
        }
    }
    Ok(())
}

/// The outputs of a small graph in f64, and the values of its slots.
pub fn evaluate(build: Build) -> (Vec<Vec<f64>>, Values) {
    let (forward, values) = Case { name: "evaluate", build }.forward();
    let mut run = oracle::run(&in_f64(&forward), &values);
    let outputs =
        forward.results.iter().map(|(name, _)| run.results.remove(name).expect("a result")).collect();
    (outputs, values)
}

/// Appends the gradients of every weight as results `d.<path>`; the input `d.y0` is the gradient of result `y0`.
pub fn differentiate(forward: &Graph) -> Graph {
    let results = forward.results.clone();
    let weights: Vec<(String, Value)> = forward
        .ids()
        .filter_map(|id| match forward.node(id).op {
            Op::Read { slot } if forward.slot(slot).class == Class::Weight => {
                Some((forward.slot(slot).path.clone(), id.out(0)))
            }
            _ => None,
        })
        .collect();
    let b = Builder::from_graph(forward.clone());
    let seeds: Vec<_> = results
        .iter()
        .map(|(name, v)| (b.tensor(*v), b.tensor(*v).ty(), name))
        .map(|(y, ty, name)| (y, b.input(&format!("d.{name}"), ty.dtype, &ty.dims)))
        .collect();
    let wrt: Vec<_> = weights.iter().map(|(_, v)| b.tensor(*v)).collect();
    for ((path, _), d) in weights.iter().zip(gradients(&b, &seeds, &wrt)) {
        b.result(&format!("d.{path}"), d);
    }
    b.finish()
}

/// Draws the gradients of the results: the random projection to differentiate.
fn seed(forward: &Graph, values: &mut Values) {
    for (name, v) in &forward.results {
        let path = format!("d.{name}");
        values.insert(path.clone(), draw(&path, forward.ty(*v).elements()));
    }
}

fn gradients_of(trained: &Graph, values: &Values) -> Vec<(String, Vec<f64>)> {
    let run = oracle::run(trained, values);
    let of_parameter =
        |(name, value): (String, Vec<f64>)| Some((name.strip_prefix("d.")?.to_string(), value));
    run.results.into_iter().filter_map(of_parameter).collect()
}

/// (f(x + h) - f(x - h)) / 2h for every element x of one slot, where f is the projection of the results.
fn central_differences(forward: &Graph, values: &Values, path: &str) -> Vec<f64> {
    const H: f64 = 1e-5;
    let primitives = to_primitives(forward);
    let projection = |values: &Values| -> f64 {
        let run = oracle::run(&primitives, values);
        let dot = |(name, y): (&String, &Vec<f64>)| -> f64 {
            y.iter().zip(&values[&format!("d.{name}")]).map(|(y, d)| y * d).sum()
        };
        run.results.iter().map(dot).sum()
    };
    (0..values[path].len())
        .map(|i| {
            let moved = |by: f64| {
                let mut moved = values.clone();
                moved.get_mut(path).expect("the slot has a value")[i] += by;
                projection(&moved)
            };
            (moved(H) - moved(-H)) / (2.0 * H)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differing_values_are_rejected() {
        assert!(within(1e-6, &[1.0, f64::NEG_INFINITY], &[1.0, f64::NEG_INFINITY]).is_ok());
        assert!(within(1e-6, &[1.0, 2.0], &[1.0, 2.0 + 1e-5]).is_err());
        assert!(within(1e-6, &[1.0, f64::NAN], &[1.0, f64::NAN]).is_err());
        assert!(within(1e-6, &[1.0, f64::INFINITY], &[1.0, 2.0]).is_err());
        assert!(within(1e-6, &[1.0, 2.0], &[1.0, f64::INFINITY]).is_err());
        assert!(within(1e-6, &[1.0], &[1.0, 2.0]).is_err());
    }

    #[test]
    fn a_wrong_gradient_is_rejected() {
        let (forward, mut values) = Case { name: "a line", build: |t| vec![t.x(&[3]).scale(2.0)] }.forward();
        seed(&forward, &mut values);
        let differences = central_differences(&in_f64(&forward), &values, "x0");
        let right: Vec<f64> = values["d.y0"].iter().map(|d| 2.0 * d).collect();
        let wrong: Vec<f64> = values["d.y0"].iter().map(|d| 2.001 * d).collect();
        assert_eq!(within(1e-6, &right, &differences), Ok(()));
        assert!(within(1e-6, &wrong, &differences).is_err());
    }
}
