//! The claims of five optimisation guides, each with a verdict.
//!
//! `claims/claims.toml` is the data: the claims as the guides make them, a verdict beside each, the figures measured
//! here with the machine and the command, and the quantities that the arithmetic of verdicts uses. Nothing on the page is
//! computed elsewhere, so a new measurement is a line of the data.

use std::collections::HashMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use flatout_train::UserError;
use flatout_train::device::gpus;

pub mod arithmetic;
pub mod page;

use arithmetic::Comparison;

/// The whole data, with the arithmetic evaluated.
#[derive(Debug, Serialize)]
pub struct Claims {
    pub guides: Vec<Guide>,
    pub figures: Vec<Figure>,
    pub quantities: Vec<Quantity>,
    pub claims: Vec<Claim>,
}

/// One of the guides.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Guide {
    pub name: String,
    /// The model that its system trains.
    pub about: String,
}

/// A figure measured here, or the command that will measure it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    pub name: String,
    /// The measured value; none if it is not measured yet.
    pub value: Option<String>,
    pub machine: String,
    /// The command that printed it, or would.
    pub command: String,
}

/// A number that verdicts are computed from.
#[derive(Clone, Debug, Serialize)]
pub struct Quantity {
    pub name: String,
    /// Numbers, quantities above this one, and the GPUs of `flatout plan --gpu` (`rtx3090.bf16_tflops`).
    pub formula: String,
    pub value: f64,
    pub unit: String,
    pub about: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct Claim {
    /// Which guide says so.
    pub system: String,
    pub topic: String,
    pub claim: String,
    /// The guide's basis for it: measured, expected, recommended, default, troubleshooting, future.
    pub kind: String,
    pub hardware: Option<String>,
    /// The corresponding switch or key of flatout; empty where there is none.
    pub switch: String,
    pub verdict: Verdict,
    /// Names of the figures that have a value.
    pub figures: Vec<String>,
    /// Commands of the figures without a value, which would measure them.
    pub pending: Vec<String>,
    pub arithmetic: Option<Comparison>,
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Measured,
    NotActive,
    Impossible,
    NotApplicable,
    NotYet,
}

impl Verdict {
    pub const ALL: [Verdict; 5] =
        [Verdict::Measured, Verdict::NotActive, Verdict::Impossible, Verdict::NotApplicable, Verdict::NotYet];

    pub fn word(self) -> &'static str {
        match self {
            Verdict::Measured => "measured",
            Verdict::NotActive => "not active",
            Verdict::Impossible => "impossible",
            Verdict::NotApplicable => "not applicable",
            Verdict::NotYet => "not yet",
        }
    }

    pub fn meaning(self) -> &'static str {
        match self {
            Verdict::Measured => {
                "there is a figure of flatout's own, on the machine named with it; it need not agree with the claim"
            }
            Verdict::NotActive => "in the code the guide describes it never ran, or had nothing to act on",
            Verdict::Impossible => {
                "arithmetic contradicts it: the comparison is computed, and a test holds it true"
            }
            Verdict::NotApplicable => {
                "there is nothing here to measure: a part that flatout does not have, or advice about another tool"
            }
            Verdict::NotYet => "it is not measured here yet, or flatout cannot train it",
        }
    }
}

/// The claims embedded in flatout.
pub fn all() -> &'static Claims {
    static ALL: OnceLock<Claims> = OnceLock::new();
    ALL.get_or_init(|| read(include_str!("claims/claims.toml")).expect("the claims are well formed"))
}

/// The claims of one guide.
pub fn of(guide: &str) -> Result<Vec<&'static Claim>, UserError> {
    let claims = all();
    if !claims.guides.iter().any(|g| g.name == guide) {
        let names: Vec<&str> = claims.guides.iter().map(|g| g.name.as_str()).collect();
        return Err(UserError(format!("there is no guide `{guide}`; there are {}", names.join(", "))));
    }
    Ok(claims.claims.iter().filter(|claim| claim.system == guide).collect())
}

impl Claims {
    pub fn figure(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.name == name)
    }
}

