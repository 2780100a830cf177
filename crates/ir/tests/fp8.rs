//! The passes of 8-bit products: graph text in, graph text out.

use std::collections::HashMap;

use flatout_ir::oracle;
use flatout_ir::passes::fuse::epilogues;
use flatout_ir::passes::fuse::gated_products::gated_codes;
use flatout_ir::passes::types::fp8::{Narrowed, fp8};
use flatout_ir::passes::types::quantize_sources::{self, Joined};
use flatout_ir::target::paper;
use flatout_ir::{Graph, Scaling};

/// One layer, y = x w, with both gradients; a product outside any layer, and one of odd extents.
const LAYER: &str = "slot $0 x bf16[32,16] input zeros
slot $1 bf16.layers.0.w bf16[48,16] derived zeros
slot $2 dy bf16[32,48] input zeros
slot $3 gradient.layers.0.w f32[48,16] carry zeros
slot $4 bf16.head bf16[16,16] derived zeros
slot $5 bf16.layers.0.odd bf16[8,16] derived zeros
%0 = read{slot=$0} -> bf16[32,16] @x #0
%1 = read{slot=$1} -> bf16[48,16] @layers.0.w #1
%2 = product{ta=false, tb=true, out=bf16, base=false} %0 %1 -> bf16[32,48] @layers.0 #2
%3 = read{slot=$4} -> bf16[16,16] @head #3
%4 = product{ta=false, tb=true, out=bf16, base=false} %0 %3 -> bf16[32,16] @head #4
%5 = read{slot=$5} -> bf16[8,16] @layers.0.odd #5
%6 = product{ta=false, tb=true, out=bf16, base=false} %0 %5 -> bf16[32,8] @layers.0 #6
%7 = read{slot=$2} -> bf16[32,48] @dy #7
%8 = product{ta=false, tb=false, out=bf16, base=false} %7 %1 -> bf16[32,16] @layers.0 #8
%9 = product{ta=true, tb=false, out=f32, base=false} %7 %0 -> f32[48,16] @layers.0 #9
%10 = read{slot=$3} -> f32[48,16] @layers.0.w #10
%11 = map{f=add} %10 %9 -> f32[48,16] @layers.0.w #11
write $3 %11
result y %2
result logits %4
result odd %6
result dx %8
";

fn layer() -> Graph {
    LAYER.parse().expect("a graph")
}

/// Nodes that read no slot, writes and results, without paths and keys.
fn nodes(g: &Graph) -> String {
    let text = g.to_string();
    let kept = text.lines().filter(|l| !l.starts_with("slot") && !l.contains("= read{"));
    kept.map(|l| l.split(" @").next().unwrap_or(l).trim()).collect::<Vec<_>>().join("\n")
}

fn slots(g: &Graph) -> Vec<String> {
    g.to_string().lines().filter(|l| l.contains(" fp8.")).map(|l| l.to_string()).collect()
}

#[test]
fn products_of_layers_read_codes_that_lie_along_the_inner_extent() {
    let (g, forward, narrowed) = fp8(&layer(), 7, Scaling::Current, None);
    assert_eq!(narrowed, Narrowed { products: 3, of: 5 });
    // x and dy are quantised once each; the second gradient uses the other outputs of both.
    assert_eq!(
        nodes(&g),
        "%2 = quantize{to=e4m3, current=true} %0 -> e4m3[32,16] e4m3[16,32] f32[1]
%5 = product{ta=false, tb=true, out=bf16, base=false} %2 %3 %2.2 %4 -> bf16[32,48]
%7 = product{ta=false, tb=true, out=bf16, base=false} %0 %6 -> bf16[32,16]
%9 = product{ta=false, tb=true, out=bf16, base=false} %0 %8 -> bf16[32,8]
%11 = quantize{to=e5m2, current=true} %10 -> e5m2[32,48] e5m2[48,32] f32[1]
%14 = product{ta=false, tb=true, out=bf16, base=false} %11 %12 %11.2 %13 -> bf16[32,16]
%15 = product{ta=false, tb=true, out=f32, base=false} %11.1 %2.1 %11.2 %2.2 -> f32[48,16]
%17 = map{f=add} %16 %15 -> f32[48,16]
write $3 %17
result y %5
result logits %7
result odd %9
result dx %14"
    );
    assert_eq!(forward, 10, "dy is the first of the backward pass");
    assert_eq!(
        slots(&g),
        [
            "slot $6 fp8.rows.layers.0.w e4m3[48,16] derived zeros",
            "slot $7 fp8.scale.layers.0.w f32[1] derived zeros",
            "slot $8 fp8.columns.layers.0.w e4m3[16,48] derived zeros",
        ]
    );
}

