//! A wrong shape panics at the line of the model that caused it, with the path and both types.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::{Mutex, MutexGuard};

use flatout_ir::graph::Init;
use flatout_ir::ops::Op;
use flatout_ir::ops::attention::{Attend, Mask, Masking, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::linear_attention::{Keys, LinearAttend, LinearMask, Rotary};
use flatout_ir::ops::norm::NormWeight;
use flatout_ir::ops::rope::{Pairs, RopeSpec};
use flatout_ir::types::DType;
use flatout_ir::{Builder, Tensor};

/// The panic hook is global to the process: one test at a time sets it.
static HOOK: Mutex<Vec<(String, u32, String)>> = Mutex::new(vec![]);
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Builds inside `layers.3.attn` and returns file, line and message of the panic.
fn panic_of(build: impl for<'g> Fn(&'g Builder) -> Tensor<'g>) -> (String, u32, String) {
    let _turn = turn();
    set_hook(Box::new(|info| {
        let at = info.location().expect("a location");
        let message = info.payload().downcast_ref::<String>().cloned().unwrap_or_default();
        HOOK.lock().unwrap().push((at.file().to_string(), at.line(), message));
    }));
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let b = Builder::new();
        b.scope("layers", || b.scope("3", || b.scope("attn", || build(&b).dims())));
    }));
    drop(std::panic::take_hook());
    assert!(outcome.is_err(), "the shapes were accepted");
    HOOK.lock().unwrap().pop().expect("the hook ran")
}

macro_rules! refuses {
    ($($name:ident: $message:literal, $build:expr;)*) => {$(
        #[test]
        fn $name() {
            let (file, line, message) = panic_of($build);
            assert!(file.ends_with("tests/shapes.rs"), "panicked at {file}:{line}");
            assert_eq!(message, $message);
        }
    )*};
}

fn x<'g>(b: &'g Builder, name: &str, dims: &[usize]) -> Tensor<'g> {
    b.param(name, dims, Init::Zeros)
}

fn attend(b: &Builder, h: usize, len: usize) -> Tensor<'_> {
    let of = Segments::Uniform { len };
    let (q, k, v) = (x(b, "q", &[6, h, 3]), x(b, "k", &[6, 2, 3]), x(b, "v", &[6, 2, 3]));
    q.attention(
        k,
        v,
        &Attend { scale: 1.0, cap: Cap::NONE, mask: Mask::Full, q: of, k: of },
        &Masking::default(),
    )
}

fn linear<'g>(b: &'g Builder, v: &[usize], k: Segments) -> Tensor<'g> {
    let attend = LinearAttend {
        scale: 1.0,
        mask: LinearMask::Full,
        q: Segments::Uniform { len: 6 },
        k: Keys::Given(k),
        rotary: Rotary::None,
    };
    x(b, "q", &[6, 4, 3]).linear_attention(
        Some(x(b, "k", &[6, 2, 3])),
        x(b, "v", v),
        &attend,
        &Masking::default(),
    )
}

refuses! {
    a_product: "layers.3.attn: product: f32[3,5] times f32[7,6] transposed: inner extents 5 and 6 differ",
        |b| x(b, "x", &[3, 5]).linear(x(b, "wq", &[7, 6]));
    a_sum: "layers.3.attn: broadcast: f32[3,5] does not broadcast to [3, 7]",
        |b| x(b, "x", &[3, 5]) + x(b, "y", &[3, 7]);
    a_reshape: "layers.3.attn: reshape: f32[3,5] does not reshape to [4, 4]",
        |b| x(b, "x", &[3, 5]).reshape(&[4, 4]);
    a_slice: "layers.3.attn: slice: 3..6 lies outside axis 1 of f32[3,5]",
        |b| x(b, "x", &[3, 5]).slice(1, 3, 3);
    a_concat: "layers.3.attn: concat: f32[3,5] and f32[4,5] do not join along axis 1",
        |b| b.concat(&[x(b, "x", &[3, 5]), x(b, "y", &[4, 5])], 1);
    a_norm: "layers.3.attn: rms_norm: the norm's weight is f32[4], wanted f32[5]",
        |b| x(b, "x", &[3, 5]).rms_norm(1e-6, NormWeight::Plain, Some(x(b, "w", &[4])));
    a_norm_of_a_scalar: "layers.3.attn: rms_norm: x is f32[], wanted at least one axis",
        |b| x(b, "x", &[]).rms_norm(1e-6, NormWeight::None, None);
    a_rope: "layers.3.attn: rope: positions is i32[1,4], wanted i32[1,3]",
        |b| {
            let positions = b.input("positions", DType::I32, &[1, 4]);
            x(b, "x", &[3, 1, 6]).rope(positions, &RopeSpec::text(6, 1e4.into(), Pairs::Half))
        };
    heads_that_do_not_divide: "layers.3.attn: attention: q f32[6,3,3] does not attend to k f32[6,2,3]",
        |b| attend(b, 3, 6);
    segments_that_do_not_fit: "layers.3.attn: attention: 6 queries do not cut into segments of 4",
        |b| attend(b, 4, 4);
    values_of_heads_that_do_not_divide: "layers.3.attn: linear_attention: 4 heads over k f32[6,2,3] do not read v f32[6,3,5]",
        |b| linear(b, &[6, 3, 5], Segments::Uniform { len: 6 });
    segments_that_do_not_pair_up: "layers.3.attn: linear_attention: 1 segments of queries and 2 of keys do not pair up",
        |b| linear(b, &[6, 1, 5], Segments::Uniform { len: 3 });
    a_head: "layers.3.attn: head_loss: rows f32[3,5] do not go through a head f32[7,4]",
        |b| {
            let target = b.input("target", DType::I32, &[3]);
            x(b, "x", &[3, 5]).head_loss(x(b, "head", &[7, 4]), target, x(b, "weight", &[3])).sum
        };
    a_gather: "layers.3.attn: gather: the index is f32[3], wanted i32[3]",
        |b| x(b, "x", &[3, 5]).gather(x(b, "index", &[3]));
    dropping_everything: "layers.3.attn: dropout: a share of 1 cannot be dropped",
        |b| {
            let (rng, rows) = (b.input("rng", DType::I32, &[3]), b.input("rows", DType::I32, &[3, 2]));
            x(b, "x", &[3, 5]).dropout(1.0, rng, rows)
        };
    too_few_inputs: "layers.3.attn: gated: takes 2 inputs, got 1",
        |b| b.op(Op::Gated { act: flatout_ir::ops::gated::Act::Silu, p: 0.0 }, &[x(b, "x", &[3, 5])]);
    one_name_twice: "two slots are named `layers.3.attn.wq`",
        |b| { x(b, "wq", &[3]); b.param("wq", &[3], Init::Zeros) };
    axes_that_differ_in_number: "layers.3.attn: add of [3, 5] and [5]: give both the same number of axes",
        |b| x(b, "x", &[3, 5]) + x(b, "y", &[5]);
}

/// The exact line: `line!()` on the line of the mistake.
#[test]
fn the_panic_names_the_callers_line() {
    static LINE: Mutex<u32> = Mutex::new(0);
    let (file, line, _) = panic_of(|b| {
        let (x, w) = (b.param("x", &[3, 5], Init::Zeros), b.param("w", &[7, 6], Init::Zeros));
        *LINE.lock().unwrap() = line!() + 1;
        x.linear(w)
    });
    assert_eq!((file.ends_with("tests/shapes.rs"), line), (true, *LINE.lock().unwrap()));
}
