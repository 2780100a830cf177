//! Evaluates arithmetic written as text (numbers, names, + - * / and parentheses) and comparisons of two expressions.

use std::collections::HashMap;

use serde::Serialize;

/// A comparison and the values of its sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    pub text: String,
    pub left: f64,
    /// `>` or `<`.
    pub relation: char,
    pub right: f64,
    pub holds: bool,
}

/// `160 * sample_tflop > rtx3090.bf16_tflops`, both sides computed.
pub fn compare(text: &str, known: &HashMap<String, f64>) -> Result<Comparison, String> {
    let at = text.find(['<', '>']).ok_or_else(|| format!("`{text}` compares nothing"))?;
    let relation = if text.as_bytes()[at] == b'>' { '>' } else { '<' };
    let left = value(&text[..at], known)?;
    let right = value(&text[at + 1..], known)?;
    let holds = if relation == '>' { left > right } else { left < right };
    Ok(Comparison { text: text.into(), left, relation, right, holds })
}

pub fn value(text: &str, known: &HashMap<String, f64>) -> Result<f64, String> {
    let mut rest = Rest { text: text.trim_start(), known };
    let value = rest.sum()?;
    match rest.text.is_empty() {
        true if value.is_finite() => Ok(value),
        true => Err(format!("`{text}` is not finite")),
        false => Err(format!("`{}` is not understood", rest.text)),
    }
}

/// The text still to be read. Begins with no space.
struct Rest<'a> {
    text: &'a str,
    known: &'a HashMap<String, f64>,
}

impl Rest<'_> {
    fn sum(&mut self) -> Result<f64, String> {
        let mut value = self.product()?;
        loop {
            match self.take(&['+', '-']) {
                Some('+') => value += self.product()?,
                Some(_) => value -= self.product()?,
                None => return Ok(value),
            }
        }
    }

    fn product(&mut self) -> Result<f64, String> {
        let mut value = self.factor()?;
        loop {
            match self.take(&['*', '/']) {
                Some('*') => value *= self.factor()?,
                Some(_) => value /= self.factor()?,
                None => return Ok(value),
            }
        }
    }

    fn factor(&mut self) -> Result<f64, String> {
        if self.take(&['(']).is_some() {
            let value = self.sum()?;
            return self.take(&[')']).map(|_| value).ok_or("a parenthesis is not closed".into());
        }
        let end = self.text.find(|c: char| !c.is_alphanumeric() && !"._".contains(c));
        let (word, after) = self.text.split_at(end.unwrap_or(self.text.len()));
        self.text = after.trim_start();
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return word.parse().map_err(|_| format!("`{word}` is no number"));
        }
        self.known.get(word).copied().ok_or_else(|| format!("there is no quantity `{word}`"))
    }

    fn take(&mut self, signs: &[char]) -> Option<char> {
        let sign = self.text.chars().next().filter(|sign| signs.contains(sign))?;
        self.text = self.text[1..].trim_start();
        Some(sign)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> HashMap<String, f64> {
        HashMap::from([("rtx3090.bf16_tflops".into(), 71.0), ("half".into(), 0.5)])
    }

    #[test]
    fn values() {
        let cases = [
            ("1 + 2 * 3", 7.0),
            ("(1+2)*3", 9.0),
            ("8 - 2 - 1", 5.0),
            ("8 / 2 / 2", 2.0),
            ("1e3*half", 500.0),
        ];
        for (text, expected) in cases {
            assert_eq!(value(text, &known()), Ok(expected), "{text}");
        }
    }

    #[test]
    fn comparisons_are_computed() {
        let compared = compare("160 * 3 > rtx3090.bf16_tflops", &known()).unwrap();
        assert_eq!(
            (compared.left, compared.relation, compared.right, compared.holds),
            (480.0, '>', 71.0, true)
        );
        assert!(!compare("1 < half", &known()).unwrap().holds);
    }

    #[test]
    fn errors_name_what_is_wrong() {
        for (text, message) in [
            ("1 +", "there is no quantity ``"),
            ("2 * nothing", "there is no quantity `nothing`"),
            ("(1", "a parenthesis is not closed"),
            ("1 2", "`2` is not understood"),
            ("1.2.3", "`1.2.3` is no number"),
            ("1 / 0", "`1 / 0` is not finite"),
        ] {
            assert_eq!(value(text, &known()), Err(message.into()), "{text}");
        }
        assert!(compare("1 + 1", &known()).is_err());
    }
}