#[test]
fn delayed_scaling_has_one_slot_per_type_and_records_magnitudes() {
    let (g, ..) = fp8(&layer(), 7, Scaling::Delayed, None);
    let text = g.to_string();
    assert!(text.contains("quantize{to=e4m3, current=false} %0 "), "{text}");
    let shared: Vec<String> = slots(&g).into_iter().filter(|l| !l.contains("layers.0.w")).collect();
    assert_eq!(
        shared,
        [
            "slot $6 fp8.scale.e4m3 f32[4] derived zeros",
            "slot $7 fp8.amax.e4m3 f32[4] carry zeros",
            "slot $8 fp8.scale.e4m3.0.layers.0 f32[1] derived zeros part=$6+0",
            "slot $9 fp8.amax.e4m3.0.layers.0 f32[1] carry zeros part=$7+0",
            "slot $10 fp8.scale.e5m2 f32[4] derived zeros",
            "slot $11 fp8.amax.e5m2 f32[4] carry zeros",
            "slot $12 fp8.scale.e5m2.0.layers.0 f32[1] derived zeros part=$10+0",
            "slot $13 fp8.amax.e5m2.0.layers.0 f32[1] carry zeros part=$11+0",
        ]
    );
    let written: Vec<u32> = g.writes.iter().map(|(slot, _)| slot.0).collect();
    assert_eq!(written, [3, 9, 13]);
}

#[test]
fn a_base_comes_before_the_scales() {
    let (g, ..) = fp8(&layer(), 7, Scaling::Current, None);
    let (g, folded) = epilogues::epilogues(&g);
    assert_eq!(folded, 1);
    let text = nodes(&g);
    assert!(
        text.contains(
            "product{ta=false, tb=true, out=f32, base=true} %11.1 %2.1 %15 %11.2 %2.2 -> f32[48,16]"
        ),
        "{text}"
    );
}

#[test]
fn activations_read_only_in_eight_bits_are_quantised_at_the_source() {
    let text = "slot $0 gate bf16[32,16] input zeros
slot $1 up bf16[32,16] input zeros
slot $2 dy bf16[32,16] input zeros
slot $3 scale f32[1] derived zeros
slot $4 amax f32[1] carry zeros
%0 = read{slot=$0} -> bf16[32,16] @p #0
%1 = read{slot=$1} -> bf16[32,16] @p #1
%2 = read{slot=$2} -> bf16[32,16] @p #2
%3 = read{slot=$3} -> f32[1] @p #3
%4 = read{slot=$4} -> f32[1] @p #4
%5 = gated{act=silu, p=0} %0 %1 -> bf16[32,16] @p #5
%6 = quantize{to=e4m3, current=false} %5 %3 %4 -> e4m3[32,16] e4m3[16,32] f32[1] @p #6
%7 = gated_grad{act=silu, again=false, p=0} %0 %1 %2 -> bf16[32,16] bf16[32,16] @p #7
%8 = concat{axis=1} %7 %7.1 -> bf16[32,32] @p #8
%9 = quantize{to=e5m2, current=false} %8 %3 %4 -> e5m2[32,32] e5m2[32,32] f32[1] @p #9
result y %6
result dx %9.1
";
    let joined = |text: &str| {
        let (g, count) = quantize_sources::quantize_sources(&text.parse().expect("a graph"));
        (nodes(&flatout_ir::replay::without_dead(&g)), count)
    };
    let (text_of, count) = joined(text);
    assert_eq!(count, Joined { gated: 2, ..Joined::default() });
    assert_eq!(
        text_of,
        "%5 = quantize{to=e4m3, current=false, of=gated:silu} %0 %1 %3 %4 -> e4m3[32,16] e4m3[16,32] f32[1]
%8 = quantize{to=e5m2, current=false, of=gated_grad:silu} %0 %1 %2 %6 %7 -> e5m2[32,32] e5m2[32,32] f32[1]
result y %5
result dx %8.1"
    );
    // Something else reads the activation, so it is stored as well.
    assert_eq!(joined(&format!("{text}result also %5\n")).1, Joined { gated: 1, ..Joined::default() });
}

