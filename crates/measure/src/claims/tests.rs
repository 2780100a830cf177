use std::collections::HashSet;

use super::*;
use flatout_train::recipes;

/// The data with one claim, whose own lines are given.
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
    for (lines, said) in [
        ("verdict = \"measured\"", "measured, and no figure is named"),
        ("verdict = \"measured\"\nfigures = [\"other\"]", "there is no figure `other`"),
        ("verdict = \"impossible\"\nwhy = \"so\"", "impossible, and no arithmetic"),
        ("verdict = \"impossible\"\narithmetic = \"q > 7\"", "its arithmetic does not hold"),
        ("verdict = \"not_active\"", "not active without a reason"),
        ("verdict = \"not_yet\"", "not yet without a reason"),
        ("why = \"so\"", "missing field `verdict`"),
    ] {
        let error = one(lines).map(|_| ()).unwrap_err();
        assert!(error.contains(said), "{lines}: {error}");
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

/// The guides' claims, counted from the guides: a row that is lost or added is noticed.
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
