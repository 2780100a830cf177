//! Optional passes, graph text in and graph text out. The text omits keys and paths where they do not matter.

use flatout_ir::cost::cost;
use flatout_ir::ops::product::Compute;
use flatout_ir::oracle::{self, Values};
use flatout_ir::passes::forward::joint_heads;
use flatout_ir::passes::forward::merge;
use flatout_ir::passes::forward::patterns;
use flatout_ir::passes::forward::rope_table;
use flatout_ir::passes::forward::rotated_scores;
use flatout_ir::passes::fuse::epilogues;
use flatout_ir::passes::fuse::regions;
use flatout_ir::passes::fuse::thin_products;
use flatout_ir::passes::gradient::differentiate::differentiate;
use flatout_ir::passes::gradient::one_pass_loss;
use flatout_ir::passes::gradient::recompute;
use flatout_ir::passes::gradient::rejoin;
use flatout_ir::passes::gradient::score_gradients;
use flatout_ir::passes::types::precision;
use flatout_ir::passes::types::tf32;
use flatout_ir::target::paper;
use flatout_ir::{Graph, Launch, OpKind, Options, Precision, Program, Recompute, Role, Update, compile};

/// Parses a graph whose nodes may omit `@path #key`.
fn graph(text: &str) -> Graph {
    let whole = |line: &str| {
        let line = line.trim();
        match (line.starts_with('%'), line.contains(" @")) {
            (true, false) => format!("{line} @p #0\n"),
            (true, true) => format!("{line} #0\n"),
            _ => format!("{line}\n"),
        }
    };
    text.lines().map(whole).collect::<String>().parse().expect("a graph")
}

/// The nodes, writes and results of a graph without paths and keys.
fn nodes(g: &Graph) -> String {
    let line = |l: &str| l.split(" @").next().unwrap_or(l).trim().to_string();
    let kept = g.to_string();
    let kept: Vec<String> =
        kept.lines().filter(|l| !l.starts_with("slot") && !l.contains("= read{")).map(line).collect();
    kept.join("\n")
}

fn slots(g: &Graph) -> String {
    g.to_string().lines().filter(|l| l.starts_with("slot")).collect::<Vec<_>>().join("\n")
}

#[track_caller]
fn same(got: &str, want: &str) {
    let want: Vec<&str> = want.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    assert_eq!(got, want.join("\n"), "\ngot:\n{got}\n");
}

#[test]
fn merge_lays_weights_side_by_side() {
    let g = graph(
        "slot $0 x f32[4,8] input zeros
         slot $1 attn.wq f32[6,8] weight normal(0.02)
         slot $2 attn.wk f32[3,8] weight normal(0.02)
         slot $3 attn.wv f32[3,8] weight normal(0.02)
         %0 = read{slot=$0} -> f32[4,8]
         %1 = read{slot=$1} -> f32[6,8]
         %2 = read{slot=$2} -> f32[3,8]
         %3 = read{slot=$3} -> f32[3,8]
         %4 = product{ta=false, tb=true, out=f32, base=false} %0 %1 -> f32[4,6]
         %5 = product{ta=false, tb=true, out=f32, base=false} %0 %2 -> f32[4,3]
         %6 = product{ta=false, tb=true, out=f32, base=false} %0 %3 -> f32[4,3]
         %7 = reshape{dims=[4 2 3]} %4 -> f32[4,2,3]
         %8 = reshape{dims=[4 1 3]} %5 -> f32[4,1,3]
         %9 = reshape{dims=[4 1 3]} %6 -> f32[4,1,3]
         %10 = attention{scale=1, mask=causal, q=uniform:4, k=uniform:4} %7 %8 %9 -> f32[4,2,3] f32[4,2]
         result o %10",
    );
    let (merged, count) = merge::merge(&g, true, true, &Update::default());
    assert_eq!(count, merge::Merged { qkv: 1, gate_up: 0 });
    same(
        &slots(&merged),
        "slot $0 x f32[4,8] input zeros
         slot $1 attn.wq f32[6,8] weight normal(0.02) part=$4+0
         slot $2 attn.wk f32[3,8] weight normal(0.02) part=$4+48
         slot $3 attn.wv f32[3,8] weight normal(0.02) part=$4+72
         slot $4 attn.wq+wk+wv f32[12,8] weight normal(0.02)",
    );
    same(
        &nodes(&merged),
        "%2 = product{ta=false, tb=true, out=f32, base=false} %0 %1 -> f32[4,12]
         %3 = slice{axis=1, start=0, len=6} %2 -> f32[4,6]
         %4 = slice{axis=1, start=6, len=3} %2 -> f32[4,3]
         %5 = slice{axis=1, start=9, len=3} %2 -> f32[4,3]
         %6 = reshape{dims=[4 2 3]} %3 -> f32[4,2,3]
         %7 = reshape{dims=[4 1 3]} %4 -> f32[4,1,3]
         %8 = reshape{dims=[4 1 3]} %5 -> f32[4,1,3]
         %9 = attention{scale=1, mask=causal, q=uniform:4, k=uniform:4} %6 %7 %8 -> f32[4,2,3] f32[4,2]
         result o %9",
    );
    let (left, count) = merge::merge(&g, false, true, &Update::default());
    assert_eq!((nodes(&left), count), (nodes(&g), merge::Merged::default()));
}

