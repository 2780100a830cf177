//! Tests that the sum of squares of a chunk has the same bits whatever the number and content of the other chunks, which norms
//! of runs with several lanes rely on. On the CPU always, and on a GPU if there is one.

use flatout_ir::ops::reduce::Fold;
use flatout_ir::passes::input_path;
use flatout_ir::passes::layout::CHUNK;
use flatout_ir::random::normal;
use flatout_ir::{Builder, DType, Options, PlanSet, Program, Role, Target, compile};
use flatout_runtime::{Session, cpu, cuda};

use crate::order::gpu;

const COUNTS: [usize; 4] = [1, 3, 64, 1000];

fn plans(target: &Target, chunks: usize) -> PlanSet {
    let b = Builder::new();
    let x = b.input("x", DType::F32, &[chunks * CHUNK]);
    let squares = x.reshape(&[chunks, CHUNK]).reduce(1, Fold::SumSquares);
    b.result("y", squares.reshape(&[chunks]));
    let program = Program { role: Role::Eval, graph: b.finish() };
    compile(&[program], target, &Options::default()).expect("a plan")
}

fn bits_are_a_chunks_own(target: &Target, open: impl Fn(PlanSet) -> Session) {
    // Chunk `i` is the same in every set of chunks.
    let most = COUNTS[COUNTS.len() - 1];
    let x: Vec<f32> = (0..(most * CHUNK) as u64).map(|i| normal(2, 0, i)).collect();
    let sums = COUNTS.map(|chunks| {
        let mut session = open(plans(target, chunks));
        session.write_f32(&input_path(Role::Eval, "x"), &x[..chunks * CHUNK]).unwrap();
        session.run(Role::Eval).unwrap();
        session.result(Role::Eval, "y").unwrap()
    });
    for (few, chunks) in sums.iter().zip(COUNTS) {
        assert!(few[..] == sums[COUNTS.len() - 1][..chunks], "{chunks} chunks have other bits");
    }
}

#[test]
fn chunks_on_the_cpu() {
    for threads in [1, 2, 4] {
        bits_are_a_chunks_own(&cpu::target(threads), |plans| Session::new(plans, threads).unwrap());
    }
}

#[test]
fn chunks_on_a_gpu() {
    let Some(device) = gpu() else { return };
    let options = cuda::Options { deterministic: true, ..Default::default() };
    let target = cuda::target(&device, true);
    bits_are_a_chunks_own(&target, |plans| Session::cuda(plans, &device, options).unwrap());
}
