//! Updates of one gradient run: gradients are written instead of added to sums, over memory of activations, with the same bits.

use flatout_ir::passes::differentiate::gradient_path;
use flatout_ir::plan::PlacedSlot;
use flatout_ir::{Class, Mesh, Moments, Options, PlanSet, Precision, Program, Recompute, Role, compile};
use flatout_runtime::cpu;

use crate::lanes::{graph, on_ranks, options};

const ROWS: usize = 8;

fn plans(o: &Options) -> PlanSet {
    let program = Program { role: Role::GRAD, graph: graph(ROWS) };
    compile(&[program], &cpu::target(1), o).expect("plans")
}

/// The offsets of the gradients of matrices.
fn gradients(plans: &PlanSet) -> Vec<usize> {
    let is_matrix = |slot: &&PlacedSlot| slot.class == Class::Weight && !slot.is_whole && slot.ty.rank() >= 2;
    let matrices = plans.slots.iter().filter(is_matrix);
    let gradients = matrices.filter_map(|weight| plans.slot(&gradient_path(&weight.path)));
    gradients.map(|slot| slot.view.offset).collect()
}

#[test]
fn written_gradients_give_the_bits_of_sums() {
    let of = |moments| options(Mesh::ONE, 1, moments);
    let settings = [
        of(Moments::F32),
        Options { recompute: Recompute::None, fuse_optimizer: false, ..of(Moments::F32) },
        Options { precision: Precision::BF16, recompute: Recompute::Full, ..of(Moments::BF16) },
        Options { fuse_qkv: false, fuse_norm: false, fuse_loss: false, ..of(Moments::F32) },
        Options { memory_plan: false, ..of(Moments::F32) },
        of(Moments::Int8),
    ];
    for (at, sums) in settings.into_iter().enumerate() {
        let written = Options { one_run: true, ..sums.clone() };
        let [by_sums, by_writes] = [&sums, &written].map(|o| on_ranks(o, ROWS, ROWS));
        assert_eq!(by_writes.parts_from(&by_sums), None, "setting {at}");
    }
}

/// Gradients take the memory of activations that the backward pass has released, and no launch more is needed.
#[test]
fn written_gradients_take_memory_of_activations() {
    let sums = Options { recompute: Recompute::None, ..Options::default() };
    let [by_sums, by_writes] = [false, true].map(|one_run| plans(&Options { one_run, ..sums.clone() }));
    let size = by_sums.categories()["gradients"];
    let transient = |plans: &PlanSet| {
        let at = gradients(plans);
        assert!(!at.is_empty());
        at.iter().filter(|offset| **offset >= plans.persistent_bytes).count() == at.len()
    };
    assert!(transient(&by_writes) && !transient(&by_sums));
    // The sums of the loss and of vectors remain.
    assert!(by_sums.persistent_bytes - by_writes.persistent_bytes > size * 9 / 10);
    let saved = by_sums.arena_bytes - by_writes.arena_bytes;
    println!("{saved} bytes less of {}, with {size} of gradients", by_sums.arena_bytes);
    assert!(saved > size / 2);
    let launches = |plans: &PlanSet| {
        [Role::GRAD, Role::Apply].map(|role| plans.plan(role).expect("a plan").launches.len())
    };
    let ([grad, apply], [sums_grad, sums_apply]) = (launches(&by_writes), launches(&by_sums));
    assert!(
        grad <= sums_grad && apply < sums_apply,
        "{grad} and {apply} launches, with sums {sums_grad} and {sums_apply}"
    );
}