/// A block of two weights applied to an input and then to its own output, each under a scope.
const APPLIED_TWICE: &str = "slot $0 x f32[4,8] input zeros
    slot $1 block.gate f32[8,8] weight normal(0.02)
    slot $2 block.up f32[8,8] weight normal(0.02)
    %0 = read{slot=$0} -> f32[4,8]
    %1 = read{slot=$1} -> f32[8,8] @first
    %2 = product{ta=false, tb=true, out=f32, base=false} %0 %1 -> f32[4,8] @first
    %3 = read{slot=$2} -> f32[8,8] @first
    %4 = product{ta=false, tb=true, out=f32, base=false} %0 %3 -> f32[4,8] @first
    %5 = map{f=mul} %2 %4 -> f32[4,8] @first
    %6 = read{slot=$1} -> f32[8,8] @second
    %7 = product{ta=false, tb=true, out=f32, base=false} %5 %6 -> f32[4,8] @second
    %8 = read{slot=$2} -> f32[8,8] @second
    %9 = product{ta=false, tb=true, out=f32, base=false} %5 %8 -> f32[4,8] @second
    %10 = map{f=mul} %7 %9 -> f32[4,8] @second
    result y %10";

#[test]
fn merge_makes_one_slot_of_weights_that_are_applied_twice() {
    let (merged, count) = merge::merge(&graph(APPLIED_TWICE), true, true, &Update::default());
    assert_eq!(count, merge::Merged { qkv: 0, gate_up: 2 });
    same(
        &slots(&merged),
        "slot $0 x f32[4,8] input zeros
         slot $1 block.gate f32[8,8] weight normal(0.02) part=$3+0
         slot $2 block.up f32[8,8] weight normal(0.02) part=$3+64
         slot $3 block.gate+up f32[16,8] weight normal(0.02)",
    );
    same(
        &nodes(&merged),
        "%2 = product{ta=false, tb=true, out=f32, base=false} %0 %1 -> f32[4,16]
         %3 = slice{axis=1, start=0, len=8} %2 -> f32[4,8]
         %4 = slice{axis=1, start=8, len=8} %2 -> f32[4,8]
         %5 = map{f=mul} %3 %4 -> f32[4,8]
         %7 = product{ta=false, tb=true, out=f32, base=false} %5 %6 -> f32[4,16]
         %8 = slice{axis=1, start=0, len=8} %7 -> f32[4,8]
         %9 = slice{axis=1, start=8, len=8} %7 -> f32[4,8]
         %10 = map{f=mul} %8 %9 -> f32[4,8]
         result y %10",
    );
}

/// A weight that is also read without the others cannot lie beside them.
#[test]
fn merge_skips_weights_not_always_read_together() {
    let one_alone = APPLIED_TWICE
        .replace("%9 = product{ta=false, tb=true, out=f32, base=false} %5 %8", "%9 = map{f=neg} %5")
        .replace("%8 = read{slot=$2} -> f32[8,8] @second", "%8 = map{f=neg} %5 -> f32[4,8] @second");
    let otherwise = APPLIED_TWICE.replace("result y %10", "result y %10\n result w %8");
    for text in [one_alone, otherwise] {
        let g = graph(&text);
        let (left, count) = merge::merge(&g, true, true, &Update::default());
        assert_eq!(count, merge::Merged::default());
        assert_eq!(slots(&left), slots(&g));
    }
}

const BIASED: &str = "slot $0 x f32[4,8] input zeros
    slot $1 gate f32[6,8] weight normal(0.02)
    slot $2 gate_bias f32[6] weight zeros
    slot $3 up f32[6,8] weight normal(0.02)
    slot $4 up_bias f32[6] weight zeros
    %0 = read{slot=$0} -> f32[4,8]
    %1 = read{slot=$1} -> f32[6,8]
    %2 = product{ta=false, tb=true, out=f32, base=false} %0 %1 -> f32[4,6]
    %3 = read{slot=$2} -> f32[6]
    %4 = reshape{dims=[1 6]} %3 -> f32[1,6]
    %5 = broadcast{dims=[4 6]} %4 -> f32[4,6]
    %6 = map{f=add} %2 %5 -> f32[4,6]
    %7 = read{slot=$3} -> f32[6,8]
    %8 = product{ta=false, tb=true, out=f32, base=false} %0 %7 -> f32[4,6]
    %9 = read{slot=$4} -> f32[6]
    %10 = reshape{dims=[1 6]} %9 -> f32[1,6]
    %11 = broadcast{dims=[4 6]} %10 -> f32[4,6]
    %12 = map{f=add} %8 %11 -> f32[4,6]
    %13 = map{f=mul} %6 %12 -> f32[4,6]
    result y %13";

