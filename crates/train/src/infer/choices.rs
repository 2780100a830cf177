//! Multiple-choice evaluation: the accuracy with which a model ranks the right answer of each question first.

use flatout_data::examples::choices::{Question, QuestionSet};
use flatout_data::{Example, ExampleTable, Layout, Shape, once};
use flatout_ir::{Program, Role};
use flatout_models::config::{Attention, Positions};
use serde::Serialize;

use super::generate::encode;
use crate::config::Task;
use crate::device::Device;
use crate::tasks::capacities::{self, Capacities};
use crate::tasks::examples::LaidOut;
use crate::training::evaluate::evaluate_all;
use crate::weights::loaded::Loaded;
use crate::{Failure, UserError, refuse};

/// Accuracies of a model on multiple-choice questions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Accuracy {
    pub questions: u64,
    /// The share of questions whose right answer is the most likely one, and its standard error.
    pub acc: f64,
    pub acc_stderr: f64,
    /// The same with the log-probability of an answer divided by its number of characters.
    pub acc_norm: f64,
    pub acc_norm_stderr: f64,
}

/// The answers of all questions as tokens: one example per answer, question by question.
pub struct TokenisedAnswers {
    table: ExampleTable,
    longest: usize,
    /// Tokens of all examples, and how many of them are judged.
    tokens: usize,
    judged: usize,
    most_judged: usize,
}

/// Checks that a model can score answers.
fn check(loaded: &Loaded) -> Result<(), UserError> {
    let dir = loaded.dir.display();
    if loaded.vocabulary.is_none() {
        refuse!("{dir} has no tokeniser, so it cannot read questions: put its tokenizer.json there");
    }
    let decoder = loaded.config.model.as_decoder();
    let predicts_next = decoder.is_some_and(|decoder| decoder.attention == Attention::Causal);
    if loaded.config.model.classes().is_some() || !predicts_next {
        refuse!("{dir} is not a decoder that predicts the next token, and questions with choices need one");
    }
    Ok(())
}

/// Tokenises questions. A prompt that is too long loses its beginning.
pub fn tokenise(loaded: &Loaded, set: &QuestionSet) -> Result<TokenisedAnswers, Failure> {
    check(loaded)?;
    let vocabulary = loaded.vocabulary.as_ref().expect("checked above");
    // The last token is predicted but not read, so a model with rotary positions reads as many tokens as it was made for.
    let most = match loaded.config.model.decoder().positions {
        Positions::Learned => loaded.positions,
        _ => loaded.positions + 1,
    };
    let (prompts, wholes): (Vec<String>, Vec<String>) =
        set.questions.iter().flat_map(prompts_and_choices).unzip();
    let places = set.questions.iter().flat_map(|q| q.choices.iter().map(move |choice| (choice, &q.place)));
    let prompts = encode(vocabulary, loaded.is_run, &prompts)?;
    let mut wholes = encode(vocabulary, loaded.is_run, &wholes)?;
    // An answer to an empty prompt follows the token that stands for it, even if the tokeniser puts no token before a text.
    for (prompt, whole) in prompts.iter().zip(&mut wholes) {
        if prompt.len() == 1 && whole.first() != prompt.first() {
            whole.insert(0, prompt[0]);
        }
    }
    let mut asked =
        TokenisedAnswers { table: ExampleTable::default(), longest: 0, tokens: 0, judged: 0, most_judged: 0 };
    for ((prompt, whole), (choice, place)) in prompts.iter().zip(&wholes).zip(places) {
        let judged = whole.len().saturating_sub(prompt.len());
        if judged == 0 || judged >= most {
            return Err(Failure::User(UserError(format!(
                "{place}: the answer {choice:?} has {judged} tokens after its prompt, and the model reads {} at once: correct the row",
                loaded.positions
            ))));
        }
        let tokens = &whole[whole.len().saturating_sub(most)..];
        let weights: Vec<f32> = (0..tokens.len()).map(|at| f32::from(at + judged >= tokens.len())).collect();
        asked.table.push(Example { tokens, weights: &weights, label: None, images: &[] });
        asked.longest = asked.longest.max(tokens.len());
        asked.tokens += tokens.len();
        asked.judged += judged;
        asked.most_judged = asked.most_judged.max(judged);
    }
    Ok(asked)
}

