//! Interprets the syntax tree of a template.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use super::super::date::Date;
use super::meter::{spend, spend_bytes};
use super::methods::{self, concatenated};
use super::operators::{arithmetic, attribute, holds, item, named_item, negative, positive, range, slice};
use super::syntax::{
    Arguments, Comparison, Expression, For, Macro, Node, Operator, Statement, Step, Symbol, Symbols, Target,
    Term,
};
use super::value::{
    DictBuilder, ListBuilder, ListKind, LoopState, MacroValue, Namespace, TextBuilder, Value,
};
use super::written::write_text;
use super::{Args, BEGIN, END, Error, Jinja, failed, filters, predicates};

/// Maximum nesting of expressions, blocks and calls.
const DEEPEST: usize = 250;

/// The functions every template has.
const FUNCTIONS: [&str; 4] = ["range", "dict", "namespace", "raise_exception"];
const STRFTIME: &str = "strftime_now";

pub(super) struct Interpreter<'t> {
    symbols: &'t Symbols,
    /// The variables of all scopes, the innermost last, and the start of each scope.
    variables: Vec<(Symbol, Value)>,
    scopes: Vec<usize>,
    namespaces: Vec<Rc<Namespace>>,
    /// The text written so far, followed by the texts of blocks that are being captured.
    outputs: Vec<TextBuilder>,
    date: Option<Date>,
    depth: usize,
    line: u32,
}

enum Flow {
    Next,
    Break,
    Continue,
}

impl<'t> Interpreter<'t> {
    /// Renders a template with the given variables.
    pub fn render(
        template: &'t Jinja,
        variables: Vec<(Symbol, Value)>,
        date: Option<Date>,
    ) -> Result<String, (Error, u32)> {
        let mut interpreter = Self {
            symbols: &template.symbols,
            scopes: vec![variables.len()],
            variables,
            namespaces: Vec::new(),
            outputs: vec![TextBuilder::default()],
            date,
            depth: 0,
            line: 1,
        };
        let rendered = interpreter.block(&template.nodes);
        // Namespaces may refer to one another: emptying them one by one keeps drops from recursing.
        interpreter.namespaces.iter().for_each(|namespace| drop(namespace.fields.take()));
        match rendered {
            Ok(_) => Ok(interpreter.outputs.remove(0).into_string()),
            Err(error) => Err((error, interpreter.line)),
        }
    }

    fn output(&mut self) -> &mut TextBuilder {
        self.outputs.last_mut().expect("the outermost output always exists")
    }

