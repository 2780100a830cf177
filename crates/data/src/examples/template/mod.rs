//! Chat templates: renders conversations exactly as the template of a model does.
//!
//! Templates are Jinja as the Python library `transformers` runs it: trimmed blocks, `raise_exception`, `strftime_now`,
//! `tojson` as `json.dumps`, methods of Python's strings and dictionaries, and `{% generation %}` around the text that a model
//! is to learn. They come with models from anywhere, so their cost is limited: instructions, the depth of recursion, memory and
//! the length of the output.

mod date;
mod jinja;
pub(crate) mod model_files;

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use self::jinja::{BEGIN, Context, END, Error, Jinja};
use super::conversation::Conversation;
use crate::error::DataError;
use crate::formats::{Field, Fields};
use crate::random::fingerprint;

pub use date::Date;

const MOST_SOURCE_BYTES: usize = 1 << 20;

/// Placeholder of an answer while the positions of answers are determined.
pub(super) const PROBE: char = '\u{fdd2}';

/// The template of many published models, for models without one: each turn between `<|im_start|>` and `<|im_end|>`. A content
/// in parts has the tokens of an image in the image's place.
pub const CHATML: &str = "{% macro written(content) %}{% if content is defined and content is not none \
    and content is not string %}{% for part in content %}{% if part['type'] == 'image' %}\
    {{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% else %}\
    {{ content + '' }}{% endif %}{% endmacro %}\
    {% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
    {% if message['role'] == 'assistant' %}{% generation %}{{ written(message['content']) + '<|im_end|>' }}\
    {% endgeneration %}{{ '\n' }}{% else %}{{ written(message['content']) + '<|im_end|>\n' }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// The tokens that [`CHATML`] uses.
pub const CHATML_TOKENS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// A template with everything it can see except the conversation.
pub struct ChatTemplate {
    jinja: Jinja,
    /// Special tokens by the names that templates use, such as `bos_token`.
    specials: Vec<(String, String)>,
    date: Option<Date>,
    /// Where it came from, for messages.
    pub shown: String,
    /// Hash that differs where the template renders differently.
    pub(crate) fingerprint: u64,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTemplate({})", self.shown)
    }
}

/// The text of the template that `data.template` names.
pub fn template_text(given: &str) -> Result<String, DataError> {
    model_files::named(given).map(|(source, _)| source)
}

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rendered {
    pub text: String,
    /// The ranges inside `{% generation %}`, in bytes of the text.
    pub generated: Vec<Range<usize>>,
}

/// Why a template did not render a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The template refuses such conversations with this message.
    Raised(String),
    /// It asks for today's date, and none was given.
    NeedsDate,
    /// Rendering failed.
    Failed(String),
    /// It exceeds a limit that no conversation needs, so it fails on others too.
    Exhausted(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Raised(sentence) | Refusal::Failed(sentence) | Refusal::Exhausted(sentence) => {
                f.write_str(sentence)
            }
            Refusal::NeedsDate => f.write_str(
                "it asks for today's date; give one as data.date=2025-01-31, so that the run can be repeated",
            ),
        }
    }
}

impl ChatTemplate {
    /// Parses a template. `shown` names it in errors. Without a date, `strftime_now` is undefined, which templates that ask for
    /// the date handle; with today's date, the training data of a run would change with the day.
    pub fn compile(
        source: &str,
        shown: &str,
        specials: Vec<(String, String)>,
        date: Option<Date>,
    ) -> Result<Self, DataError> {
        if source.len() > MOST_SOURCE_BYTES {
            return Err(DataError::input(format!(
                "The chat template of {shown} has {} bytes, and at most {MOST_SOURCE_BYTES} are read: give another with \
                 data.template.",
                source.len()
            )));
        }
        let jinja = Jinja::parse(source).map_err(|error| {
            DataError::input(format!(
                "The chat template of {shown} cannot be read: {error}; correct it, or give another with data.template."
            ))
        })?;
        let fingerprint = fingerprint(format!("{source:?} {specials:?} {date:?}").as_bytes());
        Ok(Self { jinja, specials, date, shown: shown.into(), fingerprint })
    }

    /// Whether the template itself marks the learned text.
    pub fn has_generation(&self) -> bool {
        self.jinja.has_generation
    }

    /// Renders the first `turns` messages of a conversation and, with `prompt`, the beginning of an answer.
    pub fn render(
        &self,
        conversation: &Conversation,
        turns: usize,
        prompt: bool,
    ) -> Result<Rendered, Refusal> {
        self.render_messages(&conversation.messages[..turns], conversation, prompt)
    }

    /// As [`ChatTemplate::render`], with other messages in the same conversation.
    pub(super) fn render_messages(
        &self,
        messages: &[Fields],
        conversation: &Conversation,
        prompt: bool,
    ) -> Result<Rendered, Refusal> {
        let messages: Vec<Cow<'_, Fields>> = messages.iter().map(aliased).collect();
        let context = Context {
            messages: &messages,
            tools: conversation.tools.as_ref(),
            prompt,
            options: &conversation.options,
            specials: &self.specials,
        };
        let text = self.jinja.render(&context, self.date).map_err(|error| match error {
            Error::Raised(sentence) => Refusal::Raised(sentence),
            Error::NeedsDate => Refusal::NeedsDate,
            Error::Failed(sentence) => Refusal::Failed(sentence),
            Error::Exhausted(sentence) => Refusal::Exhausted(sentence),
        })?;
        unmarked(&text)
    }
}

