use std::collections::HashSet;

use super::*;
use flatout_ir::Target;
use flatout_report::words::count;
use flatout_train::recipes;
use flatout_train::resolve::compile;
use flatout_train::resolve::fit::{Fit, fit};

/// Data with one claim that ends in the given lines.
fn one(lines: &str) -> Result<Claims, String> {
    read(&format!(
        "[[guide]]\nname = \"g\"\nabout = \"\"\n\
         [[figure]]\nname = \"known\"\nvalue = \"2x\"\nmachine = \"\"\ncommand = \"\"\n\
         [[figure]]\nname = \"open\"\nmachine = \"\"\ncommand = \"measure\"\n\
         [[quantity]]\nname = \"q\"\nformula = \"2 * 3\"\nunit = \"\"\nabout = \"\"\n\
         [[claim]]\nsystem = \"g\"\ntopic = \"t\"\nclaim = \"c\"\nkind = \"expected\"\nswitch = \"\"\n{lines}"
    ))
}

#[test]
fn a_verdict_needs_its_reason() {
    for (lines, message) in [
        ("verdict = \"measured\"", "measured, and no figure is named"),
        ("verdict = \"measured\"\nfigures = [\"other\"]", "there is no figure `other`"),
        ("verdict = \"impossible\"\nwhy = \"so\"", "impossible, and no arithmetic"),
        ("verdict = \"impossible\"\narithmetic = \"q > 7\"", "its arithmetic does not hold"),
        ("verdict = \"not_active\"", "not active without a reason"),
        ("verdict = \"not_yet\"", "not yet without a reason"),
        ("why = \"so\"", "missing field `verdict`"),
    ] {
        let error = one(lines).map(|_| ()).unwrap_err();
        assert!(error.contains(message), "{lines}: {error}");
    }
}

#[test]
fn a_claim_waits_for_its_figure() {
    let verdict = |figures: &str| {
        let claims = one(&format!("verdict = \"measured\"\nfigures = {figures}")).unwrap();
        (claims.claims[0].verdict, claims.claims[0].pending.len())
    };
    assert_eq!(verdict("[\"known\"]"), (Verdict::Measured, 0));
    assert_eq!(verdict("[\"open\"]"), (Verdict::NotYet, 1));
    assert_eq!(verdict("[\"open\", \"known\"]"), (Verdict::Measured, 1));
}

#[test]
fn arithmetic_uses_quantities_and_cards() {
    let claims = one("verdict = \"impossible\"\narithmetic = \"q * 12 > rtx3090.bf16_tflops\"").unwrap();
    let compared = claims.claims[0].arithmetic.as_ref().unwrap();
    assert_eq!((compared.left, compared.right), (72.0, 71.0));
}

/// The numbers were counted in the guides, so that a row that is lost or added is noticed.
#[test]
fn every_claim_of_every_guide_is_judged_once() {
    let claims = all();
    let counted: Vec<(&str, usize)> =
        claims.guides.iter().map(|guide| (guide.name.as_str(), of(&guide.name).unwrap().len())).collect();
    assert_eq!(counted, [("fvlm", 49), ("bdh", 55), ("gemma", 55), ("qwen", 35), ("pretrain", 85)]);
    let named: HashSet<(&str, &str)> =
        claims.claims.iter().map(|claim| (claim.system.as_str(), claim.topic.as_str())).collect();
    assert_eq!(named.len(), claims.claims.len());
}

#[test]
fn every_impossible_claim_has_arithmetic_that_holds() {
    let impossible = all().claims.iter().filter(|claim| claim.verdict == Verdict::Impossible);
    for claim in impossible {
        let compared = claim.arithmetic.as_ref().expect("arithmetic");
        assert!(compared.holds, "{}, {}: {}", claim.system, claim.topic, compared.text);
    }
}

/// Sizes of the model in the data are those of the recipe.
#[test]
fn quantities_of_the_recipe_are_its_own() {
    let config = recipes::resolve("pretrain-226m", &[], &[]).unwrap();
    let quantity = |name: &str| all().quantities.iter().find(|q| q.name == name).expect(name).value;
    assert_eq!(quantity("pretrain_parameters"), config.model.parameters() as f64);
}

