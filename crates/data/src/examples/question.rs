//! Questions to a model, rendered by its chat template, and the tokens that end an answer.

use std::path::PathBuf;

use super::conversation::Conversation;
use super::encoder::Encoder;
use super::sets::CHATML_IDS;
use super::template::{ChatTemplate, Date, PROBE, Refusal, is_reserved, model_files};
use crate::error::DataError;
use crate::formats::{Field, Fields};
use crate::text::tokenizer::Vocabulary;

/// A part of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuestionPart<'a> {
    Text(&'a str),
    Image,
}

/// A message of the conversation to be answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn<'a> {
    /// A role that the template knows, as `system`, `user` and `assistant`.
    pub role: &'a str,
    /// One text, or texts and images in order.
    pub parts: Vec<QuestionPart<'a>>,
}

/// Placeholder of an image in a text.
const IMAGE: &str = "<image>";

impl<'a> QuestionPart<'a> {
    /// Splits a question about images at each `<image>`; without one, all images come before the text.
    pub fn split(question: &'a str, images: usize) -> Result<Vec<QuestionPart<'a>>, DataError> {
        let texts: Vec<&str> = question.split(IMAGE).collect();
        let (places, first) = (texts.len() - 1, QuestionPart::Text(texts[0]));
        if places != 0 && places != images {
            return Err(DataError::input(format!(
                "The question {question:?} has {places} times {IMAGE}, and the number of images is {images}: write it once per \
                 image, or not at all to put all images first."
            )));
        }
        let ahead = if places == 0 { images } else { 0 };
        let placed = texts[1..].iter().flat_map(|text| [QuestionPart::Image, QuestionPart::Text(text)]);
        let all = std::iter::repeat_n(QuestionPart::Image, ahead).chain([first]).chain(placed);
        Ok(all.filter(|part| *part != QuestionPart::Text("")).collect())
    }

    fn field(&self) -> Field {
        let named = |name: &str, text: &str| (name.to_string(), Field::from(text));
        Field::Object(Fields(match self {
            QuestionPart::Text(text) => vec![named("type", "text"), named("text", text)],
            QuestionPart::Image => vec![named("type", "image")],
        }))
    }
}

/// A model's template with its tokeniser.
pub struct Questions {
    template: ChatTemplate,
    encoder: Encoder,
    /// The system message before every question, where there is one.
    system: Option<String>,
}

impl Questions {
    /// Opens the given template, or the first one in the folders.
    pub fn open(
        vocabulary: &Vocabulary,
        given: Option<&str>,
        folders: &[PathBuf],
        date: Option<Date>,
    ) -> Result<Self, DataError> {
        let spelled = |token: u32| vocabulary.token(token).unwrap_or_default();
        let fallback = [("bos_token", spelled(vocabulary.bos())), ("eos_token", spelled(vocabulary.eos()))];
        let ours = CHATML_IDS.iter().all(|(name, token)| spelled(*token) == *name);
        let given = given.or(if ours { Some(model_files::CHATML_NAME) } else { None });
        let template = model_files::find(given, folders, &fallback, date)?.ok_or_else(|| {
            DataError::input(
                "The model has no chat template beside its tokeniser: give one with data.template.",
            )
        })?;
        Ok(Self { template, encoder: Encoder::new(vocabulary)?, system: None })
    }

    /// Puts a system message before every question.
    pub fn with_system(self, system: &str) -> Self {
        Self { system: Some(system.into()), ..self }
    }

    /// The tokens of a question, up to the beginning of the answer.
    pub fn tokens(&self, question: &str) -> Result<Vec<u32>, DataError> {
        self.tokens_of(question.into(), &[question])
    }