/// A gradient that computes the activation again writes its codes along columns, if nothing else is wanted of it.
#[test]
fn activations_made_again_are_quantised_by_their_gradient() {
    let text = "slot $0 gate bf16[32,16] input zeros
slot $1 up bf16[32,16] input zeros
slot $2 dy bf16[32,16] input zeros
slot $3 scale f32[1] derived zeros
slot $4 amax f32[1] carry zeros
slot $5 before f32[1] derived zeros
%0 = read{slot=$0} -> bf16[32,16] @p #0
%1 = read{slot=$1} -> bf16[32,16] @p #1
%2 = read{slot=$2} -> bf16[32,16] @p #2
%3 = read{slot=$3} -> f32[1] @p #3
%4 = read{slot=$4} -> f32[1] @p #4
%5 = read{slot=$5} -> f32[1] @p #5
%6 = gated_grad{act=silu, again=true, p=0} %0 %1 %2 -> bf16[32,16] bf16[32,16] bf16[32,16] @p #6
%7 = quantize{to=e4m3, current=false} %6.2 %5 %5 -> e4m3[32,16] e4m3[16,32] f32[1] @p #7
%8 = concat{axis=1} %6 %6.1 -> bf16[32,32] @p #8
%9 = quantize{to=e5m2, current=false} %8 %3 %4 -> e5m2[32,32] e5m2[32,32] f32[1] @p #9
result w %7.1
result dx %9
";
    let joined = |text: &str| {
        let (g, count) = quantize_sources::quantize_sources(&text.parse().expect("a graph"));
        flatout_ir::verify::verify(&g).expect("a sound graph");
        (flatout_ir::replay::without_dead(&g), count)
    };
    let (g, count) = joined(text);
    assert_eq!(count, Joined { gated: 1, again: 1, ..Joined::default() });
    assert_eq!(g.to_string().parse::<Graph>().expect("its text"), g);
    assert_eq!(
        nodes(&g),
        "%6 = quantize{to=e5m2, current=false, of=gated_grad_again:silu} %0 %1 %2 %3 %4 %5 -> e5m2[32,32] e5m2[32,32] f32[1] e4m3[16,32]
result w %6.3
result dx %6"
    );
    // Its codes along rows, or the activation itself, would have to be stored as well.
    for also in ["%7", "%6.2"] {
        assert_eq!(joined(&format!("{text}result also {also}\n")).1, Joined::default(), "{also}");
    }
}

