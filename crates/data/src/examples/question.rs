//! Questions to a model as its chat template writes them, and the tokens that end an answer.

use std::path::PathBuf;

use super::conversation::Conversation;
use super::encoder::Encoder;
use super::sets::CHATML_IDS;
use super::template::{ChatTemplate, Date, PROBE, Refusal, beside, is_reserved};
use crate::error::DataError;
use crate::formats::Fields;
use crate::text::tokenizer::Vocabulary;

/// A model's template with its tokeniser.
pub struct Questions {
    template: ChatTemplate,
    encoder: Encoder,
}

impl Questions {
    /// The template that is given, or the first that the folders have.
    pub fn open(
        vocabulary: &Vocabulary,
        given: Option<&str>,
        folders: &[PathBuf],
        date: Option<Date>,
    ) -> Result<Self, DataError> {
        let spelled = |token: u32| vocabulary.token(token).unwrap_or_default();
        let fallback = [("bos_token", spelled(vocabulary.bos())), ("eos_token", spelled(vocabulary.eos()))];
        let ours = CHATML_IDS.iter().all(|(name, token)| spelled(*token) == *name);
        let given = given.or(if ours { Some(beside::CHATML_NAME) } else { None });
        let template = beside::find(given, folders, &fallback, date)?.ok_or_else(|| {
            DataError::input(
                "The model has no chat template beside its tokeniser: give one with data.template.",
            )
        })?;
        Ok(Self { template, encoder: Encoder::new(vocabulary)? })
    }

    /// The tokens of a question, up to where the answer begins.
    pub fn tokens(&self, question: &str) -> Result<Vec<u32>, DataError> {
        if is_reserved(question) {
            return Err(DataError::input(
                "The question has a character that no text may have (U+FDD0 to U+FDD2).",
            ));
        }
        let pieces = self.encoder.pieces(&self.written(&[("user", question)], true)?);
        let pieces = pieces.map_err(|error| {
            DataError::input(format!("The question cannot be encoded: {}.", error.said()))
        })?;
        Ok(pieces.into_iter().map(|piece| piece.token).collect())
    }

    /// The special token that the template puts behind an answer, where it has one.
    pub fn end(&self) -> Result<Option<u32>, DataError> {
        let text = self.written(&[("user", "a"), ("assistant", &PROBE.to_string())], false)?;
        let behind = text.split_once(PROBE).map_or("", |(_, behind)| behind);
        let pieces = self.encoder.pieces(behind).unwrap_or_default();
        Ok(pieces.into_iter().find(|piece| piece.is_special).map(|piece| piece.token))
    }

    fn written(&self, turns: &[(&str, &str)], prompt: bool) -> Result<String, DataError> {
        let message = |(role, content): &(&str, &str)| {
            Fields(vec![("role".into(), (*role).into()), ("content".into(), (*content).into())])
        };
        let messages: Vec<Fields> = turns.iter().map(message).collect();
        let rendered = self.template.render_messages(&messages, &Conversation::default(), prompt);
        rendered.map(|rendered| rendered.text).map_err(|refusal| {
            let shown = &self.template.shown;
            DataError::input(match refusal {
                Refusal::NeedsDate => {
                    format!("{shown} asks for today's date: give one as data.date=2025-01-31.")
                }
                refusal => format!(
                    "{shown} does not write a question and its answer ({refusal}): give another template with \
                     data.template."
                ),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_ends_where_the_answer_begins() {
        let names: Vec<&str> = CHATML_IDS.iter().map(|(name, _)| *name).collect();
        let vocabulary = Vocabulary::train_with(["what is it"].into_iter(), 270, &names).unwrap();
        let questions = Questions::open(&vocabulary, None, &[], None).unwrap();
        let tokens = questions.tokens("what?").unwrap();
        assert_eq!(
            vocabulary.spell_out(&tokens),
            "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n"
        );
        assert_eq!(questions.end().unwrap(), Some(3));
        let bare = Vocabulary::train(["what is it"].into_iter(), 270).unwrap();
        let error = Questions::open(&bare, None, &[], None).err().unwrap();
        assert!(error.sentence.contains("no chat template"), "{error}");
    }
}
