//! The loss mask of a conversation: the parts of its text that are trained on, and the weights of its tokens.
//!
//! Where the template has generation tags, they are exact. Where it has none, an answer lies between the rendering of the
//! messages before it, with the generation prompt, and the rendering that includes it. Both must be prefixes of the rendering
//! of the whole conversation; otherwise the template rewrites earlier turns, which is an error, not a guess.

use std::ops::Range;

use flatout_settings::choice;

use super::conversation::Conversation;
use super::encoder::TokenSpan;
use super::row_error::RowError;
use super::template::{ChatTemplate, PROBE, Refusal, Rendered};
use crate::formats::Reason;

choice! {
    /// The answers of a conversation that are learned.
    pub enum TrainOn {
        /// All answers of the assistant, in one example.
        Assistant = "assistant",
        /// The last answer of the assistant.
        Last = "last",
        /// Each answer of the assistant, in an example of its own that ends with it.
        Each = "each",
        /// The whole text, questions included.
        All = "all",
    }
}

/// A text and its learned parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Masked {
    pub text: String,
    pub learned: Vec<Range<usize>>,
    /// Whether white space after the end of a turn is learned too, which only generation tags can say.
    pub is_exact: bool,
    /// Number of messages, from the first, that the text contains.
    pub turns: usize,
}

/// The texts of a conversation with their learned parts: one, or one per answer.
pub(crate) fn masked(
    template: &ChatTemplate,
    conversation: &Conversation,
    train_on: TrainOn,
) -> Result<Vec<Masked>, RowError> {
    let turns = conversation.messages.len();
    let answers = |upto: usize| (0..upto).filter(|at| conversation.learned[*at]).collect::<Vec<_>>();
    let whole = |upto: usize| {
        template.render(conversation, upto, false).map_err(|refusal| refused(template, refusal))
    };
    match train_on {
        TrainOn::All => {
            let text = whole(turns)?.text;
            let everything = 0..text.len();
            Ok(vec![Masked { learned: vec![everything], text, is_exact: true, turns }])
        }
        TrainOn::Assistant => {
            let rendered = whole(turns)?;
            Ok(vec![learned(template, conversation, rendered, turns, &answers(turns))?])
        }
        TrainOn::Last => {
            let rendered = whole(turns)?;
            let last = answers(turns).last().copied().into_iter().collect::<Vec<_>>();
            Ok(vec![learned(template, conversation, rendered, turns, &last)?])
        }
        TrainOn::Each => {
            let one = |at: usize| learned(template, conversation, whole(at + 1)?, at + 1, &[at]);
            answers(turns).into_iter().map(one).collect()
        }
    }
}

/// The ranges, in the rendering of the first `turns` messages, of the answers `wanted`.
fn learned(
    template: &ChatTemplate,
    conversation: &Conversation,
    rendered: Rendered,
    turns: usize,
    wanted: &[usize],
) -> Result<Masked, RowError> {
    let Rendered { text, generated } = rendered;
    if template.has_generation() {
        let answers: Vec<usize> = (0..turns).filter(|at| is_assistant(conversation, *at)).collect();
        if generated.len() != answers.len() && wanted.len() != answers.len() {
            return Err(RowError::new(
                Reason::Template,
                format!(
                    "the generation tags of {} mark {} places in {} answers, so single answers cannot be identified; \
                     give a template that marks each with data.template",
                    template.shown,
                    generated.len(),
                    answers.len()
                ),
            ));
        }
        let is_wanted = |at: usize| {
            wanted.len() == answers.len() || answers.get(at).is_some_and(|at| wanted.contains(at))
        };
        let learned = generated.into_iter().enumerate().filter(|(at, _)| is_wanted(*at));
        let learned: Vec<Range<usize>> =
            learned.map(|(_, span)| span).filter(|span| !span.is_empty()).collect();
        return Ok(Masked { text, learned, is_exact: true, turns });
    }
    let mut learned = Vec::new();
    for at in wanted {
        let start = start(template, conversation, &text, *at)?;
        let end = match at + 1 == turns {
            true => text.len(),
            false => {
                let with = render(template, conversation, at + 1, false)?;
                if !text.starts_with(&with) {
                    return Err(rewritten(template, at + 1, "its answer"));
                }
                with.len()
            }
        };
        if start < end {
            learned.push(start..end);
        }
    }
    Ok(Masked { text, learned, is_exact: false, turns })
}

fn is_assistant(conversation: &Conversation, at: usize) -> bool {
    conversation.messages[at].get("role").and_then(|role| role.text()) == Some("assistant")
}