/// A norm outputs codes and h; its gradient also outputs dx, which the previous layer reads.
#[test]
fn norms_are_quantised_where_they_stand() {
    let text = "slot $0 x bf16[32,16] input zeros
slot $1 w f32[16] weight zeros
slot $2 scale f32[1] derived zeros
slot $3 amax f32[1] carry zeros
%0 = read{slot=$0} -> bf16[32,16] @p #0
%1 = read{slot=$1} -> f32[16] @p #1
%2 = rms_norm{eps=0.5, center=false, weight=plain, bias=false, residual=true} %0 %0 %1 -> bf16[32,16] bf16[32,16] @p #2
%3 = map{f=neg} %2.1 -> bf16[32,16] @p #3
%4 = read{slot=$2} -> f32[1] @p #4
%5 = read{slot=$3} -> f32[1] @p #5
%6 = quantize{to=e4m3, current=false} %2 %4 %5 -> e4m3[32,16] e4m3[16,32] f32[1] @q #6
%7 = rms_norm_grad{eps=0.5, center=false, weight=plain, bias=false, add=true, again=false, sum=false} %2.1 %1 %3 %0 -> bf16[32,16] f32[16] @p #7
%8 = map{f=neg} %7 -> bf16[32,16] @p #8
%9 = quantize{to=e5m2, current=false} %7 %4 %5 -> e5m2[32,16] e5m2[16,32] f32[1] @q #9
write $3 %6.2
result y %6
result dx %8
result dw %7.1
result d %9.1
";
    let (g, count) = quantize_sources::quantize_sources(&text.parse().expect("a graph"));
    assert_eq!(count, Joined { norms: 2, ..Joined::default() });
    flatout_ir::verify::verify(&g).expect("a sound graph");
    let g = flatout_ir::replay::without_dead(&g);
    assert_eq!(g.to_string().parse::<Graph>().expect("its text"), g);
    assert_eq!(
        nodes(&g),
        "%4 = quantize{to=e4m3, current=false, of=norm:0.5:false:plain:false:true} %0 %0 %1 %2 %3 -> e4m3[32,16] e4m3[16,32] f32[1] bf16[32,16]
%5 = map{f=neg} %4.3 -> bf16[32,16]
%8 = quantize{to=e5m2, current=false, of=norm_grad:0.5:false:plain:false:true} %4.3 %1 %5 %0 %6 %7 -> e5m2[32,16] e5m2[16,32] f32[1] bf16[32,16] f32[16]
%9 = map{f=neg} %8.3 -> bf16[32,16]
write $3 %4.2
result y %4
result dx %9
result dw %8.4
result d %8.1"
    );
    // The normed rows themselves are read: they are stored, and quantised from there.
    let read = format!("{text}result also %2\n").parse().expect("a graph");
    let (_, count) = quantize_sources::quantize_sources(&read);
    assert_eq!(count, Joined { norms: 1, ..Joined::default() });
}

/// The gradient of a norm that computes the norm again writes its codes along columns as the last output.
#[test]
fn norms_made_again_are_quantised_by_their_gradient() {
    let text = "slot $0 h bf16[32,16] input zeros
slot $1 w f32[16] weight zeros
slot $2 dy bf16[32,16] input zeros
slot $3 scale f32[1] derived zeros
slot $4 amax f32[1] carry zeros
slot $5 before f32[1] derived zeros
%0 = read{slot=$0} -> bf16[32,16] @p #0
%1 = read{slot=$1} -> f32[16] @p #1
%2 = read{slot=$2} -> bf16[32,16] @p #2
%3 = read{slot=$3} -> f32[1] @p #3
%4 = read{slot=$4} -> f32[1] @p #4
%5 = read{slot=$5} -> f32[1] @p #5
%6 = rms_norm_grad{eps=0.5, center=false, weight=plain, bias=false, add=false, again=true, sum=false} %0 %1 %2 -> bf16[32,16] f32[16] bf16[32,16] @p #6
%7 = quantize{to=e4m3, current=false} %6.2 %5 %5 -> e4m3[32,16] e4m3[16,32] f32[1] @p #7
%8 = quantize{to=e5m2, current=false} %6 %3 %4 -> e5m2[32,16] e5m2[16,32] f32[1] @p #8
result codes %7.1
result dx %6
result dw %6.1
result d %8
";
    let (g, count) = quantize_sources::quantize_sources(&text.parse().expect("a graph"));
    assert_eq!(count, Joined { norms: 1, again: 1, ..Joined::default() });
    flatout_ir::verify::verify(&g).expect("a sound graph");
    let g = flatout_ir::replay::without_dead(&g);
    assert_eq!(g.to_string().parse::<Graph>().expect("its text"), g);
    assert_eq!(
        nodes(&g),
        "%6 = quantize{to=e5m2, current=false, of=norm_grad_again:0.5:false:plain:false:false} %0 %1 %2 %3 %4 %5 -> e5m2[32,16] e5m2[16,32] f32[1] bf16[32,16] f32[16] e4m3[16,32]
result codes %6.5
result dx %6.3
result dw %6.4
result d %6"
    );
}