/// The data as it is in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    guide: Vec<Guide>,
    figure: Vec<Figure>,
    quantity: Vec<WrittenQuantity>,
    claim: Vec<WrittenClaim>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenQuantity {
    name: String,
    formula: String,
    unit: String,
    about: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenClaim {
    system: String,
    topic: String,
    claim: String,
    kind: String,
    hardware: Option<String>,
    switch: String,
    /// Where the guide, or the code behind it, contradicts the claim.
    note: Option<String>,
    verdict: Verdict,
    #[serde(default)]
    figures: Vec<String>,
    arithmetic: Option<String>,
    why: Option<String>,
}

/// Reads the data and does its arithmetic; refuses a verdict without its reason.
fn read(text: &str) -> Result<Claims, String> {
    let written: Written = toml::from_str(text).map_err(|error| error.to_string())?;
    let mut known = cards();
    let mut quantities = Vec::new();
    for WrittenQuantity { name, formula, unit, about } in written.quantity {
        let value = arithmetic::value(&formula, &known).map_err(|why| format!("quantity {name}: {why}"))?;
        if known.insert(name.clone(), value).is_some() {
            return Err(format!("quantity {name} is defined twice"));
        }
        quantities.push(Quantity { name, formula, value, unit, about });
    }
    let claims = written.claim.into_iter().map(|claim| {
        let place = format!("{}, {}", claim.system, claim.topic);
        if !written.guide.iter().any(|guide| guide.name == claim.system) {
            return Err(format!("{place}: there is no such guide"));
        }
        judge(claim, &written.figure, &known).map_err(|why| format!("{place}: {why}"))
    });
    let claims = claims.collect::<Result<_, _>>()?;
    Ok(Claims { guides: written.guide, figures: written.figure, quantities, claims })
}

fn judge(written: WrittenClaim, figures: &[Figure], known: &HashMap<String, f64>) -> Result<Claim, String> {
    let mut shown = Vec::new();
    let mut pending = Vec::new();
    for name in written.figures {
        let figure = figures.iter().find(|figure| figure.name == name);
        let figure = figure.ok_or(format!("there is no figure `{name}`"))?;
        match figure.value {
            Some(_) => shown.push(name),
            None => pending.push(figure.command.clone()),
        }
    }
    let arithmetic = written.arithmetic.map(|sum| arithmetic::compare(&sum, known)).transpose()?;
    if let Some(false) = arithmetic.as_ref().map(|compared| compared.holds) {
        return Err("its arithmetic does not hold".into());
    }
    let why = written.why.or(written.note).unwrap_or_default();
    // A claim waits for its figure: the verdict changes when the figure has a value, and nothing else need be edited.
    let verdict = match written.verdict {
        Verdict::Measured if shown.is_empty() && pending.is_empty() => {
            return Err("measured, and no figure is named".into());
        }
        Verdict::Measured if shown.is_empty() => Verdict::NotYet,
        Verdict::Impossible if arithmetic.is_none() => return Err("impossible, and no arithmetic".into()),
        verdict => verdict,
    };
    if verdict != Verdict::Measured && why.is_empty() && pending.is_empty() && arithmetic.is_none() {
        return Err(format!("{} without a reason", verdict.word()));
    }
    Ok(Claim {
        system: written.system,
        topic: written.topic,
        claim: written.claim,
        kind: written.kind,
        hardware: written.hardware,
        switch: written.switch,
        verdict,
        figures: shown,
        pending,
        arithmetic,
        why,
    })
}

/// Data-sheet values of every known GPU, by name: `a100_40.memory_gib`.
fn cards() -> HashMap<String, f64> {
    let facts = gpus::named().iter().flat_map(|gpu| {
        let name = gpu.name.replace('-', "_");
        [
            (format!("{name}.bf16_tflops"), gpu.rates.bf16_flops / 1e12),
            (format!("{name}.memory_gib"), gpu.memory_bytes as f64 / (1u64 << 30) as f64),
            (format!("{name}.bandwidth_tbs"), gpu.rates.memory_bytes / 1e12),
        ]
    });
    facts.collect()
}

#[cfg(test)]
mod tests;
