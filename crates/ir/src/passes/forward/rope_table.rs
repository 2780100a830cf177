//! Rotations read their cosines and sines from a table computed once, instead of computing them at every use.

use crate::attr::Attr;
use crate::graph::{Class, Graph, Init, Slot, SlotId};
use crate::ops::Op;
use crate::ops::frequency::Frequencies;
use crate::replay::Replay;
use crate::types::{DType, TensorType};

/// Gives every rotation a table of `positions` rows; returns the number of rotations.
pub fn rope_table(g: &Graph, positions: usize) -> (Graph, usize) {
    let mut replay = Replay::new(g);
    let mut served = 0;
    for id in g.ids() {
        let node = g.node(id);
        let mut op = node.op.clone();
        let mut ins: Vec<_> = node.ins.iter().map(|v| replay.get(*v)).collect();
        if let Op::Rope { freq, table, .. } | Op::QkNormRope { freq, table, .. } = &mut op
            && !*table
        {
            *table = true;
            let slot = table_slot(&mut replay.new, *freq, node.outs[0].last(), positions);
            ins.push(replay.add(Op::Read { slot }, vec![], id));
            served += 1;
        }
        replay.copy_as(id, op, ins);
    }
    (replay.finish(), served)
}

fn table_slot(g: &mut Graph, freq: Frequencies, head_size: usize, positions: usize) -> SlotId {
    let path = format!("rope_table.{}.{head_size}", freq.to_text());
    g.find_slot(&path).unwrap_or_else(|| {
        let ty = TensorType::new(DType::F32, [positions, head_size / 2, 2]);
        g.add_slot(Slot { path, ty, class: Class::Const, init: Init::RopeTable { freq }, part: None })
    })
}
