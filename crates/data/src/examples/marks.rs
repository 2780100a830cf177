//! Restricts learning to the part of an answer between two marks.

use super::conversation::wrong;
use super::mask::Masked;
use super::row_error::RowError;
use crate::formats::Reason;

/// Restricts the learned part of a text to the text between two marks. The marks stay in the text but are not learned, and
/// neither is anything around them, the end of the turn included.
pub(crate) fn between(mut masked: Masked, [open, close]: &[String; 2]) -> Result<Masked, RowError> {
    let mut learned = Vec::new();
    for span in &masked.learned {
        let end = span.end.min(masked.text.len());
        let mut from = span.start;
        while let Some(at) = masked.text.get(from..end).and_then(|rest| rest.find(open.as_str())) {
            let begin = from + at + open.len();
            let Some(len) = masked.text[begin..end].find(close.as_str()) else {
                let message = format!("an answer has `{open}` and no `{close}` after it; close it");
                return wrong(Reason::Conversation, message);
            };
            if len > 0 {
                learned.push(begin..begin + len);
            }
            from = begin + len + close.len();
        }
    }
    if learned.is_empty() {
        let message = format!(
            "nothing of the row's answers lies between `{open}` and `{close}` (data.answer_marks), so there is nothing to \
             learn; mark a part of an answer"
        );
        return wrong(Reason::NothingToLearn, message);
    }
    (masked.learned, masked.is_exact) = (learned, true);
    Ok(masked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_between_the_marks_is_learned() {
        let marks = ["<A>".to_string(), "</A>".to_string()];
        let narrowed = |text: &str, learned: &[(usize, usize)]| {
            let learned = learned.iter().map(|(start, end)| *start..*end).collect();
            let masked = Masked { text: text.into(), learned, is_exact: false, turns: 2 };
            let masked = between(masked, &marks).map_err(|wrong| wrong.message)?;
            let text = |span: &std::ops::Range<usize>| masked.text[span.clone()].to_string();
            Ok::<_, String>(masked.learned.iter().map(text).collect::<Vec<_>>())
        };
        let text = "q <A>no</A> so <A>four</A> and <A>ß</A>.<A></A>";
        let answer = narrowed(text, &[(12, text.len())]).unwrap();
        assert_eq!(answer, ["four", "ß"], "the question is not learned");
        let both = narrowed(text, &[(0, 11), (12, text.len() + 1)]).unwrap();
        assert_eq!(both, ["no", "four", "ß"]);
        for (text, why) in [
            ("plain", "nothing of the row's answers lies between"),
            ("<A></A>", "nothing to learn"),
            ("<A>open", "no `</A>` after it"),
        ] {
            let refused = narrowed(text, &[(0, text.len())]).unwrap_err();
            assert!(refused.contains(why), "{text}: {refused}");
        }
    }
}
