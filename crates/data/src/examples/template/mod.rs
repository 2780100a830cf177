//! Chat templates: conversations written out as the template that comes with a model writes them, to the character.
//!
//! Templates are Jinja as the Python library `transformers` runs it: blocks trimmed, `raise_exception`, `strftime_now`,
//! `tojson` as `json.dumps` writes, methods of Python's strings and dictionaries, and `{% generation %}` around what a
//! model is to learn. They come with models from anywhere, so what one may cost is bounded: instructions, the depth of
//! recursion, and the length of what it writes.

pub(crate) mod beside;
mod python;

use std::fmt;
use std::io;
use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::conversation::Conversation;
use crate::error::DataError;
use crate::formats::{Field, Fields};

pub use python::Date;

/// A template of a thousand turns takes about a million instructions.
const FUEL: u64 = 20_000_000;
const RECURSION: usize = 100;
const MOST_OUTPUT_BYTES: usize = 64 << 20;
const MOST_SOURCE_BYTES: usize = 1 << 20;
const NAME: &str = "chat";

/// Marks around learned text until they are cut out: characters that no text may have, by Unicode's own rule.
const BEGIN: char = '\u{fdd0}';
const END: char = '\u{fdd1}';
/// Stands for an answer where the place of answers is looked for.
pub(super) const PROBE: char = '\u{fdd2}';

/// The template of many published models, for those that have none: each turn between `<|im_start|>` and `<|im_end|>`.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
    {% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
    {{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// The tokens that [`CHATML`] is written with.
pub const CHATML_TOKENS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// A template with everything it can see but the conversation.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Special tokens by the names templates know them by, such as `bos_token`.
    specials: Vec<(String, String)>,
    has_generation: bool,
    has_date: bool,
    /// Where it came from, for people.
    pub shown: String,
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
    /// It failed.
    Failed(String),
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
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the usual delimiters"));
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_formatter(|out, _, value| {
            out.write_str(&python::text(value)).map_err(|_| Error::from(ErrorKind::WriteFailure))
        });
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", |value: Value| python::text(&value));
        environment.add_filter(SPAN_FILTER, |body: String| format!("{BEGIN}{body}{END}"));
        environment.add_function("raise_exception", raise_exception);
        if let Some(date) = date {
            environment.add_function("strftime_now", move |format: String| date.formatted(&format));
        }
        let (source, has_generation) = with_spans(source);
        environment.add_template_owned(NAME, source).map_err(|error| {
            DataError::input(format!(
                "The chat template of {shown} cannot be read: {}; correct it, or give another with data.template.",
                said(&error)
            ))
        })?;
        Ok(Self { environment, specials, has_generation, has_date: date.is_some(), shown: shown.into() })
    }

    /// Whether the template itself says what is learned.
    pub fn has_generation(&self) -> bool {
        self.has_generation
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
        let template = self.environment.get_template(NAME).expect("it was added when it was compiled");
        let messages: Value = messages.iter().map(|message| object(&aliased(message))).collect();
        let base = context! {
            messages => messages,
            tools => conversation.tools.as_ref().map_or(Value::from(()), value),
            documents => Value::from(()),
            add_generation_prompt => prompt,
        };
        let specials =
            Value::from_pairs(self.specials.iter().map(|(name, token)| (name.as_str(), token.as_str())));
        let context = context! { ..base, ..object(&conversation.options), ..specials };
        let mut written = Bounded(Vec::new());
        if let Err(error) = template.render_captured_to(context, &mut written) {
            return Err(self.refusal(&error));
        }
        let text = String::from_utf8(written.0).expect("templates write text");
        unmarked(&text)
    }

    fn refusal(&self, error: &Error) -> Refusal {
        let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(inner) = source {
            if let Some(Raised(message)) = inner.downcast_ref() {
                return Refusal::Raised(message.clone());
            }
            source = inner.source();
        }
        Refusal::Failed(match error.kind() {
            ErrorKind::OutOfFuel => format!("it takes more than {FUEL} instructions"),
            ErrorKind::WriteFailure => format!("it writes more than {MOST_OUTPUT_BYTES} bytes"),
            ErrorKind::UnknownFunction if !self.has_date && said(error).contains("strftime_now") => {
                "it asks for today's date; give one as data.date=2025-01-31, so that the run can be repeated"
                    .into()
            }
            _ => said(error),
        })
    }
}

/// The filter that `{% generation %}` becomes: a block of the same white space, whose body can be marked.
const SPAN_FILTER: &str = "generation_span";

/// The source with `generation` tags as filter blocks, and whether there are any.
fn with_spans(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut found = false;
    while let Some(at) = rest.find("{%") {
        let Some(len) = rest[at + 2..].find("%}") else { break };
        let inside = &rest[at + 2..at + 2 + len];
        let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        out.push_str(&rest[..at + 2]);
        match word {
            "generation" => {
                found = true;
                out.push_str(&inside.replace("generation", &format!("filter {SPAN_FILTER}")));
            }
            "endgeneration" => out.push_str(&inside.replace("endgeneration", "endfilter")),
            _ => out.push_str(inside),
        }
        rest = &rest[at + 2 + len..];
    }
    out.push_str(rest);
    (out, found)
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

#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// The message of an error, in a line.
fn said(error: &Error) -> String {
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    let line = error.line().map(|line| format!(", line {line} of the template")).unwrap_or_default();
    format!("{}{detail}{line}", error.kind())
}

/// Takes what a template writes, up to a limit.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MOST_OUTPUT_BYTES {
            return Err(io::Error::other("too much"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The names a message's reasoning goes by. Templates read the first, some the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The message with its reasoning under the names that templates read.
fn aliased(message: &Fields) -> Fields {
    let reasoning =
        REASONING.iter().find_map(|name| message.get(name).filter(|field| **field != Field::Null));
    let mut aliased = message.clone();
    if let Some(reasoning) = reasoning {
        for name in &REASONING[..2] {
            if *name == REASONING[0] || !message.has(name) {
                aliased.set(name, reasoning.clone());
            }
        }
    }
    aliased
}

fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::from(()),
        Field::Bool(value) => Value::from(*value),
        Field::Whole(value) => i64::try_from(*value).map_or_else(|_| Value::from(*value), Value::from),
        Field::Number(value) => Value::from(*value),
        Field::Text(text) => Value::from(text.as_str()),
        Field::List(list) => list.iter().map(value).collect(),
        Field::Object(fields) => object(fields),
    }
}

fn object(fields: &Fields) -> Value {
    Value::from_pairs(fields.0.iter().map(|(name, field)| (name.as_str(), value(field))))
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
        let Err(Refusal::Failed(said)) = rendered("{{ strftime_now('%Y') }}") else { panic!() };
        assert!(said.contains("data.date"), "{said}");
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
            ("{{ 'x' * 999999999999 }}", "too large"),
            ("{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}", "pairs"),
        ] {
            let Err(Refusal::Failed(said)) = rendered(source) else { panic!("{source}") };
            assert!(said.contains(why), "{source}: {said}");
        }
    }
}
