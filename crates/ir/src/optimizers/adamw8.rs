//! AdamW whose moments are a byte each, with a scale for every block of neighbours (`block8`).

use super::{Name, Optimizer, State};
use crate::block8::BLOCK;
use crate::ops::Op;
use crate::passes::options::Moments;
use crate::types::DType;

pub(super) const ROW: Optimizer = Optimizer {
    name: Name::AdamW,
    moments: &[Moments::Int8],
    state: |_| {
        vec![
            State { name: "m", of_region: "first_moments", dtype: DType::E4M3, block: Some(BLOCK) },
            State { name: "v", of_region: "second_moments", dtype: DType::E4M4, block: Some(BLOCK) },
        ]
    },
    update: |o, group, piece, step| {
        let update = &o.update;
        let op = Op::AdamW8 {
            beta1: update.beta1,
            beta2: update.beta2,
            eps: update.eps,
            weight_decay: group.rule.weight_decay,
            lr_scale: group.rule.lr_scale,
            copy: false,
            first: piece.first as u64,
        };
        piece.push(op, step)
    },
};