    fn deeper<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.depth == DEEPEST {
            return Err(Error::Exhausted(format!("its recursion is more than {DEEPEST} deep")));
        }
        self.depth += 1;
        let result = run(self);
        self.depth -= 1;
        result
    }

    /// Runs a closure in a scope of its own.
    fn scoped<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        let start = self.variables.len();
        self.scopes.push(start);
        let result = run(self);
        self.scopes.pop();
        self.variables.truncate(start);
        result
    }

    /// Captures the text that a closure writes.
    fn captured(&mut self, run: impl FnOnce(&mut Self) -> Result<(), Error>) -> Result<Value, Error> {
        self.outputs.push(TextBuilder::default());
        let result = run(self);
        let text = self.outputs.pop().expect("the output was pushed above");
        result.map(|()| text.value())
    }

    fn captured_block(&mut self, nodes: &[Node]) -> Result<Value, Error> {
        self.captured(|interpreter| interpreter.scoped(|interpreter| interpreter.block(nodes).map(drop)))
    }

    fn block(&mut self, nodes: &[Node]) -> Result<Flow, Error> {
        self.deeper(|interpreter| {
            for node in nodes {
                spend(1)?;
                interpreter.line = node.line;
                match interpreter.statement(&node.statement)? {
                    Flow::Next => {}
                    other => return Ok(other),
                }
            }
            Ok(Flow::Next)
        })
    }

    fn statement(&mut self, statement: &Statement) -> Result<Flow, Error> {
        match statement {
            Statement::Data(text) => self.output().push(text)?,
            Statement::Print(Expression::Text(text)) => self.output().push(text)?,
            Statement::Print(printed) => {
                let value = self.value(printed)?;
                write_text(&value, self.output())?;
            }
            Statement::If(cases, otherwise) => return self.if_statement(cases, otherwise),
            Statement::For(statement) => {
                let items = self.value(&statement.over)?;
                self.for_statement(statement, &items, 0)?;
            }
            Statement::Set(target, value) => {
                let value = self.value(value)?;
                self.assign(target, value)?;
            }
            Statement::SetBlock(target, steps, nodes) => {
                let text = self.captured_block(nodes)?;
                let value = self.steps(text, steps)?;
                self.assign(target, value)?;
            }
            Statement::FilterBlock(steps, nodes) => {
                let text = self.captured_block(nodes)?;
                let value = self.steps(text, steps)?;
                write_text(&value, self.output())?;
            }
            Statement::Macro(symbol, definition) => {
                let value = self.macro_value(definition, false);
                self.set(*symbol, value)?;
            }
            Statement::CallBlock(call, body) => {
                let value = self.call_block(call, body)?;
                write_text(&value, self.output())?;
            }
            Statement::With(assigned, nodes) => {
                let mut values = Vec::new();
                for (_, value) in assigned {
                    values.push(self.value(value)?);
                }
                return self.scoped(|interpreter| {
                    for ((target, _), value) in assigned.iter().zip(values) {
                        interpreter.assign(target, value)?;
                    }
                    interpreter.block(nodes)
                });
            }
            Statement::Scope(nodes) => return self.scoped(|interpreter| interpreter.block(nodes)),
            Statement::Generation(nodes) => {
                self.output().push_char(BEGIN)?;
                self.scoped(|interpreter| interpreter.block(nodes))?;
                self.output().push_char(END)?;
            }
            Statement::Break => return Ok(Flow::Break),
            Statement::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn if_statement(&mut self, cases: &[(Expression, Vec<Node>)], otherwise: &[Node]) -> Result<Flow, Error> {
        for (condition, nodes) in cases {
            if self.value(condition)?.is_true() {
                return self.block(nodes);
            }
        }
        self.block(otherwise)
    }

    fn for_statement(&mut self, statement: &Arc<For>, over: &Value, depth: usize) -> Result<(), Error> {
        let mut items = over.items()?;
        if let Some(condition) = &statement.condition {
            let mut kept = ListBuilder::default();
            for item in items.iter() {
                let holds = self.scoped(|interpreter| {
                    interpreter.assign(&statement.target, item.clone())?;
                    interpreter.value(condition)
                })?;
                if holds.is_true() {
                    kept.push(item.clone())?;
                }
            }
            items = kept.list(ListKind::List)?;
        }
        if items.is_empty() {
            return self.scoped(|interpreter| interpreter.block(&statement.otherwise)).map(drop);
        }
        let state = Rc::new(LoopState {
            items: items.clone(),
            at: Cell::new(0),
            depth,
            seen: RefCell::new(None),
            statement: statement.clone(),
        });
        for (at, item) in items.iter().enumerate() {
            spend(1)?;
            state.at.set(at);
            let flow = self.scoped(|interpreter| {
                interpreter.set(Symbols::LOOP, Value::Loop(state.clone()))?;
                interpreter.assign(&statement.target, item.clone())?;
                interpreter.block(&statement.body)
            })?;
            if let Flow::Break = flow {
                break;
            }
        }
        Ok(())
    }

    fn set(&mut self, name: Symbol, value: Value) -> Result<(), Error> {
        let start = *self.scopes.last().expect("the outermost scope always exists");
        let scope = &mut self.variables[start..];
        spend(1 + scope.len() / 8)?;
        match scope.iter_mut().find(|(known, _)| *known == name) {
            Some((_, held)) => *held = value,
            None => self.variables.push((name, value)),
        }
        Ok(())
    }

    fn assign(&mut self, target: &Target, value: Value) -> Result<(), Error> {
        match target {
            Target::Name(name) => self.set(*name, value),
            Target::Field(name, field) => {
                let Value::Namespace(namespace) = self.lookup(*name)? else {
                    let name = self.symbols.name(*name);
                    return failed(format!("`{name}` is not a namespace, so `{field}` cannot be set"));
                };
                set_field(&namespace, field, value)
            }
            Target::Several(targets) => {
                let items = value.items()?;
                if items.len() != targets.len() {
                    return failed(format!("{} values are assigned to {} names", items.len(), targets.len()));
                }
                for (target, item) in targets.iter().zip(items.iter()) {
                    self.assign(target, item.clone())?;
                }
                Ok(())
            }
        }
    }

    fn lookup(&self, name: Symbol) -> Result<Value, Error> {
        spend(1 + self.variables.len() / 8)?;
        if let Some((_, value)) = self.variables.iter().rev().find(|(known, _)| *known == name) {
            return Ok(value.clone());
        }
        let name = self.symbols.name(name);
        let known = FUNCTIONS.into_iter().find(|known| *known == name);
        let known = known.or((self.date.is_some() && name == STRFTIME).then_some(STRFTIME));
        Ok(known.map_or_else(|| Value::undefined(&format!("`{name}`")), Value::Function))
    }

    fn value(&mut self, expression: &Expression) -> Result<Value, Error> {
        spend(1)?;
        match expression {
            Expression::None => Ok(Value::None),
            Expression::Bool(value) => Ok(Value::Bool(*value)),
            Expression::Int(value) => Ok(Value::Int(*value)),
            Expression::Float(value) => Ok(Value::Float(*value)),
            Expression::Text(text) => Value::text(text),
            Expression::Name(name) => self.lookup(*name),
            _ => self.deeper(|interpreter| interpreter.compound(expression)),
        }
    }

    fn compound(&mut self, expression: &Expression) -> Result<Value, Error> {
        match expression {
            Expression::List(items) => self.list(items, ListKind::List),
            Expression::Tuple(items) => self.list(items, ListKind::Tuple),
            Expression::Dict(pairs) => {
                let mut dict = DictBuilder::default();
                for (key, value) in pairs {
                    let key = self.value(key)?;
                    let value = self.value(value)?;
                    dict.set(key, value)?;
                }
                dict.value()
            }
            Expression::Not(value) => Ok(Value::Bool(!self.value(value)?.is_true())),
            Expression::Negative(value) => negative(&self.value(value)?),
            Expression::Positive(value) => positive(&self.value(value)?),
            Expression::Arithmetic(first, rest) => {
                let mut value = self.value(first)?;
                let mut rest = rest.as_slice();
                while let [(operator, next), behind @ ..] = rest {
                    if let (Operator::Add, Value::Text(text), false) = (operator, &value, value.is_safe()) {
                        let text = text.clone();
                        (value, rest) = self.joined(&text, rest)?;
                        continue;
                    }
                    let next = self.value(next)?;
                    value = arithmetic(*operator, &value, &next)?;
                    rest = behind;
                }
                Ok(value)
            }
            Expression::Concat(parts) => {
                let parts = self.values(parts)?;
                concatenated(parts.iter())
            }
            Expression::And(all) => self.first_where(all, |value| !value.is_true()),
            Expression::Or(all) => self.first_where(all, Value::is_true),
            Expression::Compare(first, rest) => {
                let first = self.value(first)?;
                self.compared(first, rest).map(Value::Bool)
            }
            Expression::Choice(cases, otherwise) => {
                for (value, condition) in cases {
                    if self.value(condition)?.is_true() {
                        return self.value(value);
                    }
                }
                match otherwise {
                    Some(otherwise) => self.value(otherwise),
                    None => Ok(Value::undefined("what has no else")),
                }
            }
            Expression::Path(first, steps) => {
                let value = self.value(first)?;
                self.steps(value, steps)
            }
            _ => unreachable!("simple expressions are evaluated where they are met"),
        }
    }

    /// Whether every comparison of a chain holds.
    fn compared(&mut self, first: Value, rest: &[(Comparison, Expression)]) -> Result<bool, Error> {
        // Comparing a text with a literal, the common case, copies nothing.
        if let (Value::Text(text), [(comparison, Expression::Text(literal))]) = (&first, rest)
            && matches!(comparison, Comparison::Equal | Comparison::NotEqual)
        {
            spend_bytes(text.len().min(literal.len()))?;
            return Ok((**text == **literal) == (*comparison == Comparison::Equal));
        }
        let mut left = first;
        for (comparison, next) in rest {
            let next = self.value(next)?;
            if !holds(*comparison, &left, &next)? {
                return Ok(false);
            }
            left = next;
        }
        Ok(true)
    }

    /// Concatenates a text and the following terms that are texts, at once, and returns the remaining terms.
    fn joined<'e>(&mut self, first: &str, rest: &'e [Term]) -> Result<(Value, &'e [Term]), Error> {
        let mut sum = TextBuilder::default();
        sum.push(first)?;
        for (at, (operator, next)) in rest.iter().enumerate() {
            if *operator != Operator::Add {
                return Ok((sum.value(), &rest[at..]));
            }
            if let Expression::Text(text) = next {
                sum.push(text)?;
                continue;
            }
            let next = self.value(next)?;
            match &next {
                Value::Text(text) if !text.is_safe() => sum.push(text)?,
                other => return Ok((arithmetic(Operator::Add, &sum.value(), other)?, &rest[at + 1..])),
            }
        }
        Ok((sum.value(), &[]))
    }

    fn list(&mut self, items: &[Expression], kind: ListKind) -> Result<Value, Error> {
        let mut list = ListBuilder::default();
        for item in items {
            let item = self.value(item)?;
            list.push(item)?;
        }
        list.value(kind)
    }

    fn values(&mut self, expressions: &[Expression]) -> Result<Vec<Value>, Error> {
        expressions.iter().map(|expression| self.value(expression)).collect()
    }

    /// The first value that satisfies `holds`, or the last.
    fn first_where(&mut self, all: &[Expression], holds: impl Fn(&Value) -> bool) -> Result<Value, Error> {
        let mut value = Value::None;
        for expression in all {
            value = self.value(expression)?;
            if holds(&value) {
                break;
            }
        }
        Ok(value)
    }

    fn steps(&mut self, mut value: Value, steps: &[Step]) -> Result<Value, Error> {
        let mut steps = steps.iter().peekable();
        while let Some(step) = steps.next() {
            spend(1)?;
            value = match step {
                Step::Attribute(name) => match steps.peek() {
                    Some(Step::Call(arguments)) if methods::has(&value, name) => {
                        steps.next();
                        let args = self.arguments(arguments)?;
                        methods::call(&value, name, args)?
                    }
                    _ => attribute(&value, name)?,
                },
                Step::Item(Expression::Text(name)) => named_item(&value, name)?,
                Step::Item(key) => {
                    let key = self.value(key)?;
                    item(&value, &key)?
                }
                Step::Slice(bounds) => {
                    let mut values = [const { None }; 3];
                    for (value, bound) in values.iter_mut().zip(bounds.iter()) {
                        *value = bound.as_ref().map(|bound| self.value(bound)).transpose()?;
                    }
                    slice(&value, values)?
                }
                Step::Call(arguments) => {
                    let args = self.arguments(arguments)?;
                    self.call(&value, args, None)?
                }
                Step::Filter(name, arguments) => {
                    let args = self.arguments(arguments)?;
                    filters::apply(&value, name, args)?
                }
                Step::Test { name, arguments, is_negated } => {
                    let args = self.arguments(arguments)?;
                    Value::Bool(predicates::is(&value, name, args)? != *is_negated)
                }
            };
        }
        Ok(value)
    }

    fn arguments(&mut self, arguments: &Arguments) -> Result<Args, Error> {
        let mut args = Args { positional: self.values(&arguments.positional)?, named: Vec::new() };
        for (name, value) in &arguments.named {
            let value = self.value(value)?;
            args.named.push((name.clone(), value));
        }
        if let Some(more) = &arguments.more_positional {
            args.positional.extend(self.value(more)?.items()?.iter().cloned());
        }
        if let Some(more) = &arguments.more_named {
            let Value::Dict(more) = self.value(more)? else { return failed("`**` needs a dictionary") };
            for (name, value) in more.iter() {
                args.named.push((name.as_str().unwrap_or_default().into(), value.clone()));
            }
        }
        Ok(args)
    }

    fn macro_value(&self, definition: &Arc<Macro>, is_caller: bool) -> Value {
        Value::Macro(Rc::new(MacroValue {
            definition: definition.clone(),
            scopes: self.scopes.len(),
            is_caller,
        }))
    }

    fn call_block(&mut self, call: &Expression, body: &Arc<Macro>) -> Result<Value, Error> {
        let Expression::Path(first, steps) = call else { unreachable!("the parser wants a call") };
        let [before @ .., Step::Call(arguments)] = steps.as_slice() else {
            unreachable!("the parser wants a call")
        };
        let value = self.value(first)?;
        let value = self.steps(value, before)?;
        let args = self.arguments(arguments)?;
        let caller = self.macro_value(body, true);
        self.call(&value, args, Some(caller))
    }

    fn call(&mut self, function: &Value, args: Args, caller: Option<Value>) -> Result<Value, Error> {
        match function {
            Value::Macro(called) => self.call_macro(called, args, caller),
            Value::Method(method) => methods::call(&method.0, &method.1, args),
            Value::Function(name) => self.call_function(name, args),
            Value::Loop(state) if state.statement.is_recursive => {
                let [items] = args.take("loop", ["iterable"], 1)?;
                let (statement, depth) = (state.statement.clone(), state.depth + 1);
                let items = items.unwrap_or(Value::None);
                self.captured(|interpreter| {
                    interpreter.deeper(|interpreter| interpreter.for_statement(&statement, &items, depth))
                })
            }
            Value::Undefined(name) if name.trim_matches('`') == STRFTIME => Err(Error::NeedsDate),
            Value::Undefined(name) => failed(format!("{name} is undefined, so it cannot be called")),
            other => failed(format!("{} cannot be called", other.kind())),
        }
    }

    fn call_macro(&mut self, called: &MacroValue, args: Args, caller: Option<Value>) -> Result<Value, Error> {
        let definition = called.definition.clone();
        // A macro sees the scopes of its definition, not those of its call.
        let hidden = self.scopes.split_off(called.scopes.min(self.scopes.len()));
        let hidden_variables = hidden.first().map_or(Vec::new(), |start| self.variables.split_off(*start));
        spend(1 + hidden_variables.len() / 8)?;
        let line = self.line;
        let text = self.captured(|interpreter| {
            interpreter.scoped(|interpreter| {
                interpreter.bind(&definition, args, caller, called.is_caller)?;
                interpreter.block(&definition.body).map(drop)
            })
        });
        self.scopes.extend(hidden);
        self.variables.extend(hidden_variables);
        if text.is_ok() {
            self.line = line;
        }
        text
    }

    fn bind(
        &mut self,
        definition: &Macro,
        args: Args,
        caller: Option<Value>,
        is_caller: bool,
    ) -> Result<(), Error> {
        let Args { positional, mut named } = args;
        let mut positional = positional.into_iter();
        for (name, default) in &definition.parameters {
            spend(1 + named.len() / 8)?;
            let shown = self.symbols.name(*name);
            let by_name = named.iter().position(|(known, _)| known == shown);
            let value = match (positional.next(), by_name, default) {
                (Some(_), Some(_), _) => {
                    return failed(format!("the macro `{}` is given `{shown}` twice", definition.name));
                }
                (Some(value), None, _) => value,
                (None, Some(at), _) => named.remove(at).1,
                (None, None, Some(default)) => self.value(default)?,
                (None, None, None) => Value::undefined(&format!("parameter `{shown}`")),
            };
            self.set(*name, value)?;
        }
        let mut more = ListBuilder::default();
        positional.try_for_each(|value| more.push(value))?;
        let mut more_named = DictBuilder::default();
        for (name, value) in named {
            more_named.set(Value::text(&name)?, value)?;
        }
        if more.len() > 0 && !definition.takes_more {
            return failed(format!("the macro `{}` is given too many values", definition.name));
        }
        let more_named = more_named.value()?;
        if more_named.is_true() && !definition.takes_more_named {
            return failed(format!("the macro `{}` is given a value it does not know", definition.name));
        }
        if definition.takes_more {
            self.set(Symbols::VARARGS, more.value(ListKind::Tuple)?)?;
        }
        if definition.takes_more_named {
            self.set(Symbols::KWARGS, more_named)?;
        }
        // The block of a call sees the caller of the macro that contains it.
        match caller {
            Some(caller) => self.set(Symbols::CALLER, caller),
            None if is_caller => Ok(()),
            None => self.set(Symbols::CALLER, Value::undefined("`caller`")),
        }
    }

    fn call_function(&mut self, name: &str, args: Args) -> Result<Value, Error> {
        match name {
            "range" => {
                let numbers: Vec<Option<i128>> =
                    args.only_positional(name)?.iter().map(Value::as_int).collect();
                let list = match *numbers.as_slice() {
                    [Some(stop)] => range(0, stop, 1),
                    [Some(start), Some(stop)] => range(start, stop, 1),
                    [Some(start), Some(stop), Some(step)] => range(start, stop, step),
                    _ => return failed("range is given something other than one to three whole numbers"),
                };
                list.map(Value::List)
            }
            "dict" => dict(args),
            "namespace" => {
                let Value::Dict(fields) = dict(args)? else { unreachable!("dict makes a dictionary") };
                // Namespaces live until the end, so each costs 100 instructions, which bounds their number.
                spend(100)?;
                let namespace = Rc::new(Namespace::default());
                self.namespaces.push(namespace.clone());
                for (field, value) in fields.iter() {
                    set_field(&namespace, field.as_str().unwrap_or_default(), value.clone())?;
                }
                Ok(Value::Namespace(namespace))
            }
            "raise_exception" => {
                let [message] = args.take(name, ["message"], 1)?;
                let text = concatenated(message.iter())?;
                Err(Error::Raised(text.as_str().unwrap_or_default().into()))
            }
            _ => {
                let [format] = args.take(name, ["format"], 1)?;
                match (self.date, format.as_ref().and_then(Value::as_str)) {
                    (Some(date), Some(format)) => Value::text(&date.formatted(format)),
                    _ => failed("strftime_now needs a str"),
                }
            }
        }
    }
}