/// The offset in `text` where the answer `at` begins.
fn start(
    template: &ChatTemplate,
    conversation: &Conversation,
    text: &str,
    at: usize,
) -> Result<usize, RowError> {
    let prompt = render(template, conversation, at, true)?;
    if text.starts_with(&prompt) {
        return Ok(prompt.len());
    }
    // Some generation prompts end with text that answers do not have, such as the opening of a thought. The answer then begins
    // where a different answer in its place begins.
    let before = render(template, conversation, at, false)?;
    if !text.starts_with(&before) {
        return Err(match render(template, conversation, at + 1, false)?.starts_with(&before) {
            true => rewritten(template, at + 1, "what comes before it"),
            // No mask for this answer would then give the model the input that it gets when it is asked.
            false => RowError::new(
                Reason::Template,
                format!(
                    "{} renders the text before message {} differently once the answer follows, so a model would be trained \
                     on another prompt than it is given; give another template with data.template",
                    template.shown,
                    at + 1
                ),
            ),
        });
    }
    let mut messages = conversation.messages[..=at].to_vec();
    messages[at].set("content", PROBE.to_string().into());
    let probed = template
        .render_messages(&messages, conversation, false)
        .map_err(|refusal| refused(template, refusal))?;
    let begin = probed.text.find(PROBE);
    if let Some(begin) = begin.filter(|begin| text.starts_with(&probed.text[..*begin])) {
        return Ok(begin);
    }
    let alone = render(template, conversation, at + 1, false)?;
    Err(match begin.is_some_and(|begin| alone.starts_with(&probed.text[..begin])) {
        true => rewritten(template, at + 1, "its answer"),
        false => RowError::new(
            Reason::Template,
            format!(
                "{} renders the prompt for message {} differently from the message, so the answers cannot be located; \
                 give a template with generation tags with data.template",
                template.shown,
                at + 1
            ),
        ),
    })
}

fn render(
    template: &ChatTemplate,
    conversation: &Conversation,
    turns: usize,
    prompt: bool,
) -> Result<String, RowError> {
    let rendered = template.render(conversation, turns, prompt);
    rendered.map(|rendered| rendered.text).map_err(|refusal| refused(template, refusal))
}

fn rewritten(template: &ChatTemplate, turn: usize, what: &str) -> RowError {
    RowError::new(
        Reason::Template,
        format!(
            "{} renders message {turn} ({what}) differently once more turns follow, so its place in the text is not \
             known; train on every answer in an example of its own with data.train_on=each, on the last one with \
             data.train_on=last, or give a template with generation tags with data.template",
            template.shown
        ),
    )
}

fn refused(template: &ChatTemplate, refusal: Refusal) -> RowError {
    let shown = &template.shown;
    let cannot = |sentence: String| {
        format!(
            "{shown} cannot render the conversation ({sentence}); give another template with data.template"
        )
    };
    match refusal {
        Refusal::Raised(message) => {
            let message = message.trim_end_matches('.');
            RowError::new(
                Reason::Template,
                format!("{shown} refuses the conversation (\"{message}\"); correct it"),
            )
        }
        Refusal::NeedsDate => RowError::fatal(
            Reason::Template,
            format!(
                "{shown} asks for today's date; give one as data.date=2025-01-31, so that the run can be repeated"
            ),
        ),
        Refusal::Failed(sentence) => RowError::new(Reason::Template, cannot(sentence)),
        Refusal::Exhausted(sentence) => RowError::fatal(Reason::Template, cannot(sentence)),
    }
}

/// The weight of every token as a target: 1 where it has a learned character. The first token never has one.
pub(crate) fn weights(masked: &Masked, pieces: &[TokenSpan]) -> Vec<f32> {
    let mut weights = vec![0.0; pieces.len()];
    for span in &masked.learned {
        let touches = |piece: &TokenSpan| match piece.bytes.is_empty() {
            true => span.contains(&piece.bytes.start) && !piece.is_frame,
            false => piece.bytes.start < span.end && piece.bytes.end > span.start,
        };
        let Some(first) = pieces.iter().position(touches) else { continue };
        let behind = pieces.len()
            - pieces.iter().rev().position(touches).expect("the search from the front found one");
        let blank =
            |piece: &TokenSpan| !piece.is_special && masked.text[piece.bytes.clone()].trim().is_empty();
        let bare = first + (behind - first)
            - pieces[first..behind].iter().rev().take_while(|piece| blank(piece)).count();
        let ends_a_turn = bare > first && pieces[bare - 1].is_special;
        let end = if !masked.is_exact && ends_a_turn { bare } else { behind };
        weights[first..end].fill(1.0);
    }
    if let Some(first) = weights.first_mut() {
        *first = 0.0;
    }
    weights
}
