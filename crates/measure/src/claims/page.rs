//! The claims as a page of Markdown.

use std::fmt::Write;

use super::{Claim, Claims, Verdict};
use flatout_report::words::count;

/// The page of all guides, or of one.
pub fn page(claims: &Claims, guide: Option<&str>) -> String {
    let mut out = String::from(OPENING);
    out += "\n| verdict | meaning |\n|---|---|\n";
    for verdict in Verdict::ALL {
        let _ = writeln!(out, "| {} | {} |", verdict.word(), verdict.meaning());
    }
    out += "\n## Counts\n\n";
    counts(claims, guide, &mut out);
    let shown = |name: &str| guide.is_none_or(|only| only == name);
    for guide in claims.guides.iter().filter(|guide| shown(&guide.name)) {
        let _ = write!(out, "\n## `{}`: {}\n\n", guide.name, guide.about);
        out += "| about | claimed | verdict | here | why |\n|---|---|---|---|---|\n";
        for claim in claims.claims.iter().filter(|claim| claim.system == guide.name) {
            out += &row(claims, claim);
        }
    }
    out += "\n## Figures measured here\n\n| figure | value | machine | command |\n|---|---|---|---|\n";
    for figure in &claims.figures {
        let value = figure.value.as_deref().unwrap_or("not measured yet");
        let (name, command) = (format!("`{}`", figure.name), format!("`{}`", figure.command));
        out += &line(&[&name, value, &figure.machine, &command]);
    }
    out += "\n## Quantities of the arithmetic\n\n";
    out += "Values of GPUs (`rtx3090.bf16_tflops`) are those of `flatout plan --gpu`.\n\n";
    out += "| quantity | value | formula | what it is |\n|---|---|---|---|\n";
    for q in &claims.quantities {
        let value = format!("{} {}", significant(q.value), q.unit);
        out += &line(&[&format!("`{}`", q.name), value.trim_end(), &format!("`{}`", q.formula), &q.about]);
    }
    out
}

const OPENING: &str = "# What optimisation guides claim, and what became of it

Five training scripts came with a guide each: a list of optimisations and what they are said to gain. Every claim has a row
here, in the guide's order, and one of five verdicts. `flatout claims > docs/results/claims.md` writes this page from
`crates/measure/src/claims/claims.toml`, and a test compares the two. The parentheses after a claim have the guide's
basis for it (measured, expected, recommended ...) and the hardware it names. Our figures are from the machines named with them
below, and figures of different machines cannot be compared; a test recomputes those of `flatout plan`.
";

fn counts(claims: &Claims, guide: Option<&str>, out: &mut String) {
    let count = |name: Option<&str>, verdict: Option<Verdict>| {
        let of_guide = claims.claims.iter().filter(|claim| name.is_none_or(|name| claim.system == name));
        of_guide.filter(|claim| verdict.is_none_or(|verdict| claim.verdict == verdict)).count()
    };
    let words: Vec<&str> = Verdict::ALL.iter().map(|verdict| verdict.word()).collect();
    let _ = write!(out, "| guide | claims | {} |\n|---|---|---|---|---|---|---|\n", words.join(" | "));
    let mut counted = |title: &str, name: Option<&str>| {
        let cells: Vec<String> =
            Verdict::ALL.iter().map(|verdict| count(name, Some(*verdict)).to_string()).collect();
        let _ = writeln!(out, "| {title} | {} | {} |", count(name, None), cells.join(" | "));
    };
    for each in claims.guides.iter().filter(|each| guide.is_none_or(|only| only == each.name)) {
        counted(&format!("`{}`", each.name), Some(&each.name));
    }
    if guide.is_none() {
        counted("all", None);
    }
}

fn row(claims: &Claims, claim: &Claim) -> String {
    let claimed = match &claim.hardware {
        Some(hardware) => format!("{} ({}; {hardware})", claim.claim, claim.kind),
        None => format!("{} ({})", claim.claim, claim.kind),
    };
    let values = claim.figures.iter().filter_map(|name| claims.figure(name));
    let here: Vec<String> = values
        .map(|figure| format!("{} [`{}`]", figure.value.as_deref().unwrap_or(""), figure.name))
        .collect();
    let mut why: Vec<String> = Vec::new();
    if !claim.why.is_empty() {
        why.push(claim.why.clone());
    }
    if let Some(sum) = &claim.arithmetic {
        let (left, right) = (significant(sum.left), significant(sum.right));
        why.push(format!("`{}`: {left} {} {right}", sum.text, sum.relation));
    }
    if claim.verdict == Verdict::NotYet {
        why.extend(claim.pending.iter().map(|command| format!("to be measured by `{command}`")));
    }
    line(&[&claim.topic, &claimed, claim.verdict.word(), &here.join("; "), &why.join("; ")])
}

fn line(cells: &[&str]) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    format!("| {} |\n", cells.join(" | "))
}

/// A number with as many digits as a comparison needs: whole from 1,000 on, else four or more significant ones.
fn significant(value: f64) -> String {
    let size = value.abs();
    if size >= 1000.0 || value == value.trunc() {
        let sign = if value < 0.0 { "-" } else { "" };
        return format!("{sign}{}", count(size.round() as u64));
    }
    let places = (4 - size.log10().floor() as i32).clamp(1, 8) as usize;
    let text = format!("{value:.places$}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_the_digits_a_comparison_needs() {
        let cases = [
            (55_466.7, "55,467"),
            (71.0, "71"),
            (504.28, "504.28"),
            (1.00038, "1.0004"),
            (0.000377, "0.000377"),
        ];
        for (value, text) in cases {
            assert_eq!(significant(value), text);
        }
    }
}