#[test]
fn merge_lays_biases_side_by_side() {
    let (merged, count) = merge::merge(&graph(BIASED), true, true, &Update::default());
    assert_eq!(count, merge::Merged { qkv: 0, gate_up: 1 });
    assert!(slots(&merged).contains("slot $4 up_bias f32[6] weight zeros part=$6+6"), "{}", slots(&merged));
    assert!(slots(&merged).ends_with("slot $6 gate_bias+up_bias f32[12] weight zeros"), "{}", slots(&merged));
    same(
        &nodes(&merged),
        "%2 = product{ta=false, tb=true, out=f32, base=false} %0 %1 -> f32[4,12]
         %4 = reshape{dims=[1 12]} %3 -> f32[1,12]
         %5 = broadcast{dims=[4 12]} %4 -> f32[4,12]
         %6 = map{f=add} %2 %5 -> f32[4,12]
         %7 = slice{axis=1, start=0, len=6} %6 -> f32[4,6]
         %8 = slice{axis=1, start=6, len=6} %6 -> f32[4,6]
         %9 = map{f=mul} %7 %8 -> f32[4,6]
         result y %9",
    );
    // If one product has no bias, the products are merged and the other bias stays in place.
    let one = BIASED.replace("%12 = map{f=add} %8 %11", "%12 = map{f=add} %0 %0");
    let one =
        one.replace("-> f32[4,6]\n    %13 = map{f=mul} %6 %12", "-> f32[4,8]\n    %13 = map{f=mul} %6 %8");
    let (merged, _) = merge::merge(&graph(&one), true, true, &Update::default());
    let text = nodes(&merged);
    assert!(text.contains("slice{axis=1, start=0, len=6} %2") && text.contains("map{f=add} %3"), "{text}");
    assert!(!slots(&merged).contains("gate_bias+up_bias"));
}

/// A bias is rounded to the type of the product it is added to.
#[test]
fn a_bias_follows_its_product() {
    let g = graph(BIASED);
    let (g, _, products) = precision::precision(&g, g.nodes.len());
    assert_eq!(products, 2);
    let text = nodes(&g);
    assert!(
        text.contains("%7 = map{f=cast:bf16} %6 -> bf16[4,6]\n%8 = map{f=add} %3 %7 -> bf16[4,6]"),
        "{text}"
    );
}

/// Rows that the host writes and that are gathered are bf16, like computed states; other inputs stay f32.
#[test]
fn gathered_input_rows_are_bf16() {
    let given = "slot $0 features f32[2,3,4] input zeros
        slot $1 rows i32[5] input zeros
        slot $2 weights f32[5,1] input zeros
        slot $3 table f32[9,4] frozen zeros
        slot $4 others f32[2,3,4] input zeros
        %0 = read{slot=$0} -> f32[2,3,4]
        %1 = slice{axis=0, start=1, len=1} %0 -> f32[1,3,4]
        %2 = reshape{dims=[3 4]} %1 -> f32[3,4]
        %3 = read{slot=$1} -> i32[5]
        %4 = gather{} %2 %3 -> f32[5,4]
        %5 = read{slot=$3} -> f32[9,4]
        %6 = gather{} %5 %3 -> f32[5,4]
        %7 = map{f=add} %4 %6 -> f32[5,4]
        %8 = read{slot=$2} -> f32[5,1]
        result y %7
        result w %8
        %9 = read{slot=$4} -> f32[2,3,4]
        %10 = map{f=silu} %9 -> f32[2,3,4]
        result z %10";
    let g = graph(given);
    let (g, ..) = precision::precision(&g, g.nodes.len());
    let (slots, nodes) = (slots(&g), nodes(&g));
    assert!(slots.contains("features bf16[2,3,4] input"), "{slots}");
    assert!(slots.contains("weights f32[5,1] input"), "{slots}");
    assert!(slots.contains("others f32[2,3,4] input"), "{slots}");
    assert!(nodes.contains("map{f=add} %4 %6 -> bf16[5,4]"), "{nodes}");
}

const BLOCK: &str = "slot $0 x f32[4,2,6] input zeros
    slot $1 r f32[4,2,6] input zeros
    slot $2 w f32[6] weight ones
    slot $3 positions i32[1,4] input zeros
    slot $4 q_norm f32[6] weight ones
    %0 = read{slot=$0} -> f32[4,2,6]
    %1 = read{slot=$1} -> f32[4,2,6]
    %2 = map{f=add} %0 %1 -> f32[4,2,6]
    %3 = read{slot=$2} -> f32[6]
    %4 = rms_norm{eps=0.01, center=false, weight=plain, bias=false, residual=false} %2 %3 -> f32[4,2,6]
    %5 = read{slot=$3} -> i32[1,4]
    %6 = read{slot=$4} -> f32[6]
    %7 = rms_norm{eps=0.01, center=false, weight=plain, bias=false, residual=false} %4 %6 -> f32[4,2,6]
    %8 = rope{freq=100, axis_of_freq=[0 0 0], pairs=half, inverse=false, table=false} %7 %5 -> f32[4,2,6]
    %9 = map{f=silu} %8 -> f32[4,2,6]
    %10 = map{f=mul} %9 %2 -> f32[4,2,6]
    result y %10";

