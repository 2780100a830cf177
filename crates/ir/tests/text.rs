//! The text form: hand-written text parses, and errors name the line.

use flatout_ir::Graph;
use flatout_ir::oracle::{self, Values};

const BY_HAND: &str = "\
// y = gate(x w^T) + b, the second weight inside the first slot.
slot $0 both f32[5,3] weight normal(0.02)
slot $1 w f32[2,3] weight normal(0.02) part=$0+9
slot $2 x f32[1,3] input zeros
slot $3 mean f32[1,2] carry zeros

%0 = read{slot=$1} -> f32[2,3] @w #1
%1 = read{slot=$2} -> f32[1,3] @x #2
%2 = product{ta=false, tb=true, out=f32, base=false} %1 %0 -> f32[1,2] @layers.0 #3
%3 = region{body={
  slot $0 a f32[1,2] input zeros
  %0 = read{slot=$0} -> f32[1,2] @a #1
  %1 = map{f=relu} %0 -> f32[1,2] @ #2
  %2 = map{f=offset:0.5} %1 -> f32[1,2] @ #3
  result r %2
}} %2 -> f32[1,2] @layers.0 #4
write $3 %3
result y %3
";

#[test]
fn a_graph_written_by_hand_parses_and_runs() {
    let graph: Graph = BY_HAND.parse().unwrap();
    flatout_ir::verify::verify(&graph).unwrap();
    let again: Graph = graph.to_string().parse().unwrap();
    assert_eq!(again, graph);
    assert_eq!(again.to_string(), graph.to_string());
    let values =
        Values::from([("w".into(), vec![1.0, 2.0, 3.0, -1.0, 0.0, 0.0]), ("x".into(), vec![1.0, 0.5, 2.0])]);
    let run = oracle::run(&graph, &values);
    assert_eq!((&run.results["y"], &run.writes["mean"]), (&vec![8.5, 0.5], &vec![8.5, 0.5]));
}

/// The error for `BY_HAND` with one piece replaced.
fn error(piece: &str, by: &str) -> String {
    assert_eq!(BY_HAND.matches(piece).count(), 1, "`{piece}` stands once");
    BY_HAND.replace(piece, by).parse::<Graph>().expect_err(by)
}

#[test]
fn errors_name_the_line() {
    let cases = [
        ("f=relu", "f=rely", "line 10: line 4: `rely` is no function"),
        ("product{ta=false, ", "product{", "line 9: attribute `ta` is missing"),
        ("base=false}", "base=false, bias=true}", "line 9: product has no attribute `bias`"),
        ("= product{", "= produce{", "line 9: `produce` is not an operation"),
        ("%1 %0 -> f32[1,2]", "%1 %0 -> f32[2,2]", "line 9: product gives f32[1,2]"),
        ("%1 %0 -> f32[1,2]", "%1 %7 -> f32[1,2]", "line 9: %7 is used before it is made"),
        ("%1 %0 -> f32[1,2]", "%1 %0.1 -> f32[1,2]", "line 9: %0.1 is used before it is made"),
        ("%1 %0 -> f32[1,2]", "%0 %0 -> f32[1,2]", "line 9: product gives f32[2,2]"),
        ("%1 %0 -> f32[1,2]", "%1 -> f32[1,2]", "line 9: takes 2 inputs, got 1"),
        ("%1 = read{slot=$2}", "%1 = read{slot=$9}", "line 8: $9 is read before its slot stands"),
        ("%1 = read{slot=$2}", "%4 = read{slot=$2}", "line 8: node %4 is out of order"),
        ("%1 = read{slot=$2}", "%1 = read slot=$2", "line 8: a node has its attributes in braces"),
        ("@x #2", "#2", "line 8: a node has a path"),
        ("@x #2", "@x", "line 8: a node has a key"),
        ("@x #2", "@x #zz", "line 8: `#zz` is no key"),
        ("slot $2 x", "slot $5 x", "line 4: slot $5 is out of order"),
        ("x f32[1,3] input", "x f33[1,3] input", "line 4: `f33` is not an element type"),
        ("x f32[1,3] input", "x f32(1,3) input", "line 4: `f32(1,3)` is no type"),
        ("x f32[1,3] input", "x f32[1,3] output", "line 4: `output` is not a Class"),
        ("part=$0+9", "part=$0", "line 3: a part is part=$N+offset"),
        ("part=$0+9", "part=$0+9 more", "line 3: `part=$0+9 more` after a slot"),
        ("write $3 %3", "write $7 %3", "line 17: $7 is written before its slot stands"),
        ("result y %3", "result y %4", "line 18: %4 is used before it is made"),
        ("result y %3", "results y %3", "line 18: `results y %3` is no statement"),
        ("}} %2 ->", "} %2 ->", "line 10: a bracket is not closed"),
    ];
    for (piece, by, wanted) in cases {
        assert_eq!(error(piece, by), wanted, "{piece} -> {by}");
    }
}
