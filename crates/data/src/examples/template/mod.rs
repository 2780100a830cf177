//! Chat templates: conversations written out as the template that comes with a model writes them, to the character.
//!
//! Templates are Jinja as the Python library `transformers` runs it: blocks trimmed, `raise_exception`, `strftime_now`,
//! `tojson` as `json.dumps` writes, methods of Python's strings and dictionaries, and `{% generation %}` around what a
//! model is to learn. They come with models from anywhere, so what one may cost is bounded: instructions, the depth of
//! recursion, the memory it holds and the length of what it writes.

pub(crate) mod beside;
mod date;
mod jinja;

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

/// Stands for an answer where the place of answers is looked for.
pub(super) const PROBE: char = '\u{fdd2}';

/// The template of many published models, for those that have none: each turn between `<|im_start|>` and `<|im_end|>`. A
/// content in parts has an image's tokens where an image is.
pub const CHATML: &str = "{% macro written(content) %}{% if content is defined and content is not none \
    and content is not string %}{% for part in content %}{% if part['type'] == 'image' %}\
    {{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% else %}\
    {{ content + '' }}{% endif %}{% endmacro %}\
    {% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
    {% if message['role'] == 'assistant' %}{% generation %}{{ written(message['content']) + '<|im_end|>' }}\
    {% endgeneration %}{{ '\n' }}{% else %}{{ written(message['content']) + '<|im_end|>\n' }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// The tokens that [`CHATML`] is written with.
pub const CHATML_TOKENS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// A template with everything it can see but the conversation.
pub struct ChatTemplate {
    jinja: Jinja,
    /// Special tokens by the names templates know them by, such as `bos_token`.
    specials: Vec<(String, String)>,
    date: Option<Date>,
    /// Where it came from, for people.
    pub shown: String,
    /// Another one where it writes conversations otherwise.
    pub(crate) fingerprint: u64,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTemplate({})", self.shown)
    }
}

/// The text of the template that `data.template` names.
pub fn template_text(given: &str) -> Result<String, DataError> {
    beside::named(given).map(|(source, _)| source)
}

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rendered {
    pub text: String,
    /// The ranges inside `{% generation %}`, in bytes of the text.
    pub generated: Vec<Range<usize>>,
}

/// Why a template did not write a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Its author refuses such conversations, in these words.
    Raised(String),
    /// It asks for today's date, and none was given.
    NeedsDate,
    /// It failed.
    Failed(String),
    /// It costs more than any conversation can, so no other one will do better.
    Exhausted(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Raised(said) | Refusal::Failed(said) | Refusal::Exhausted(said) => f.write_str(said),
            Refusal::NeedsDate => f.write_str(
                "it asks for today's date; give one as data.date=2025-01-31, so that the run can be repeated",
            ),
        }
    }
}

impl ChatTemplate {
    /// Reads a template. `shown` names it in errors. Without a date, `strftime_now` is not defined, which templates that
    /// ask for today's date are made for: what a run learns from would change with the day.
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

    /// Whether the template itself says what is learned.
    pub fn has_generation(&self) -> bool {
        self.jinja.has_generation
    }

    /// The first `turns` messages of a conversation, and where `prompt`, what comes before an answer.
    pub fn render(
        &self,
        conversation: &Conversation,
        turns: usize,
        prompt: bool,
    ) -> Result<Rendered, Refusal> {
        self.render_messages(&conversation.messages[..turns], conversation, prompt)
    }

    /// As [`ChatTemplate::render`], of other messages in the same conversation.
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
            Error::Raised(said) => Refusal::Raised(said),
            Error::NeedsDate => Refusal::NeedsDate,
            Error::Failed(said) => Refusal::Failed(said),
            Error::Exhausted(said) => Refusal::Exhausted(said),
        })?;
        unmarked(&text)
    }
}

/// Cuts the marks out of a text and gives their places.
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

/// Whether a text has a character that stands for something else here.
pub(super) fn is_reserved(text: &str) -> bool {
    text.contains([BEGIN, END, PROBE])
}

/// The names a message's reasoning goes by. Templates read the first, some the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The message with its reasoning under the names that templates read.
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
    fn refusals_are_told_apart_from_failures() {
        let raised =
            rendered("{% macro no() %}{{ raise_exception('Roles must alternate') }}{% endmacro %}{{ no() }}");
        assert_eq!(raised, Err(Refusal::Raised("Roles must alternate".into())));
        assert_eq!(rendered("{{ strftime_now('%Y') }}"), Err(Refusal::NeedsDate));
        assert_eq!(rendered("{{ strftime_now is defined }}").unwrap().text, "False");
        let Err(Refusal::Failed(said)) = rendered("{{ messages[0].nothing.more }}") else { panic!() };
        assert!(said.contains("undefined"), "{said}");
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
            let Err(Refusal::Exhausted(said)) = rendered(source) else { panic!("{source}") };
            assert!(said.contains(why), "{source}: {said}");
        }
        let twice = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}";
        let Err(Refusal::Failed(said)) = rendered(twice) else { panic!("{twice}") };
        assert!(said.contains("pairs"), "{said}");
    }
}
