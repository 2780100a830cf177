//! Every invariant of a graph, violated once.

use flatout_ir::Builder;
use flatout_ir::graph::{Class, Graph, Init, NodeId, SlotId, SlotPart};
use flatout_ir::ops::Op;
use flatout_ir::types::DType;
use flatout_ir::verify::verify;

/// %0 and %1 read slots $0 and $1, %2 multiplies them and is written to $2; $3 lies in $4.
fn good() -> Graph {
    let b = Builder::new();
    let (x, y) = (b.param("x", &[3, 5], Init::Zeros), b.param("y", &[3, 5], Init::Zeros));
    let sum = b.slot("sum", Class::Carry, DType::F32, &[3, 5], Init::Zeros);
    let inner = b.slot("inner", Class::Carry, DType::F32, &[3, 5], Init::Zeros);
    let outer = b.slot("outer", Class::Carry, DType::F32, &[40], Init::Zeros);
    b.edit(|g| g.slot_mut(inner).part = Some(SlotPart { of: outer, offset: 25 }));
    let product = b.scope("layer", || x * y);
    b.write(sum, product);
    b.result("product", product);
    b.finish()
}

#[test]
fn a_good_graph_verifies() {
    assert_eq!(verify(&good()), Ok(()));
}

#[test]
fn every_violation_is_named() {
    type Break = fn(&mut Graph);
    let violations: &[(&str, Break)] = &[
        ("%2 map at `layer` uses %2, which comes later", |g| g.nodes[2].ins[0] = NodeId(2).out(0)),
        ("%2 map at `layer` uses %9, which comes later", |g| g.nodes[2].ins[0] = NodeId(9).out(0)),
        ("%2 map at `layer` uses %0.1, which does not exist", |g| g.nodes[2].ins[0] = NodeId(0).out(1)),
        ("%2 map at `layer`: takes 2 inputs, got 1", |g| g.nodes[2].ins.truncate(1)),
        ("%0 read at `x` reads a slot that does not exist", |g| g.nodes[0].op = Op::Read { slot: SlotId(9) }),
        ("%2 map at `layer` has types that its inputs do not give", |g| g.nodes[2].outs[0].dims = vec![5, 3]),
        ("%0 read at `x` has types that its inputs do not give", |g| g.slots[0].ty.dtype = DType::BF16),
        ("two slots are named `x`", |g| g.slots[1].path = "x".into()),
        ("inner does not lie inside outer", |g| {
            g.slots[3].part = Some(SlotPart { of: SlotId(4), offset: 26 })
        }),
        ("inner does not lie inside outer", |g| g.slots[4].ty.dtype = DType::BF16),
        ("inner is a part of $9, which does not exist", |g| {
            g.slots[3].part = Some(SlotPart { of: SlotId(9), offset: 0 })
        }),
        ("x is a part of itself", |g| g.slots[0].part = Some(SlotPart { of: SlotId(0), offset: 0 })),
        ("x is a part of itself", |g| {
            g.slots[0].part = Some(SlotPart { of: SlotId(1), offset: 0 });
            g.slots[1].part = Some(SlotPart { of: SlotId(0), offset: 0 });
        }),
        ("the result product is %7, which does not exist", |g| g.results[0].1 = NodeId(7).out(0)),
        ("the result product is %2.1, which does not exist", |g| g.results[0].1 = NodeId(2).out(1)),
        ("$9 is written and does not exist", |g| g.writes[0].0 = SlotId(9)),
        ("sum is written with %7, which does not exist", |g| g.writes[0].1 = NodeId(7).out(0)),
        ("outer is written with f32[3,5], wanted f32[40]", |g| g.writes[0].0 = SlotId(4)),
        ("sum and sum are both written and share memory", |g| g.writes.push(g.writes[0])),
        ("sum and inner are both written and share memory", |g| {
            g.slots[2].part = Some(SlotPart { of: SlotId(4), offset: 11 });
            g.writes.push((SlotId(3), g.writes[0].1));
        }),
        ("%3 region at `r`: %1 map at ``: takes 1 inputs, got 2", |g| {
            let body = "slot $0 a f32[3,5] input zeros\n%0 = read{slot=$0} -> f32[3,5] @ #1\n\
                        %1 = map{f=exp} %0 -> f32[3,5] @ #2\nresult y %1\n";
            let mut body: Graph = body.parse().unwrap();
            body.nodes[1].ins.push(NodeId(0).out(0));
            let ins = vec![NodeId(2).out(0)];
            g.push(Op::Region { body: Box::new(body) }, ins, "r");
        }),
        ("%3 region at `r`: map reads %1, a sum: sums are results alone", |g| {
            let body = "slot $0 a f32[3,5] input zeros\n%0 = read{slot=$0} -> f32[3,5] @ #1\n\
                        %1 = reduce{axis=0, by=sum} %0 -> f32[1,5] @ #2\n%2 = map{f=exp} %1 -> f32[1,5] @ #3\n\
                        result y %1\n";
            let mut body: Graph = body.parse().unwrap();
            let late = body.nodes.pop().unwrap();
            g.push(Op::Region { body: Box::new(body) }, vec![NodeId(2).out(0)], "r");
            let Op::Region { body } = &mut g.nodes[3].op else { panic!("a region was added") };
            body.nodes.push(late);
        }),
    ];
    for (wanted, violate) in violations {
        let mut graph = good();
        violate(&mut graph);
        assert_eq!(verify(&graph), Err(wanted.to_string()));
    }
}

#[test]
fn parts_side_by_side_may_both_be_written() {
    let mut graph = good();
    graph.slots[2].part = Some(SlotPart { of: SlotId(4), offset: 10 });
    graph.writes.push((SlotId(3), graph.writes[0].1));
    assert_eq!(verify(&graph), Ok(()));
}
