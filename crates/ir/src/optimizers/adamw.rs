//! AdamW: two moments per parameter, in f32 or bf16.

use super::{Name, Optimizer, State};
use crate::ops::Op;
use crate::passes::options::Moments;
use crate::types::DType;

pub(super) const ROW: Optimizer = Optimizer {
    name: Name::AdamW,
    moments: &[Moments::F32, Moments::BF16],
    state: |update| {
        let dtype = if update.moments == Moments::BF16 { DType::BF16 } else { DType::F32 };
        vec![
            State { name: "m", of_region: "first_moments", dtype, block: None },
            State { name: "v", of_region: "second_moments", dtype, block: None },
        ]
    },
    update: |o, group, piece, step| {
        let update = &o.update;
        let op = Op::AdamW {
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