/// Removes the marks from a text and returns their positions.
fn unmarked(text: &str) -> Result<Rendered, Refusal> {
    let mut rendered = Rendered { text: String::with_capacity(text.len()), generated: Vec::new() };
    let mut begun = None;
    for part in text.split_inclusive([BEGIN, END]) {
        let bare = part.trim_end_matches([BEGIN, END]);
        rendered.text.push_str(bare);
        let here = rendered.text.len();
        match (part.chars().next_back(), begun) {
            (Some(BEGIN), None) => begun = Some(here),
            (Some(END), Some(start)) => {
                rendered.generated.push(start..here);
                begun = None;
            }
            (Some(BEGIN | END), _) => {
                return Err(Refusal::Failed("its generation tags do not come in pairs".into()));
            }
            _ => {}
        }
    }
    match begun {
        None => Ok(rendered),
        Some(_) => Err(Refusal::Failed("its generation tags do not come in pairs".into())),
    }
}

/// Whether a text contains a character that is reserved here.
pub(super) fn is_reserved(text: &str) -> bool {
    text.contains([BEGIN, END, PROBE])
}

/// The field names of a message's reasoning. Some templates read the first, some the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The message with its reasoning under all the names that templates read.
fn aliased(message: &Fields) -> Cow<'_, Fields> {
    let reasoning =
        REASONING.iter().find_map(|name| message.get(name).filter(|field| **field != Field::Null));
    let mut aliased = Cow::Borrowed(message);
    if let Some(reasoning) = reasoning {
        for name in &REASONING[..2] {
            if *name == REASONING[0] || !message.has(name) {
                aliased.to_mut().set(name, reasoning.clone());
            }
        }
    }
    aliased
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(turns: &[(&str, &str)]) -> Conversation {
        let message = |(role, content): &(&str, &str)| {
            Fields(vec![("role".into(), (*role).into()), ("content".into(), (*content).into())])
        };
        Conversation { messages: turns.iter().map(message).collect(), ..Conversation::default() }
    }

    fn compiled(source: &str) -> ChatTemplate {
        ChatTemplate::compile(source, "a test", vec![("bos_token".into(), "<s>".into())], None).unwrap()
    }

    fn rendered(source: &str) -> Result<Rendered, Refusal> {
        compiled(source).render(&conversation(&[("user", "hi"), ("assistant", "ho")]), 2, false)
    }

    #[test]
    fn generation_tags_mark_what_is_learned_and_leave_no_trace() {
        let template = compiled(
            "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'assistant' -%}\n  {% generation %}\n\
             {{ m.content }}</s>{% endgeneration %}\n{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
        );
        assert!(template.has_generation());
        let talk = conversation(&[("user", "a"), ("assistant", "bé"), ("user", "c"), ("assistant", "d")]);
        let Rendered { text, generated } = template.render(&talk, 4, false).unwrap();
        assert_eq!(text, "<s>[a]bé</s>[c]d</s>");
        assert_eq!(generated.iter().map(|span| &text[span.clone()]).collect::<Vec<_>>(), ["bé</s>", "d</s>"]);
        assert!(!compiled("{{ 'generation' }}{# {% generation #}").has_generation());
    }

    #[test]
    fn the_built_in_template_marks_the_answer_and_its_end() {
        let talk = conversation(&[("user", "a"), ("assistant", "b")]);
        let Rendered { text, generated } = compiled(CHATML).render(&talk, 2, false).unwrap();
        assert_eq!(text, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n");
        assert_eq!(&text[generated[0].clone()], "b<|im_end|>");
        let prompt = compiled(CHATML).render(&talk, 1, true).unwrap().text;
        assert!(text.starts_with(&prompt) && prompt.ends_with("<|im_start|>assistant\n"));
    }

    #[test]
    fn refusals_are_distinguished_from_failures() {
        let raised =
            rendered("{% macro no() %}{{ raise_exception('Roles must alternate') }}{% endmacro %}{{ no() }}");
        assert_eq!(raised, Err(Refusal::Raised("Roles must alternate".into())));
        assert_eq!(rendered("{{ strftime_now('%Y') }}"), Err(Refusal::NeedsDate));
        assert_eq!(rendered("{{ strftime_now is defined }}").unwrap().text, "False");
        let Err(Refusal::Failed(sentence)) = rendered("{{ messages[0].nothing.more }}") else { panic!() };
        assert!(sentence.contains("undefined"), "{sentence}");
        let broken =
            ChatTemplate::compile("{% if x %}", "m/tokenizer_config.json", vec![], None).unwrap_err();
        assert!(broken.sentence.contains("m/tokenizer_config.json cannot be read: syntax error"), "{broken}");
    }

    #[test]
    fn a_hostile_template_ends() {
        for (source, why) in [
            (
                "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = b %}{% endfor %}{% endfor %}",
                "instructions",
            ),
            ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
            ("{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}", "writes more than"),
            ("{{ 'x' * 999999999999 }}", "writes more than"),
        ] {
            let Err(Refusal::Exhausted(sentence)) = rendered(source) else { panic!("{source}") };
            assert!(sentence.contains(why), "{source}: {sentence}");
        }
        let twice = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}";
        let Err(Refusal::Failed(sentence)) = rendered(twice) else { panic!("{twice}") };
        assert!(sentence.contains("pairs"), "{sentence}");
    }
}
