//! Jinja as the Python library `transformers` runs it over chat templates: trimmed blocks, Python's values and methods, loop
//! controls, `{% generation %}`.
//!
//! Templates come with models from anywhere. Every cost of a template is therefore counted, and no recursion can exhaust the
//! stack: chains of operators are lists, values have a limited depth, and blocks, brackets and calls have limited nesting.
//!
//! ```text
//! lexer  -> parser -> syntax     parse a template, once
//! interpreter                    renders it, for every conversation
//!    operators, methods, filters, predicates, format, written    operations on values
//!    value, meter                values and their cost
//! ```

mod filters;
mod format;
mod interpreter;
mod lexer;
mod meter;
mod methods;
mod operators;
mod parser;
mod predicates;
mod syntax;
mod value;
mod written;

use std::borrow::Cow;
use std::fmt;

use self::interpreter::Interpreter;
use self::syntax::{Node, Symbol, Symbols};
use self::value::{DictBuilder, ListBuilder, ListKind, Value, clipped};
use super::date::Date;
use crate::formats::{Field, Fields};

/// Marks around learned text until they are removed: Unicode noncharacters, which no text may contain.
pub(super) const BEGIN: char = '\u{fdd0}';
pub(super) const END: char = '\u{fdd1}';

/// Instructions for the values of a large row: about a thousand turns, or 600 kilobytes of text. Where the rendering of such a
/// row exceeds a limit, the row may be the reason, and others may render.
const LARGE_ROW: u64 = 10_000;

/// Most bytes of a template's own words in a message.
const MOST_MESSAGE: usize = 500;

/// A parsed template.
pub(super) struct Jinja {
    nodes: Vec<Node>,
    symbols: Symbols,
    pub has_generation: bool,
}

/// The error of a template that cannot be parsed or rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Error {
    /// The template refuses the conversation with this message.
    Raised(String),
    Failed(String),
    /// The template asks for today's date, and none is given.
    NeedsDate,
    /// The template exceeds a limit that no conversation needs: it would fail on others too.
    Exhausted(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Raised(sentence) | Error::Failed(sentence) | Error::Exhausted(sentence) => {
                f.write_str(sentence)
            }
            Error::NeedsDate => f.write_str("it asks for today's date"),
        }
    }
}

/// Everything that a template sees of a row.
pub(super) struct Context<'c> {
    pub messages: &'c [Cow<'c, Fields>],
    pub tools: Option<&'c Field>,
    pub prompt: bool,
    /// Further variables; existing names take precedence.
    pub options: &'c Fields,
    pub specials: &'c [(String, String)],
}

impl Jinja {
    pub fn parse(source: &str) -> Result<Self, Error> {
        parser::parse(source)
    }

    /// Renders the text with marks around the learned parts.
    pub fn render(&self, context: &Context<'_>, date: Option<Date>) -> Result<String, Error> {
        meter::begin();
        let variables = self.variables(context);
        let variables =
            variables.map_err(|error| Error::Failed(format!("in the values of the row, {error}")))?;
        let is_large = meter::spent() > LARGE_ROW;
        Interpreter::render(self, variables, date).map_err(|(error, line)| match error {
            Error::Raised(sentence) => Error::Raised(clipped(&sentence, MOST_MESSAGE).into()),
            Error::Failed(sentence) => {
                Error::Failed(format!("{}, line {line} of the template", clipped(&sentence, MOST_MESSAGE)))
            }
            Error::Exhausted(sentence) => {
                let sentence = format!("{sentence}, line {line} of the template");
                if is_large { Error::Failed(sentence) } else { Error::Exhausted(sentence) }
            }
            other => other,
        })
    }