#[test]
fn adjacent_heads_are_rotated_together() {
    let text = |v_start: usize| {
        format!(
            "slot $0 y f32[4,24] input zeros
             slot $1 attn.q_norm f32[4] weight ones
             slot $2 attn.k_norm f32[4] weight ones
             slot $3 positions i32[1,4] input zeros
             %0 = read{{slot=$0}} -> f32[4,24]
             %1 = read{{slot=$1}} -> f32[4]
             %2 = read{{slot=$3}} -> i32[1,4]
             %3 = slice{{axis=1, start=0, len=8}} %0 -> f32[4,8]
             %4 = reshape{{dims=[4 2 4]}} %3 -> f32[4,2,4]
             %5 = qk_norm_rope{{eps=0.01, weight=plain, first=0, freq=100, axis_of_freq=[0 0], pairs=half, table=false}} %4 %1 %2 -> f32[4,2,4]
             %6 = read{{slot=$2}} -> f32[4]
             %7 = slice{{axis=1, start={v_start}, len=4}} %0 -> f32[4,4]
             %8 = reshape{{dims=[4 1 4]}} %7 -> f32[4,1,4]
             %9 = qk_norm_rope{{eps=0.01, weight=plain, first=0, freq=100, axis_of_freq=[0 0], pairs=half, table=false}} %8 %6 %2 -> f32[4,1,4]
             result q %5
             result k %9"
        )
    };
    let (joined, count) = joint_heads::joint_heads(&graph(&text(8)), &Update::default());
    assert_eq!(count, 1);
    same(
        &nodes(&joined),
        "%3 = slice{axis=1, start=0, len=12} %0 -> f32[4,12]
         %4 = reshape{dims=[4 3 4]} %3 -> f32[4,3,4]
         %5 = qk_norm_rope{eps=0.01, weight=plain, first=2, freq=100, axis_of_freq=[0 0], pairs=half, table=false} %4 %2 %1 -> f32[4,3,4]
         %6 = slice{axis=1, start=0, len=2} %5 -> f32[4,2,4]
         %7 = slice{axis=1, start=2, len=1} %5 -> f32[4,1,4]
         result q %6
         result k %7",
    );
    assert!(slots(&joined).contains("attn.q_norm+k_norm f32[8]"), "{}", slots(&joined));
    // With other columns between them they stay separate.
    assert_eq!(joint_heads::joint_heads(&graph(&text(12)), &Update::default()).1, 0);
}

#[test]
fn patterns_join_neighbours() {
    let (joined, count) = patterns::patterns(&graph(BLOCK), true, true);
    assert_eq!(count, patterns::Joined { add_norm: 1, norm_rope: 1, gated: 1 });
    same(
        &nodes(&joined),
        "%5 = rms_norm{eps=0.01, center=false, weight=plain, bias=false, residual=true} %0 %1 %2 -> f32[4,2,6] f32[4,2,6]
         %6 = qk_norm_rope{eps=0.01, weight=plain, first=0, freq=100, axis_of_freq=[0 0 0], pairs=half, table=false} %5 %4 %3 -> f32[4,2,6]
         %7 = gated{act=silu, p=0} %6 %5.1 -> f32[4,2,6]
         result y %7",
    );
    let (left, count) = patterns::patterns(&graph(BLOCK), false, false);
    assert_eq!(count, patterns::Joined::default());
    assert_eq!(left.nodes.len(), graph(BLOCK).nodes.len());
}

#[test]
fn rotations_share_one_table() {
    let (g, served) = rope_table::rope_table(&graph(BLOCK), 32);
    assert_eq!(served, 1);
    assert!(slots(&g).ends_with("slot $5 rope_table.100.6 f32[32,3,2] const rope_table(100)"));
    assert!(nodes(&g).contains("table=true} %7 %5 %8 -> f32[4,2,6]"), "{}", nodes(&g));
}

/// Linear attention of segments of `len` rows, after a rotation.
fn turned(len: usize, pairs: &str, reads: &str) -> Graph {
    graph(&format!(
        "slot $0 a f32[256,2,6] input zeros
         slot $1 v f32[256,1,4] input zeros
         slot $2 positions i32[1,256] input zeros
         slot $3 rope_table.100.6 f32[9,3,2] const rope_table(100)
         %0 = read{{slot=$0}} -> f32[256,2,6] @a
         %1 = read{{slot=$2}} -> i32[1,256] @positions
         %2 = read{{slot=$3}} -> f32[9,3,2] @layer
         %3 = rope{{freq=100, axis_of_freq=[0 0 0], pairs={pairs}, inverse=false, table=true}} %0 %1 %2 -> f32[256,2,6] @layer
         %4 = read{{slot=$1}} -> f32[256,1,4] @v
         %5 = linear_attention{{scale=1, mask=full, q=uniform:{len}, k=queries}} %3 %4 -> f32[256,2,4] @layer
         result o %5{reads}"
    ))
}

#[test]
fn linear_attention_rotates_its_queries() {
    let (joined, count) = rotated_scores::rotated_scores(&turned(64, "interleaved", ""));
    assert_eq!(count, 1);
    same(
        &nodes(&joined),
        "%4 = linear_attention{scale=1, mask=full, q=uniform:64, k=queries, rotary=table:100} %0 %3 %1 %2 -> f32[256,2,4]
         result o %4",
    );
    // The text parses back to an equal graph.
    assert_eq!(joined.to_string().parse::<Graph>().unwrap(), joined);
    // Non-interleaved pairs, segments of several tiles and rotations with other readers stay.
    for g in
        [turned(64, "half", ""), turned(256, "interleaved", ""), turned(64, "interleaved", "\n result r %3")]
    {
        assert_eq!(rotated_scores::rotated_scores(&g), (flatout_ir::replay::without_dead(&g), 0));
    }
}