/// A product writes the activation of its halves in 8 bits, beside the halves, which the gradient reads.
#[test]
fn products_write_gated_activations_in_eight_bits() {
    let text = "slot $0 x e4m3[32,48] input zeros
slot $1 w e4m3[32,48] input zeros
slot $2 x_scale f32[1] derived zeros
slot $3 w_scale f32[1] derived zeros
slot $4 scale f32[1] derived zeros
slot $5 amax f32[1] carry zeros
slot $6 dy bf16[32,16] input zeros
%0 = read{slot=$0} -> e4m3[32,48] @p #0
%1 = read{slot=$1} -> e4m3[32,48] @p #1
%2 = read{slot=$2} -> f32[1] @p #2
%3 = read{slot=$3} -> f32[1] @p #3
%4 = product{ta=false, tb=true, out=bf16, base=false} %0 %1 %2 %3 -> bf16[32,32] @p #4
%5 = slice{axis=1, start=0, len=16} %4 -> bf16[32,16] @p #5
%6 = slice{axis=1, start=16, len=16} %4 -> bf16[32,16] @p #6
%7 = read{slot=$4} -> f32[1] @p #7
%8 = read{slot=$5} -> f32[1] @p #8
%9 = quantize{to=e4m3, current=false, of=gated:silu} %5 %6 %7 %8 -> e4m3[32,16] e4m3[16,32] f32[1] @p #9
%10 = read{slot=$6} -> bf16[32,16] @p #10
%11 = gated_grad{act=silu, again=false, p=0} %5 %6 %10 -> bf16[32,16] bf16[32,16] @p #11
write $5 %9.2
result y %9
result dx %11
";
    let joined = |text: &str| {
        let (g, count) = gated_codes(&text.parse().expect("a graph"), &paper());
        flatout_ir::verify::verify(&g).expect("a sound graph");
        (g, count)
    };
    let (g, count) = joined(text);
    assert_eq!(count, 1);
    assert_eq!(g.to_string().parse::<Graph>().expect("its text"), g);
    assert_eq!(
        nodes(&g),
        "%6 = gated_product{act=silu} %0 %1 %2 %3 %4 %5 -> bf16[32,32] e4m3[32,16] f32[1]
%7 = slice{axis=1, start=0, len=16} %6 -> bf16[32,16]
%8 = slice{axis=1, start=16, len=16} %6 -> bf16[32,16]
%10 = gated_grad{act=silu, again=false, p=0} %7 %8 %9 -> bf16[32,16] bf16[32,16]
write $5 %6.2
result y %6.1
result dx %10"
    );
    // The same values, as the operation is defined by the two that it replaces.
    let values: HashMap<String, Vec<f64>> = [("x", 32 * 48), ("w", 32 * 48), ("dy", 32 * 16)]
        .into_iter()
        .map(|(name, n)| (name.to_string(), (0..n).map(|i| ((i * 7 + 3) % 13) as f64 / 4.0 - 1.5).collect()))
        .chain(
            [("x_scale", 0.5), ("w_scale", 0.25), ("scale", 0.125), ("amax", 0.5)]
                .map(|(n, v)| (n.into(), vec![v])),
        )
        .collect();
    let before: Graph = text.parse().expect("a graph");
    let [want, got] = [&before, &g].map(|g| oracle::run(g, &values));
    assert_eq!(want.results, got.results);
    // The codes along columns would take another kernel, and halves that nothing else reads would not have to be stored.
    assert_eq!(joined(&format!("{text}result t %9.1\n")).1, 0);
    let sole = text.replace(
        "gated_grad{act=silu, again=false, p=0} %5 %6 %10",
        "gated_grad{act=silu, again=false, p=0} %10 %10 %10",
    );
    assert_eq!(joined(&sole).1, 0);
}