/// `flatout plan RECIPE --gpu GPU WORDS`.
fn planned(recipe: &str, gpu: &str, words: &str) -> Fit {
    let words: Vec<String> = words.split_whitespace().map(String::from).collect();
    let config = recipes::resolve(recipe, &[], &words).unwrap();
    // Without timings of such a GPU that this machine may have kept.
    let target = gpus::target(gpus::find(gpu).unwrap(), false);
    fit(&config, &target).unwrap()
}

/// The arena of `pretrain-226m` in BF16, and bytes of some of its categories.
fn pretrain(words: &str) -> (usize, impl Fn(&[&str]) -> usize + use<>) {
    let plans = planned("pretrain-226m", "h200", &format!("precision=bf16 {words}")).compiled.plans;
    let categories = plans.categories();
    (plans.arena_bytes, move |names: &[&str]| names.iter().map(|name| categories[name]).sum())
}

fn gb(bytes: usize) -> String {
    format!("{:.2}", bytes as f64 / 1e9)
}

/// Recomputes every figure that is arithmetic on plans.
#[test]
fn figures_of_plans_are_what_plan_prints() {
    let (bytes, of) = pretrain("micro_batch=8");
    let activations = |recompute: &str| {
        let (_, of) = pretrain(&format!("micro_batch=8 recompute={recompute}"));
        gb(of(&["activations"]))
    };
    let rows = |rows: usize| gb(pretrain(&format!("micro_batch={rows}")).0);
    let untied = pretrain("micro_batch=8 model.tied=false").0;
    let parameters = |words: &str| planned("pretrain-226m", "h200", words).compiled.parameters;
    let more_heads = "micro_batch=8 precision=bf16 model.kv_heads=12";
    let largest = |recompute: &str| {
        planned("pretrain-226m", "rtx5090", &format!("precision=bf16 recompute={recompute}")).largest.unwrap()
    };
    let tiny = |words: &[String]| {
        let config = recipes::resolve("tiny", &[], words).unwrap();
        let target = Target { cores: 2, ..compile::target() };
        compile::compile(&config, &target).unwrap().plans.arena_bytes as f64 / 1e6
    };
    let flash = tiny(&[]);
    let gemma = planned("gemma3-1b-pairs", "rtx3090", "micro_batch=8").compiled.plans;
    let of_gemma = gemma.categories();
    let trained: usize = ["parameters", "gradients", "optimizer"].iter().map(|name| of_gemma[name]).sum();
    let with_32 = |precision: &str| {
        let words = format!("train.batch=32 train.micro_batch=32 precision={precision}");
        let bytes = planned("pretrain-226m", "h200", &words).compiled.plans.arena_bytes;
        format!("{:.1}", bytes as f64 / (1u64 << 30) as f64)
    };
    let made = [
        (
            "plan",
            format!(
                "226.5M in BF16, 8 rows: {} GB: parameters {} (FP32 and a BF16 copy), gradients {}, moments {}, activations {}, \
                 workspace {}",
                gb(bytes),
                gb(of(&["parameters"])),
                gb(of(&["gradients"])),
                gb(of(&["optimizer"])),
                gb(of(&["activations"])),
                gb(of(&["workspace"]))
            ),
        ),
        (
            "plan-recompute",
            format!(
                "activations at 8 rows: {} GB with recompute=none, {} with cheap, {} with full",
                activations("none"),
                activations("cheap"),
                activations("full")
            ),
        ),
        (
            "plan-rows",
            format!("the plan with 16, 8 and 4 rows at once: {}, {} and {} GB", rows(16), rows(8), rows(4)),
        ),
        (
            "plan-arena",
            format!(
                "memory planned before the first step: {} GB at 8 rows, {} without sharing between buffers",
                gb(bytes),
                gb(pretrain("micro_batch=8 memory_plan=off").0)
            ),
        ),
        (
            "plan-tied",
            format!(
                "{} parameters fewer than untied; training takes {} GB less (18 bytes a parameter)",
                count(parameters("model.tied=false") - parameters("")),
                gb(untied - bytes)
            ),
        ),
        (
            "plan-batch",
            format!("an update of 8 rows and one of 64, 8 at once: the same {} bytes", count(bytes as u64)),
        ),
        (
            "plan-kv-heads",
            format!(
                "4 key heads instead of 12: {:.1}M parameters fewer, {} GB instead of {} at 8 rows",
                (parameters(more_heads) - parameters("")) as f64 / 1e6,
                gb(bytes),
                gb(planned("pretrain-226m", "h200", more_heads).compiled.plans.arena_bytes)
            ),
        ),
        (
            "maximising",
            format!(
                "the largest micro-batch that fits by arithmetic: {} rows on 32 GB, {} with recompute=full",
                largest("cheap"),
                largest("full")
            ),
        ),
        (
            "tiny-attention",
            format!(
                "`tiny` in FP32 on the CPU: the plan with naive attention takes {:.0} MB more than the {flash:.0} MB with flash",
                tiny(&["attention=naive".into()]) - flash
            ),
        ),
        (
            "plan-gemma",
            format!(
                "Gemma-3-1B with DoRA, 8 pairs of 512 at once: {} GB: frozen weights {}, activations {}, adapters with their \
                 moments and the gradients at the peak {}",
                gb(gemma.arena_bytes),
                gb(of_gemma["frozen"]),
                gb(of_gemma["activations"]),
                gb(trained)
            ),
        ),
        (
            "fp8-memory",
            format!(
                "the plan with 32 rows at once: {} GiB in FP8, {} in BF16, as codes along columns are made again in the \
                 backward pass",
                with_32("fp8"),
                with_32("bf16")
            ),
        ),
    ];
    // Where updates consist of one micro-batch, gradients overlay activations; accumulation keeps their sums.
    let more = bytes - pretrain("micro_batch=8 train.batch=8").0;
    assert!(more > 0 && more < 4 * 226_546_432, "accumulation takes {more} bytes");
    for (name, made) in &made {
        println!("{name}: {made}");
    }
    for (name, made) in &made {
        assert_eq!(all().figure(name).unwrap().value.as_ref(), Some(made), "{name}");
    }
    let of_plans = all().figures.iter().filter(|figure| figure.command.starts_with("flatout plan"));
    for figure in of_plans {
        assert!(made.iter().any(|(name, _)| *name == figure.name), "{} is not recomputed", figure.name);
    }
}

