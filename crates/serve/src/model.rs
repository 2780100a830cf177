//! The model as requests see it: its name, tokens of texts and conversations, names of tokens.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use flatout_data::examples::{Date, QuestionPart, Questions, Turn};
use flatout_data::{PromptEncoder, Vocabulary};
use flatout_train::infer::generate::Prompt;
use flatout_train::run::BESIDE;
use flatout_train::weights::loaded::Loaded;
use flatout_train::{Failure, UserError};

use crate::api::chat::{Message, Part};
use crate::api::error::ApiError;
use crate::api::logprobs::Pieces;
use crate::api::completions;

pub struct Model {
    pub name: String,
    /// When it began to be served, in seconds since 1970.
    pub created: u64,
    /// Tokens of a prompt with what follows it.
    pub capacity: usize,
    pub vocabulary: Vocabulary,
    pub pieces: Arc<Pieces>,
    /// Of a model that brings its own tokeniser; a run of ours frames its documents itself.
    encoder: Option<PromptEncoder>,
    /// The model's template, or why there is none.
    questions: Result<Questions, String>,
    /// The token that ends an answer.
    end: Option<u32>,
}

impl Model {
    /// Of a run or a folder, with as many tokens for each request.
    pub fn of(loaded: &Loaded, capacity: usize) -> Result<Model, Failure> {
        let Some(vocabulary) = loaded.vocabulary.clone() else {
            let dir = loaded.dir.display();
            let sentence = format!("{dir} has no tokenizer.json, so there is no text: put the model's own there");
            return Err(Failure::User(UserError(sentence)));
        };
        let folders = [loaded.dir.join(BESIDE), loaded.dir.clone()];
        let data = &loaded.config.data;
        let date = data.date.as_deref().and_then(Date::parse);
        let questions = Questions::open(&vocabulary, data.template.as_deref(), &folders, date);
        let ended = questions.and_then(|questions| questions.end().map(|end| (questions, end)));
        let (questions, end) = match ended {
            Ok((questions, end)) => (Ok(questions), end),
            Err(error) => (Err(error.sentence), None),
        };
        let name = loaded.dir.canonicalize().unwrap_or_else(|_| loaded.dir.clone());
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Model {
            name: name.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned()),
            created: since.as_secs(),
            capacity,
            pieces: Arc::new(Pieces::of(&vocabulary)),
            encoder: (!loaded.is_run).then(|| vocabulary.prompt_encoder()),
            vocabulary,
            questions,
            end,
        })
    }

    /// Whether messages may have images.
    pub fn sees(&self) -> bool {
        false
    }

    /// Why there are no conversations, where there are none.
    pub fn chat_error(&self) -> Option<&str> {
        self.questions.as_ref().err().map(String::as_str)
    }

    /// The tokens of a prompt.
    pub fn tokens(&self, prompt: &completions::Prompt) -> Result<Vec<u32>, ApiError> {
        let said = |error: flatout_data::DataError| ApiError::field("prompt", error.sentence);
        match (prompt, &self.encoder) {
            (completions::Prompt::Tokens(tokens), _) if tokens.is_empty() => {
                Err(ApiError::field("prompt", "`prompt` has a list without tokens: give at least one"))
            }
            (completions::Prompt::Tokens(tokens), _) => Ok(tokens.clone()),
            (completions::Prompt::Text(text), Some(encoder)) => encoder.encode(text).map_err(said),
            (completions::Prompt::Text(text), None) => {
                Ok([vec![self.vocabulary.bos()], self.vocabulary.encode(text).map_err(said)?].concat())
            }
        }
    }

    /// The tokens of a conversation up to where the answer begins, and the token that ends it.
    pub fn conversation(&self, messages: &[Message]) -> Result<(Prompt, Option<u32>), ApiError> {
        let questions = self.questions.as_ref().map_err(|why| {
            ApiError::bad(format!("there is no chat with this model, use /v1/completions: {why}"))
        })?;
        let turns: Vec<Turn<'_>> = messages.iter().map(turn).collect();
        if turns.iter().flat_map(|turn| &turn.parts).any(|part| *part == QuestionPart::Image) {
            return Err(ApiError::field("messages", "this model sees no images: leave them out"));
        }
        let tokens = questions.tokens_of_turns(&turns);
        let tokens = tokens.map_err(|error| ApiError::field("messages", error.sentence))?;
        Ok((tokens.into(), self.end))
    }
}

/// A message as the template takes it.
fn turn(message: &Message) -> Turn<'_> {
    let part = |part| match part {
        &Part::Text(ref text) => QuestionPart::Text(text),
        Part::Image(_) => QuestionPart::Image,
    };
    Turn { role: message.role, parts: message.parts.iter().map(part).collect() }
}