    /// The variables that the template reads, with their values from the row.
    fn variables(&self, context: &Context<'_>) -> Result<Vec<(Symbol, Value)>, Error> {
        let mut variables: Vec<(Symbol, Value)> = Vec::new();
        let mut add = |name: &str, value: &dyn Fn() -> Result<Value, Error>| -> Result<(), Error> {
            let symbol = self.symbols.find(name);
            let is_new = |symbol: &Symbol| variables.iter().all(|(known, _)| known != symbol);
            if let Some(symbol) = symbol.filter(is_new) {
                variables.push((symbol, value()?));
            }
            Ok(())
        };
        add("messages", &|| messages(context.messages))?;
        add("tools", &|| context.tools.map_or(Ok(Value::None), value))?;
        add("documents", &|| Ok(Value::None))?;
        add("add_generation_prompt", &|| Ok(Value::Bool(context.prompt)))?;
        for (name, field) in &context.options.0 {
            add(name, &|| value(field))?;
        }
        for (name, token) in context.specials {
            add(name, &|| Value::text(token))?;
        }
        Ok(variables)
    }
}

fn messages(messages: &[Cow<'_, Fields>]) -> Result<Value, Error> {
    let mut list = ListBuilder::default();
    for message in messages {
        let dict = object(message, list.last())?;
        list.push(dict)?;
    }
    list.value(ListKind::List)
}

fn value(field: &Field) -> Result<Value, Error> {
    match field {
        Field::Null => Ok(Value::None),
        Field::Bool(value) => Ok(Value::Bool(*value)),
        Field::Whole(value) => Ok(Value::Int(*value)),
        Field::Number(value) => Ok(Value::Float(*value)),
        Field::Text(text) => Value::text(text),
        Field::Bytes(_) => Err(Error::Failed("a field of the conversation holds bytes".into())),
        Field::List(list) => {
            let mut items = ListBuilder::default();
            for field in list {
                items.push(value(field)?)?;
            }
            items.value(ListKind::List)
        }
        Field::Object(fields) => object(fields, None),
    }
}

/// A dictionary of fields. Shares the names that `like` has at the same positions.
fn object(fields: &Fields, like: Option<&Value>) -> Result<Value, Error> {
    let mut dict = DictBuilder::default();
    let known = |at: usize| match like {
        Some(Value::Dict(like)) => (**like).get(at).map(|(key, _)| key),
        _ => None,
    };
    for (at, (name, field)) in fields.0.iter().enumerate() {
        let key = match known(at).filter(|key| key.as_str() == Some(name)) {
            Some(key) => key.clone(),
            None => Value::text(name)?,
        };
        dict.set(key, value(field)?)?;
    }
    dict.value()
}

fn failed<T>(sentence: impl Into<String>) -> Result<T, Error> {
    Err(Error::Failed(sentence.into()))
}

fn syntax_error(sentence: String, line: u32) -> Error {
    Error::Failed(format!("syntax error: {}, line {line} of the template", clipped(&sentence, MOST_MESSAGE)))
}

/// White space, as Python's strings define it.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// The arguments of a function, a filter or a test.
#[derive(Debug, Clone, Default)]
struct Args {
    positional: Vec<Value>,
    named: Vec<(String, Value)>,
}

impl Args {
    /// The values of parameters by name. The first `required` must be given, and unknown names are refused.
    fn take<const N: usize>(
        self,
        of: &str,
        names: [&str; N],
        required: usize,
    ) -> Result<[Option<Value>; N], Error> {
        if self.positional.len() > N {
            return failed(format!("{of} is given {} values and takes {N}", self.positional.len()));
        }
        let mut values = [const { None }; N];
        for (place, value) in values.iter_mut().zip(self.positional) {
            *place = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|known| *known == name) {
                Some(at) if values[at].is_none() => values[at] = Some(value),
                Some(_) => return failed(format!("{of} is given `{name}` twice")),
                None => return failed(format!("{of} has no parameter `{name}`")),
            }
        }
        match values.iter().take(required).position(Option::is_none) {
            Some(at) => failed(format!("{of} is not given `{}`", names[at])),
            None => Ok(values),
        }
    }

    /// As [`Args::take`], where all must be given by name.
    fn take_named<const N: usize>(self, of: &str, names: [&str; N]) -> Result<[Option<Value>; N], Error> {
        match self.positional.is_empty() {
            true => self.take(of, names, 0),
            false => failed(format!("{of} takes its values by name")),
        }
    }

    fn only_positional(self, of: &str) -> Result<Vec<Value>, Error> {
        match self.named.first() {
            None => Ok(self.positional),
            Some((name, _)) => failed(format!("{of} has no parameter `{name}`")),
        }
    }
}