/// A figure that no claim shows, or a quantity that no arithmetic uses, is left over from an edit.
#[test]
fn nothing_is_left_over() {
    let claims = all();
    let shown: String =
        include_str!("claims.toml").lines().filter(|line| line.starts_with("figures = ")).collect();
    for name in claims.figures.iter().map(|figure| &figure.name) {
        assert!(shown.contains(&format!("\"{name}\"")), "no claim has the figure {name}");
    }
    let formulas: String = claims.quantities.iter().map(|q| format!(" {} ", q.formula)).collect();
    let sums: String =
        claims.claims.iter().flat_map(|c| &c.arithmetic).map(|c| format!(" {} ", c.text)).collect();
    for quantity in &claims.quantities {
        assert!((formulas.clone() + &sums).contains(&quantity.name), "nothing uses {}", quantity.name);
    }
}

#[test]
fn an_unknown_guide_is_named() {
    assert_eq!(
        of("gpt").unwrap_err().0,
        "there is no guide `gpt`; there are fvlm, bdh, gemma, qwen, pretrain"
    );
}

/// `flatout claims > docs/results/claims.md` after a change of the data.
#[test]
fn the_page_is_up_to_date_and_whole() {
    let page = page::page(all(), None);
    for claim in &all().claims {
        let claimed = claim.claim.replace('|', "\\|");
        let row = format!("| {} | {claimed}", claim.topic.replace('|', "\\|"));
        let verdict = format!("| {} |", claim.verdict.word());
        let rows = page.lines().filter(|line| line.starts_with(&row) && line.contains(&verdict));
        assert!(rows.count() > 0, "{}, {} is not on the page", claim.system, claim.topic);
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/claims.md");
    let written = std::fs::read_to_string(path).expect("docs/results/claims.md");
    assert!(
        written == page,
        "docs/results/claims.md is not the page of the data: flatout claims > docs/results/claims.md"
    );
}