/// The prompt of every choice, and the prompt followed by the choice. White space at the end of a prompt is moved to what
/// follows.
fn prompts_and_choices(question: &Question) -> impl Iterator<Item = (String, String)> {
    let prompt = question.prompt.trim_end();
    let whole = |choice: &String| (prompt.to_string(), format!("{} {choice}", question.prompt));
    question.choices.iter().map(whole).collect::<Vec<_>>().into_iter()
}

/// The most tokens and examples per batch.
const AT_ONCE: usize = 8192;
const EXAMPLES_AT_ONCE: usize = 512;

/// The log-probability of every answer, in order.
fn scores(loaded: &mut Loaded, device: &Device, asked: &mut TokenisedAnswers) -> Result<Vec<f64>, Failure> {
    loaded.config.data.task = Task::Chat;
    if loaded.config.model.decoder().positions != Positions::Learned {
        loaded.config.model.decoder_mut().context = asked.longest;
    }
    let tokens = AT_ONCE.min(asked.tokens).max(asked.longest).next_multiple_of(128);
    // Capacity for the mean share of judged tokens, with a margin for longer answers.
    let share = (tokens * asked.judged).div_ceil(asked.tokens);
    let read = (share + share / 4).max(asked.most_judged).next_multiple_of(128).min(tokens);
    let shape = Shape::Packed { tokens, segments: EXAMPLES_AT_ONCE };
    // A prompt is computed once for all its answers.
    let shares_prompts = loaded.config.model.decoder().is_causal();
    if shares_prompts {
        asked.table.share_prefixes();
    }
    let layout =
        Layout::with_loss_rows(vec![shape], Some(vec![read])).sharing(shares_prompts.then_some(tokens));
    let graph = capacities::texts(&loaded.config, &Capacities::of_shape(&loaded.config, &layout, 0), false);
    let mut session = loaded.session(device, &[Program { role: Role::Eval, graph }])?;
    let parts = once(&asked.table, usize::MAX, &layout, &[]);
    let mut scores = vec![0.0; asked.table.count()];
    let set = LaidOut { parts, images: None, compared: None };
    evaluate_all(&mut session, &set, EXAMPLES_AT_ONCE, &mut |batch, results| {
        for (answer, logp) in results.answers.iter().zip(&results.logp) {
            if let Some(answer) = answer {
                scores[batch.samples[*answer as usize] as usize] += *logp as f64;
            }
        }
    })?;
    Ok(scores)
}

/// Computes the accuracies of a model on a set of questions.
pub fn choose(
    loaded: &mut Loaded,
    device: &Device,
    set: &QuestionSet,
    asked: &mut TokenisedAnswers,
) -> Result<Accuracy, Failure> {
    let scores = scores(loaded, device, asked)?;
    let (mut first, mut right, mut right_by_length) = (0, 0, 0);
    for question in &set.questions {
        let own = &scores[first..first + question.choices.len()];
        let by_length =
            own.iter().zip(&question.choices).map(|(score, choice)| score / choice.chars().count() as f64);
        right += u64::from(likeliest(own.iter().copied()) == question.answer);
        right_by_length += u64::from(likeliest(by_length) == question.answer);
        first += question.choices.len();
    }
    let questions = set.questions.len() as u64;
    let [(acc, acc_stderr), (acc_norm, acc_norm_stderr)] =
        [right, right_by_length].map(|right| share(right, questions));
    Ok(Accuracy { questions, acc, acc_stderr, acc_norm, acc_norm_stderr })
}

/// The index of the largest score; the first one among equals.
fn likeliest(scores: impl Iterator<Item = f64>) -> usize {
    let best = scores.enumerate().reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map_or(0, |(number, _)| number)
}

/// A proportion and its standard error.
fn share(right: u64, of: u64) -> (f64, f64) {
    let mean = right as f64 / of as f64;
    let error = if of > 1 { (mean * (1.0 - mean) / (of - 1) as f64).sqrt() } else { 0.0 };
    (mean, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_has_the_standard_error_of_a_sample() {
        assert_eq!(share(3, 4), (0.75, 0.25));
        assert_eq!(share(1, 1), (1.0, 0.0));
    }

    #[test]
    fn the_first_of_equals_is_chosen_and_nan_never_replaces_a_number() {
        assert_eq!(likeliest([-2.0, -1.0, -1.0].into_iter()), 1);
        assert_eq!(likeliest([-2.0, f64::NAN].into_iter()), 0);
    }
}