/// The gradient of latents that attend to themselves, their other gradient, and the ReLU that computed them.
fn latents(slope_of: &str) -> Graph {
    graph(&format!(
        "slot $0 pre f32[6,8] input zeros
         slot $1 v f32[6,1,4] input zeros
         slot $2 positions i32[1,6] input zeros
         slot $3 do f32[6,2,4] input zeros
         slot $4 other f32[6,8] input zeros
         %0 = read{{slot=$0}} -> f32[6,8] @pre
         %1 = map{{f=relu}} %0 -> f32[6,8] @layer
         %2 = reshape{{dims=[6 2 4]}} %1 -> f32[6,2,4] @layer
         %3 = read{{slot=$1}} -> f32[6,1,4] @v
         %4 = read{{slot=$2}} -> i32[1,6] @positions
         %5 = read{{slot=$3}} -> f32[6,2,4] @do
         %6 = read{{slot=$4}} -> f32[6,8] @other
         %7 = linear_attention_grad{{scale=1, mask=full, q=uniform:3, k=queries, rotary=angles:100}} %2 %3 %4 %5 -> f32[6,2,4] f32[6,1,4] @layer
         %8 = reshape{{dims=[6 8]}} %7 -> f32[6,8] @layer
         %9 = map{{f=add}} %6 %8 -> f32[6,8] @layer
         %10 = map{{f=step}} {slope_of} -> f32[6,8] @layer
         %11 = map{{f=mul}} %9 %10 -> f32[6,8] @layer
         result d %11
         result dv %7.1"
    ))
}

