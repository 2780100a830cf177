//! Plans without any optimisation.

use flatout_ir::{Options, Recompute};

pub fn options() -> Options {
    Options {
        flash_attention: false,
        fuse_qkv: false,
        fuse_gate_up: false,
        fuse_norm: false,
        fuse_elementwise: false,
        fuse_loss: false,
        fuse_optimizer: false,
        recompute: Recompute::None,
        memory_plan: false,
        ..Options::default()
    }
}