/// Sets a field of a namespace, whose bytes count until it is replaced.
fn set_field(namespace: &Namespace, field: &str, value: Value) -> Result<(), Error> {
    if field.starts_with('_') {
        return failed(format!("`{field}` begins with an underscore, which fields of a namespace may not"));
    }
    let mut fields = namespace.fields.borrow_mut();
    spend(1 + fields.len() / 8)?;
    match fields.iter_mut().find(|(known, _)| **known == *field) {
        // Drops the old value after the borrow has ended.
        Some((_, held)) => {
            let before = std::mem::replace(held, value);
            drop(fields);
            drop(before);
        }
        None => {
            let mut name = TextBuilder::default();
            name.push(field)?;
            fields.push((name.text(), value));
        }
    }
    Ok(())
}

/// `dict(other, name=value)`.
fn dict(args: Args) -> Result<Value, Error> {
    let mut out = DictBuilder::default();
    match args.positional.as_slice() {
        [] => {}
        [Value::Dict(dict)] => {
            dict.iter().try_for_each(|(key, value)| out.set(key.clone(), value.clone()))?;
        }
        [pairs] => {
            for pair in pairs.items()?.iter() {
                match &*pair.items()? {
                    [key, value] => out.set(key.clone(), value.clone())?,
                    _ => return failed("dict is given an item that is not a pair"),
                }
            }
        }
        _ => return failed("dict is given too many values"),
    }
    for (name, value) in args.named {
        out.set(Value::text(&name)?, value)?;
    }
    out.value()
}