#[test]
fn linear_attention_gradients_are_written_as_sums() {
    let of_relu = "%7 = reshape{dims=[6 2 4]} %6 -> f32[6,2,4]
         %8 = linear_attention_grad{scale=1, mask=full, q=uniform:3, k=queries, rotary=angles:100, accumulate=relu} %2 %3 %4 %5 %7 -> f32[6,2,4] f32[6,1,4]
         %9 = reshape{dims=[6 8]} %8 -> f32[6,8]
         result d %9
         result dv %8.1";
    for slope_of in ["%0", "%1"] {
        let g = latents(slope_of);
        let (joined, count) = score_gradients::score_gradients(&g);
        assert_eq!(count, 1);
        let text = nodes(&joined);
        assert!(text.starts_with("%1 = map{f=relu}"), "{text}");
        same(&text.lines().skip(2).collect::<Vec<_>>().join("\n"), of_relu);
        assert_eq!(joined.to_string().parse::<Graph>().unwrap(), joined);
        let values: Values = g
            .slots
            .iter()
            .map(|s| {
                let value = |i: usize| {
                    if s.path == "positions" { i as f64 } else { (i * 37 % 23) as f64 / 8.0 - 1.3 }
                };
                (s.path.clone(), (0..s.ty.elements()).map(value).collect())
            })
            .collect();
        let [before, after] = [&g, &joined].map(|g| oracle::run(g, &values).results);
        for (name, before) in &before {
            let off = before.iter().zip(&after[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off < 1e-6, "{name} is off by {off}");
        }
    }
    // The slope at another argument stays.
    let (joined, count) = score_gradients::score_gradients(&latents("%6"));
    assert_eq!(count, 1);
    assert!(
        nodes(&joined).contains("accumulate=base}") && nodes(&joined).contains("f=step"),
        "{}",
        nodes(&joined)
    );
}

/// A head and its loss, differentiated.
fn trained() -> flatout_ir::passes::gradient::differentiate::Trained {
    differentiate(&graph(
        "slot $0 layers.0.w f32[8,6] weight normal(0.02)
         slot $1 x f32[4,6] input zeros
         slot $2 head f32[5,8] weight normal(0.02)
         slot $3 target i32[4] input zeros
         slot $4 weight f32[4] input zeros
         %0 = read{slot=$0} -> f32[8,6] @layers.0.w
         %1 = read{slot=$1} -> f32[4,6] @x
         %2 = product{ta=false, tb=true, out=f32, base=false} %1 %0 -> f32[4,8] @layers.0
         %3 = rms_norm{eps=0.01, center=false, weight=none, bias=false, residual=false} %2 -> f32[4,8] @layers.0
         %4 = read{slot=$2} -> f32[5,8] @head
         %5 = read{slot=$3} -> i32[4] @target
         %6 = read{slot=$4} -> f32[4] @weight
         %7 = head_loss{} %3 %4 %5 %6 -> f32[1] f32[4] f32[4] f32[4] f32[4,5] @head
         %8 = reduce{axis=0, by=sum} %6 -> f32[1] @head
         result loss %7
         result weight %8",
    ))
}

#[test]
fn loss_and_gradient_take_one_pass() {
    let (one, count) = one_pass_loss::one_pass_loss(&trained());
    assert_eq!(count, 1);
    let text = nodes(&flatout_ir::replay::without_dead(&one.graph));
    assert!(
        text.contains("head_loss_train{base=false} %3 %4 %5 %6 -> f32[1] f32[4] f32[4] f32[4,8] f32[5,8]"),
        "{text}"
    );
    assert!(!text.contains("head_loss_grad") && !text.contains("head_loss{}"), "{text}");
}

#[test]
fn sums_fuse_into_their_last_term() {
    let (one, _) = one_pass_loss::one_pass_loss(&trained());
    let (g, folded) = epilogues::epilogues(&flatout_ir::replay::without_dead(&one.graph));
    assert_eq!(folded, 2);
    same(
        &nodes(&g),
        "%2 = product{ta=false, tb=true, out=f32, base=false} %1 %0 -> f32[4,8]
         %3 = rms_norm{eps=0.01, center=false, weight=none, bias=false, residual=false} %2 -> f32[4,8]
         %8 = head_loss_train{base=true} %3 %4 %5 %6 %7 -> f32[1] f32[4] f32[4] f32[4,8] f32[5,8]
         %9 = reduce{axis=0, by=sum} %6 -> f32[1]
         %10 = rms_norm_grad{eps=0.01, center=false, weight=none, bias=false, add=false, again=false, sum=false} %2 %8.3 -> f32[4,8]
         %12 = product{ta=true, tb=false, out=f32, base=true} %10 %1 %11 -> f32[8,6]
         %14 = map{f=add} %13 %8 -> f32[1]
         %16 = map{f=add} %15 %9 -> f32[1]
         write $5 %12
         write $6 %8.4
         write $7 %14
         write $8 %16",
    );
}

/// An adapter's three products and their dropouts, and the other gradient of x.
fn adapted(dtype: &str, rank: usize, width: usize) -> Graph {
    let text = "slot $0 x X input zeros
         slot $1 a A weight zeros
         slot $2 du U input zeros
         slot $3 dx X input zeros
         slot $4 da S carry zeros
         slot $5 rng i32[3] input zeros
         slot $6 rows i32[6,2] input zeros
         %0 = read{slot=$0} -> X
         %1 = read{slot=$1} -> A
         %2 = read{slot=$5} -> i32[3]
         %3 = read{slot=$6} -> i32[6,2]
         %4 = dropout{p=0.1} %0 %2 %3 -> X
         %5 = product{ta=false, tb=true, out=TYPE, base=false} %4 %1 -> U
         %6 = read{slot=$2} -> U
         %7 = dropout{p=0.1} %0 %2 %3 -> X
         %8 = product{ta=true, tb=false, out=f32, base=false} %6 %7 -> S
         %9 = read{slot=$4} -> S
         %10 = map{f=add} %9 %8 -> S
         %11 = product{ta=false, tb=false, out=TYPE, base=false} %6 %1 -> X
         %12 = dropout{p=0.1} %11 %2 %3 -> X
         %13 = read{slot=$3} -> X
         %14 = map{f=add} %13 %12 -> X
         write $4 %10
         result u %5
         result dx %14";
    let types = [
        ("X", format!("{dtype}[6,{width}]")),
        ("A", format!("{dtype}[{rank},{width}]")),
        ("U", format!("{dtype}[6,{rank}]")),
        ("S", format!("f32[{rank},{width}]")),
    ];
    let text = text.replace("TYPE", dtype);
    graph(&types.iter().fold(text, |text, (name, ty)| text.replace(name, ty)))
}

#[test]
fn thin_products_fuse_dropout() {
    let (joined, count) = thin_products::thin_products(&adapted("bf16", 8, 24), &paper());
    assert_eq!(count, 3);
    let (g, folded) = epilogues::epilogues(&joined);
    assert_eq!(folded, 2);
    same(
        &nodes(&g),
        "%4 = thin_product{form=down, p=0.1, out=bf16, base=false} %0 %1 %2 %3 -> bf16[6,8]
         %7 = thin_product{form=weight, p=0.1, out=f32, base=true} %5 %0 %6 %2 %3 -> f32[8,24]
         %9 = thin_product{form=up, p=0.1, out=bf16, base=true} %5 %1 %8 %2 %3 -> bf16[6,24]
         write $4 %7
         result u %4
         result dx %9",
    );

    let joins = |g: &Graph| thin_products::thin_products(g, &paper()).1;
    for (dtype, rank, width) in [("f32", 8, 24), ("bf16", 12, 24), ("bf16", 72, 96), ("bf16", 8, 20)] {
        assert_eq!(joins(&adapted(dtype, rank, width)), 0, "{dtype} [{rank}, {width}]");
    }
    // A dropout with another reader stays.
    let text = adapted("bf16", 8, 24).to_string();
    assert_eq!(joins(&text.replace("result u %5", "result u %4").parse().expect("a graph")), 2);
    let mut without = paper();
    without.kernels.retain(|row| row.op != OpKind::ThinProduct);
    let as_it_was = adapted("bf16", 8, 24);
    assert_eq!(thin_products::thin_products(&as_it_was, &without), (as_it_was, 0));
}

#[test]
fn thin_products_add_to_large_tensors_themselves() {
    let sums = |rows: usize, rank: usize, weight: &str, tb: bool| {
        let text = format!(
            "slot $0 u bf16[{rows},{rank}] input zeros
             slot $1 b bf16{weight} weight zeros
             slot $2 y bf16[{rows},4096] input zeros
             %0 = read{{slot=$0}} -> bf16[{rows},{rank}]
             %1 = read{{slot=$1}} -> bf16{weight}
             %2 = read{{slot=$2}} -> bf16[{rows},4096]
             %3 = product{{ta=false, tb={tb}, out=bf16, base=true}} %0 %1 %2 -> bf16[{rows},4096]
             result y %3"
        );
        let (g, replaced) = thin_products::thin_sums(&graph(&text), &paper());
        (
            nodes(&g).contains("thin_product{form=out") as usize
                + 2 * nodes(&g).contains("{form=up") as usize,
            replaced,
        )
    };
    assert_eq!(sums(4096, 16, "[4096,16]", true), (1, 1));
    assert_eq!(sums(4096, 16, "[16,4096]", false), (2, 1));
    // In the cache, or of a rank without a kernel, products stay.
    assert_eq!(sums(2048, 16, "[4096,16]", true), (0, 0));
    assert_eq!(sums(4096, 72, "[4096,72]", true), (0, 0));
    assert_eq!(sums(4096, 12, "[4096,12]", true), (0, 0));
}

#[test]
fn recompute_copies_next_to_the_use() {
    let t = trained();
    let count = |how: Recompute, op: &str| {
        let (g, again) = recompute::recompute(&t.graph, t.forward, how, None, false);
        (nodes(&g).matches(&format!("= {op}{{")).count(), again)
    };
    assert_eq!(count(Recompute::None, "rms_norm"), (1, 0));
    assert_eq!(count(Recompute::Cheap, "rms_norm"), (2, 1));
    // Outside the layer, the head keeps its input: the normed rows cross the layer's boundary.
    assert_eq!(count(Recompute::Full, "product").0, 3);
}

#[test]
fn gradients_compute_recomputed_values() {
    let g = graph(
        "slot $0 gate f32[6,8] input zeros
         slot $1 up f32[6,8] input zeros
         slot $2 d f32[6,4] input zeros
         slot $3 w f32[8,4] weight zeros
         %0 = read{slot=$0} -> f32[6,8]
         %1 = read{slot=$1} -> f32[6,8]
         %2 = gated{act=silu, p=0} %0 %1 -> f32[6,8]
         %3 = read{slot=$3} -> f32[8,4]
         %4 = product{ta=false, tb=false, out=f32, base=false} %2 %3 -> f32[6,4]
         %5 = read{slot=$2} -> f32[6,4]
         %6 = gated{act=silu, p=0} %0 %1 -> f32[6,8]
         %7 = product{ta=true, tb=false, out=f32, base=false} %6 %5 -> f32[8,4]
         %8 = product{ta=false, tb=true, out=f32, base=false} %5 %3 -> f32[6,8]
         %9 = gated_grad{act=silu, again=false, p=0} %0 %1 %8 -> f32[6,8] f32[6,8]
         result y %4
         result dw %7
         result d_gate %9",
    );
    let (joined, count) = rejoin::rejoin(&g);
    assert_eq!(count, 1);
    let text = nodes(&joined);
    assert_eq!(text.matches("= gated{").count(), 1, "{text}");
    assert!(
        text.contains("%7 = gated_grad{act=silu, again=true, p=0} %0 %1 %6 -> f32[6,8] f32[6,8] f32[6,8]"),
        "{text}"
    );
    assert!(text.contains("%8 = product{ta=true, tb=false, out=f32, base=false} %7.2 %5"), "{text}");
}

/// y = norm(x + r) w, and its gradients. The norm is recomputed for the gradient of w, before the norm's own gradient.
const NORM_AGAIN: &str = "slot $0 x f32[6,8] input zeros
     slot $1 r f32[6,8] input zeros
     slot $2 g f32[8] weight zeros
     slot $3 b f32[8] weight zeros
     slot $4 w f32[8,4] weight zeros
     slot $5 d f32[6,4] input zeros
     %0 = read{slot=$0} -> f32[6,8]
     %1 = read{slot=$1} -> f32[6,8]
     %2 = read{slot=$2} -> f32[8]
     %3 = read{slot=$3} -> f32[8]
     %4 = read{slot=$4} -> f32[8,4]
     %5 = rms_norm{eps=1e-5, center=true, weight=plain, bias=true, residual=true} %0 %1 %2 %3 -> f32[6,8] f32[6,8]
     %6 = product{ta=false, tb=false, out=f32, base=false} %5 %4 -> f32[6,4]
     %7 = read{slot=$5} -> f32[6,4]
     %8 = product{ta=false, tb=true, out=f32, base=false} %7 %4 -> f32[6,8]
     %9 = rms_norm{eps=1e-5, center=true, weight=plain, bias=true, residual=false} %5.1 %2 %3 -> f32[6,8]
     %10 = product{ta=true, tb=false, out=f32, base=false} %9 %7 -> f32[8,4]
     %11 = rms_norm_grad{eps=1e-5, center=true, weight=plain, bias=true, add=false, again=false, sum=false} %5.1 %2 DY -> f32[6,8] f32[8] f32[8]
     result y %6
     result dw %10
     result dx %11
     result dg %11.1";

#[test]
fn a_recomputed_norm_runs_in_its_gradient() {
    let g = graph(&NORM_AGAIN.replace("DY", "%8"));
    let (joined, count) = rejoin::rejoin(&g);
    assert_eq!(count, 1);
    let text = nodes(&joined);
    assert_eq!(text.matches("= rms_norm{").count(), 1, "{text}");
    assert!(text.contains("again=true, sum=false} %5.1 %2 %8 %3 ->"), "{text}");
    assert!(text.contains("%10 = product{ta=true, tb=false, out=f32, base=false} %9.3 %7"), "{text}");
    // A value computed from the norm enters the norm's gradient, which would be a cycle.
    let waits = NORM_AGAIN.replace("DY", "%9");
    assert_eq!(rejoin::rejoin(&graph(&waits)).1, 0);
}

#[test]
fn precision_narrows_products_and_keeps_sums_wide() {
    let t = trained();
    let (g, _, products) = precision::precision(&t.graph, t.forward);
    assert_eq!(
        products, 2,
        "forward, and the weight gradient: nothing is differentiated below the first weight"
    );
    let text = nodes(&g);
    assert!(text.contains("product{ta=false, tb=true, out=bf16, base=false}"), "{text}");
    assert!(text.contains("product{ta=true, tb=false, out=f32, base=false}"), "{text}");
    assert!(slots(&g).contains("bf16.layers.0.w bf16[8,6] derived"), "{}", slots(&g));
}

#[test]
fn elementwise_neighbours_become_one_region() {
    let g = graph(
        "slot $0 x f32[3,5] input zeros
         slot $1 y f32[1,5] input zeros
         %0 = read{slot=$0} -> f32[3,5]
         %1 = map{f=square} %0 -> f32[3,5]
         %2 = read{slot=$1} -> f32[1,5]
         %3 = broadcast{dims=[3 5]} %2 -> f32[3,5]
         %4 = map{f=mul} %1 %3 -> f32[3,5]
         %5 = reduce{axis=1, by=sum} %4 -> f32[3,1]
         %6 = map{f=exp} %5 -> f32[3,1]
         result a %4
         result b %6",
    );
    let (g, gathered) = regions::regions(&g);
    assert_eq!(gathered, regions::Gathered { regions: 1, nodes: 2, single: 1 });
    let text = nodes(&g);
    assert!(text.contains("result a %3\nresult b %5"), "{text}");
    assert!(!text.contains("\n%4 = map{f=mul}"), "{text}");
    assert_eq!(g.nodes.iter().filter(|n| n.op.name() == "region").count(), 1);
    let again: Graph = g.to_string().parse().expect("a region's text parses");
    assert_eq!(again, g);
}

#[test]
fn tf32_is_a_mode_of_products_and_of_the_head() {
    let g = graph(
        "slot $0 x f32[4,8] input zeros
         slot $1 w f32[6,8] weight normal(0.02)
         slot $2 target i32[4] input zeros
         slot $3 weight f32[4] input zeros
         %0 = read{slot=$0} -> f32[4,8]
         %1 = read{slot=$1} -> f32[6,8]
         %2 = read{slot=$2} -> i32[4]
         %3 = read{slot=$3} -> f32[4]
         %4 = product{ta=false, tb=true, out=f32, base=false} %0 %1 -> f32[4,6]
         %5 = head_loss{} %0 %1 %2 %3 -> f32[1] f32[4] f32[4] f32[4] f32[4,6]
         result y %4
         result loss %5",
    );
    let (rounding, count) = tf32::tf32(&g);
    assert_eq!(count, 2);
    same(
        &nodes(&rounding),
        "%4 = product{ta=false, tb=true, out=f32, base=false, compute=tf32} %0 %1 -> f32[4,6]
         %5 = head_loss{compute=tf32} %0 %1 %2 %3 -> f32[1] f32[4] f32[4] f32[4] f32[4,6]
         result y %4
         result loss %5",
    );
    assert_eq!(rounding.to_string().parse::<Graph>().as_ref(), Ok(&rounding));

    // The stored product is f32; its operands lose everything beyond 10 bits of mantissa.
    let x = 1.0 + 2f64.powi(-12);
    let values = Values::from([("x".into(), vec![x; 32]), ("w".into(), vec![1.0; 48])]);
    let run = |g: &Graph| oracle::run(g, &values).results["y"][0];
    assert_eq!((run(&g), run(&rounding)), (8.0 * x, 8.0));

    let programs = [Program { role: Role::Eval, graph: g }];
    let options = Options { precision: Precision::Tf32, ..Options::default() };
    let mut target = paper();
    let plans = compile(&programs, &target, &options).expect("paper has the mode");
    let modes = |l: &Launch| l.op.compute() == Some(Compute::Tf32);
    assert_eq!(plans.plans[0].launches.iter().filter(|l| modes(l)).count(), 2);
    let fast = cost(&plans.plans[0], &target).roofline_seconds;
    target.rates.tf32_flops = Some(1e3);
    assert!(cost(&plans.plans[0], &target).roofline_seconds > fast);
    target.rates.tf32_flops = None;
    let refusal = compile(&programs, &target, &options).unwrap_err();
    assert!(refusal.0.contains("paper does not multiply in tf32"), "{refusal}");
}