    /// As [`Questions::tokens`], for a question in parts. Each image becomes the text that the template writes for it.
    pub fn tokens_of_parts(&self, parts: &[QuestionPart<'_>]) -> Result<Vec<u32>, DataError> {
        let mut texts = vec![];
        for part in parts {
            if let QuestionPart::Text(text) = part {
                texts.push(*text);
            }
        }
        self.tokens_of(Field::List(parts.iter().map(QuestionPart::field).collect()), &texts)
    }

    /// The tokens of a conversation, up to the beginning of the next answer.
    pub fn tokens_of_turns(&self, turns: &[Turn<'_>]) -> Result<Vec<u32>, DataError> {
        let texts = turns.iter().flat_map(|turn| &turn.parts).filter_map(|part| match part {
            QuestionPart::Text(text) => Some(*text),
            QuestionPart::Image => None,
        });
        check_characters(texts)?;
        let content = |turn: &Turn<'_>| match turn.parts[..] {
            [QuestionPart::Text(text)] => Field::from(text),
            ref parts => Field::List(parts.iter().map(QuestionPart::field).collect()),
        };
        self.encoded(turns.iter().map(|turn| (turn.role, content(turn))).collect())
    }

    fn tokens_of(&self, content: Field, texts: &[&str]) -> Result<Vec<u32>, DataError> {
        check_characters(texts.iter().copied().chain(self.system.as_deref()))?;
        let system = self.system.as_deref().map(|system| ("system", Field::from(system)));
        self.encoded(system.into_iter().chain([("user", content)]).collect())
    }

    fn encoded(&self, turns: Vec<(&str, Field)>) -> Result<Vec<u32>, DataError> {
        let pieces = self.encoder.pieces(&self.written(turns, true)?);
        let pieces = pieces.map_err(|error| {
            DataError::input(format!("The question cannot be encoded: {}.", error.message()))
        })?;
        Ok(pieces.into_iter().map(|piece| piece.token).collect())
    }

    /// The special token that the template puts after an answer, where it has one.
    pub fn end(&self) -> Result<Option<u32>, DataError> {
        let turns = vec![("user", "a".into()), ("assistant", PROBE.to_string().into())];
        let text = self.written(turns, false)?;
        let behind = text.split_once(PROBE).map_or("", |(_, behind)| behind);
        let pieces = self.encoder.pieces(behind).unwrap_or_default();
        Ok(pieces.into_iter().find(|piece| piece.is_special).map(|piece| piece.token))
    }

    fn written(&self, turns: Vec<(&str, Field)>, prompt: bool) -> Result<String, DataError> {
        let message = |(role, content): (&str, Field)| {
            Fields(vec![("role".into(), role.into()), ("content".into(), content)])
        };
        let messages: Vec<Fields> = turns.into_iter().map(message).collect();
        let rendered = self.template.render_messages(&messages, &Conversation::default(), prompt);
        rendered.map(|rendered| rendered.text).map_err(|refusal| {
            let shown = &self.template.shown;
            DataError::input(match refusal {
                Refusal::NeedsDate => {
                    format!("{shown} asks for today's date: give one as data.date=2025-01-31.")
                }
                refusal => format!(
                    "{shown} cannot render a question and its answer ({refusal}): give another template with \
                     data.template."
                ),
            })
        })
    }
}

/// Refuses texts with characters that are reserved here.
fn check_characters<'t>(mut texts: impl Iterator<Item = &'t str>) -> Result<(), DataError> {
    match texts.any(is_reserved) {
        true => {
            Err(DataError::input("The question has a character that no text may have (U+FDD0 to U+FDD2)."))
        }
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::QuestionPart::{Image, Text};
    use super::*;

    #[test]
    fn images_are_at_their_placeholders_or_before_the_text() {
        assert_eq!(QuestionPart::split("what?", 2).unwrap(), [Image, Image, Text("what?")]);
        assert_eq!(
            QuestionPart::split("a <image>\n<image>b", 2).unwrap(),
            [Text("a "), Image, Text("\n"), Image, Text("b")]
        );
        assert_eq!(QuestionPart::split("<image>", 1).unwrap(), [Image]);
        assert_eq!(QuestionPart::split("", 1).unwrap(), [Image]);
        for images in [0, 1, 3] {
            let error = QuestionPart::split("<image> or <image>", images).unwrap_err();
            assert!(error.sentence.contains("has 2 times <image>"), "{error}");
        }
    }

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
        let tokens = questions.with_system("be brief").tokens("what?").unwrap();
        assert_eq!(
            vocabulary.spell_out(&tokens),
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n"
        );
        let turn = |role, text| Turn { role, parts: vec![Text(text)] };
        let questions = Questions::open(&vocabulary, None, &[], None).unwrap();
        let tokens = questions
            .tokens_of_turns(&[turn("user", "a"), turn("assistant", "b"), turn("user", "c")])
            .unwrap();
        assert_eq!(
            vocabulary.spell_out(&tokens),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        );
        let error = questions.tokens_of_turns(&[turn("user", "\u{fdd2}")]).unwrap_err();
        assert!(error.sentence.contains("no text may have"), "{error}");
        let bare = Vocabulary::train(["what is it"].into_iter(), 270).unwrap();
        let error = Questions::open(&bare, None, &[], None).err().unwrap();
        assert!(error.sentence.contains("no chat template"), "{error}");
    }
}
