//! Parses tokens to a syntax tree, by Jinja's grammar.

use std::sync::Arc;

use super::lexer::{Token, lex};
use super::syntax::{
    Arguments, Comparison, Expression, For, Macro, Node, Operator, Statement, Step, Symbol, Symbols, Target,
};
use super::{Error, Jinja, syntax_error};

/// Maximum nesting of blocks and brackets.
const DEEPEST: usize = 60;

/// Parses a template.
pub(super) fn parse(source: &str) -> Result<Jinja, Error> {
    let mut parser = Parser {
        tokens: lex(source)?,
        at: 0,
        depth: 0,
        loops: 0,
        has_generation: false,
        names: [false; 2],
        symbols: Symbols::new(),
    };
    let nodes = parser.nodes(&[])?;
    match parser.peek() {
        Token::End => Ok(Jinja { nodes, symbols: parser.symbols, has_generation: parser.has_generation }),
        _ => parser.wrong("something follows the end of the template"),
    }
}

struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    depth: usize,
    /// Number of loops around the statement, within its macro.
    loops: usize,
    has_generation: bool,
    /// Whether the macro reads `varargs` and `kwargs`.
    names: [bool; 2],
    symbols: Symbols,
}

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn peek_second(&self) -> &Token {
        &self.tokens[(self.at + 1).min(self.tokens.len() - 1)].0
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    fn next(&mut self) -> Token {
        let last = self.tokens.len() - 1;
        let token = std::mem::replace(&mut self.tokens[self.at].0, Token::End);
        if self.at < last {
            self.at += 1;
        }
        token
    }

    fn wrong<T>(&self, message: impl Into<String>) -> Result<T, Error> {
        Err(syntax_error(message.into(), self.line()))
    }

    fn unexpected<T>(&self, wanted: &str) -> Result<T, Error> {
        let found = match self.peek() {
            Token::Data(_) | Token::PrintBegin | Token::BlockBegin => "a tag".to_string(),
            Token::PrintEnd | Token::BlockEnd => "the end of the tag".into(),
            Token::Name(name) => format!("`{name}`"),
            Token::Text(_) => "a string".into(),
            Token::Int(_) | Token::Float(_) => "a number".into(),
            Token::Symbol(symbol) => format!("`{symbol}`"),
            Token::End => "the end of the template".into(),
        };
        self.wrong(format!("{wanted} was expected, not {found}"))
    }

    fn is_symbol(&self, symbol: &str) -> bool {
        matches!(self.peek(), Token::Symbol(found) if *found == symbol)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if found == name)
    }

    fn skip_symbol(&mut self, symbol: &str) -> bool {
        let is_there = self.is_symbol(symbol);
        if is_there {
            self.next();
        }
        is_there
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let is_there = self.is_name(name);
        if is_there {
            self.next();
        }
        is_there
    }

    fn expect_symbol(&mut self, symbol: &str) -> Result<(), Error> {
        if self.skip_symbol(symbol) { Ok(()) } else { self.unexpected(&format!("`{symbol}`")) }
    }

    fn expect_name(&mut self, name: &str) -> Result<(), Error> {
        if self.skip_name(name) { Ok(()) } else { self.unexpected(&format!("`{name}`")) }
    }

    fn name(&mut self) -> Result<String, Error> {
        match self.peek() {
            Token::Name(_) => {
                let Token::Name(name) = self.next() else { unreachable!("the token was just peeked") };
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn end_of_block(&mut self) -> Result<(), Error> {
        match self.peek() {
            Token::BlockEnd => {
                self.next();
                Ok(())
            }
            _ => self.unexpected("the end of the tag"),
        }
    }

    fn too_deep<T>(&self) -> Result<T, Error> {
        self.wrong(format!("blocks and brackets are nested more than {DEEPEST} deep"))
    }

    /// Runs `parse` one level deeper.
    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.depth == DEEPEST {
            return self.too_deep();
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    /// Statements up to a tag that begins with one of these names, which is left for the caller; without names, all statements.
    fn nodes(&mut self, ends: &[&str]) -> Result<Vec<Node>, Error> {
        self.nested(|parser| parser.nodes_here(ends))
    }

    fn nodes_here(&mut self, ends: &[&str]) -> Result<Vec<Node>, Error> {
        let mut nodes = Vec::new();
        loop {
            let line = self.line();
            let statement = match self.peek() {
                Token::End if ends.is_empty() => return Ok(nodes),
                Token::End => return self.unexpected(&format!("`{}`", ends[ends.len() - 1])),
                Token::Data(_) => {
                    let Token::Data(text) = self.next() else { unreachable!("the token was just peeked") };
                    Statement::Data(text)
                }
                Token::PrintBegin => {
                    self.next();
                    let printed = self.tuple(true)?;
                    match self.peek() {
                        Token::PrintEnd => drop(self.next()),
                        _ => return self.unexpected("`}}`"),
                    }
                    Statement::Print(printed)
                }
                Token::BlockBegin => {
                    self.next();
                    if let Token::Name(name) = self.peek()
                        && ends.contains(&name.as_str())
                    {
                        return Ok(nodes);
                    }
                    self.statement()?
                }
                _ => return self.unexpected("a tag"),
            };
            nodes.push(Node { line, statement });
        }
    }

    /// The body of a block and its closing tag.
    fn body(&mut self, end: &str) -> Result<Vec<Node>, Error> {
        self.end_of_block()?;
        let nodes = self.nodes(&[end])?;
        self.expect_name(end)?;
        Ok(nodes)
    }

    fn closed_body(&mut self, end: &str) -> Result<Vec<Node>, Error> {
        let nodes = self.body(end)?;
        self.end_of_block()?;
        Ok(nodes)
    }

    fn statement(&mut self) -> Result<Statement, Error> {
        let name = self.name()?;
        match name.as_str() {
            "for" => self.for_statement(),
            "if" => self.if_statement(),
            "set" => self.set_statement(),
            "macro" => self.macro_statement(),
            "call" => self.call_statement(),
            "filter" => {
                let steps = self.filters(true)?;
                Ok(Statement::FilterBlock(steps, self.closed_body("endfilter")?))
            }
            "with" => {
                let mut assigned = Vec::new();
                while *self.peek() != Token::BlockEnd {
                    if !assigned.is_empty() {
                        self.expect_symbol(",")?;
                    }
                    let target = self.target(false)?;
                    self.expect_symbol("=")?;
                    assigned.push((target, self.expression()?));
                }
                Ok(Statement::With(assigned, self.closed_body("endwith")?))
            }
            "block" => {
                self.name()?;
                while self.skip_name("scoped") || self.skip_name("required") {}
                let nodes = self.body("endblock")?;
                if matches!(self.peek(), Token::Name(_)) {
                    self.next();
                }
                self.end_of_block()?;
                Ok(Statement::Scope(nodes))
            }
            "autoescape" => {
                self.expression()?;
                Ok(Statement::Scope(self.closed_body("endautoescape")?))
            }
            "generation" => {
                self.has_generation = true;
                let loops = std::mem::take(&mut self.loops);
                let body = self.closed_body("endgeneration")?;
                self.loops = loops;
                Ok(Statement::Generation(body))
            }
            "break" | "continue" => {
                if self.loops == 0 {
                    return self.wrong(format!("`{name}` is outside of a loop"));
                }
                self.end_of_block()?;
                Ok(if name == "break" { Statement::Break } else { Statement::Continue })
            }
            "include" | "import" | "from" | "extends" => {
                self.wrong(format!("`{name}` needs another template, which a chat template cannot have"))
            }
            _ => self.wrong(format!("`{name}` is not a statement")),
        }
    }

    fn for_statement(&mut self) -> Result<Statement, Error> {
        let target = self.target(false)?;
        self.expect_name("in")?;
        let over = self.tuple(false)?;
        let condition = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let is_recursive = self.skip_name("recursive");
        self.end_of_block()?;
        let loops = self.loops;
        self.loops += 1;
        let body = self.nodes(&["else", "endfor"])?;
        self.loops = loops;
        let otherwise = match self.skip_name("else") {
            true => self.body("endfor")?,
            false => {
                self.expect_name("endfor")?;
                Vec::new()
            }
        };
        self.end_of_block()?;
        Ok(Statement::For(Arc::new(For { target, over, condition, body, otherwise, is_recursive })))
    }

    fn if_statement(&mut self) -> Result<Statement, Error> {
        let mut cases = Vec::new();
        loop {
            let condition = self.tuple(false)?;
            self.end_of_block()?;
            cases.push((condition, self.nodes(&["elif", "else", "endif"])?));
            if self.skip_name("elif") {
                continue;
            }
            let otherwise = match self.skip_name("else") {
                true => self.body("endif")?,
                false => {
                    self.expect_name("endif")?;
                    Vec::new()
                }
            };
            self.end_of_block()?;
            return Ok(Statement::If(cases, otherwise));
        }
    }

    fn set_statement(&mut self) -> Result<Statement, Error> {
        let target = self.target(true)?;
        if self.skip_symbol("=") {
            let value = self.tuple(true)?;
            self.end_of_block()?;
            return Ok(Statement::Set(target, value));
        }
        let steps = self.filters(false)?;
        Ok(Statement::SetBlock(target, steps, self.closed_body("endset")?))
    }

    /// Filters, each after a `|`; the first one without it where `is_bare`.
    fn filters(&mut self, is_bare: bool) -> Result<Vec<Step>, Error> {
        let mut steps = Vec::new();
        let mut is_bare = is_bare;
        while is_bare || self.is_symbol("|") {
            if !is_bare {
                self.next();
            }
            is_bare = false;
            steps.push(self.filter()?);
        }
        Ok(steps)
    }

    fn macro_statement(&mut self) -> Result<Statement, Error> {
        let name = self.name()?;
        self.expect_symbol("(")?;
        let parameters = self.parameters()?;
        let symbol = self.symbols.add(&name);
        Ok(Statement::Macro(symbol, self.macro_body("endmacro", name, parameters)?))
    }

    fn macro_body(
        &mut self,
        end: &str,
        name: String,
        parameters: Vec<(Symbol, Option<Expression>)>,
    ) -> Result<Arc<Macro>, Error> {
        let loops = std::mem::take(&mut self.loops);
        let names = std::mem::take(&mut self.names);
        let body = self.body(end)?;
        let [takes_more, takes_more_named] = std::mem::replace(&mut self.names, names);
        self.loops = loops;
        // The name of the macro may be repeated.
        if matches!(self.peek(), Token::Name(_)) {
            self.next();
        }
        self.end_of_block()?;
        Ok(Arc::new(Macro { name, parameters, body, takes_more, takes_more_named }))
    }

    fn parameters(&mut self) -> Result<Vec<(Symbol, Option<Expression>)>, Error> {
        let mut parameters: Vec<(Symbol, Option<Expression>)> = Vec::new();
        while !self.skip_symbol(")") {
            if !parameters.is_empty() {
                self.expect_symbol(",")?;
            }
            let name = self.name()?;
            let default = if self.skip_symbol("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return self.wrong("a parameter without a default follows one that has one");
            }
            parameters.push((self.symbols.add(&name), default));
        }
        Ok(parameters)
    }

    fn call_statement(&mut self) -> Result<Statement, Error> {
        let parameters = if self.skip_symbol("(") { self.parameters()? } else { Vec::new() };
        let call = self.expression()?;
        if !matches!(&call, Expression::Path(_, steps) if matches!(steps.last(), Some(Step::Call(_)))) {
            return self.unexpected("a call");
        }
        Ok(Statement::CallBlock(call, self.macro_body("endcall", "caller".into(), parameters)?))
    }

    fn target(&mut self, may_be_field: bool) -> Result<Target, Error> {
        let mut targets = vec![self.single_target(may_be_field)?];
        let mut is_tuple = false;
        while self.skip_symbol(",") {
            is_tuple = true;
            if !matches!(self.peek(), Token::Name(_)) && !self.is_symbol("(") || self.is_name("in") {
                break;
            }
            targets.push(self.single_target(may_be_field)?);
        }
        match is_tuple {
            true => Ok(Target::Several(targets)),
            false => Ok(targets.remove(0)),
        }
    }

    fn single_target(&mut self, may_be_field: bool) -> Result<Target, Error> {
        if self.skip_symbol("(") {
            let target = self.nested(|parser| parser.target(may_be_field))?;
            self.expect_symbol(")")?;
            return Ok(target);
        }
        let name = self.name()?;
        if matches!(name.as_str(), "true" | "false" | "none" | "True" | "False" | "None") {
            return self.wrong(format!("`{name}` cannot be assigned to"));
        }
        let symbol = self.symbols.add(&name);
        if may_be_field && self.skip_symbol(".") {
            return Ok(Target::Field(symbol, self.name()?));
        }
        Ok(Target::Name(symbol))
    }

    /// An expression, or several separated by commas. `with_choice` allows `a if b`.
    fn tuple(&mut self, with_choice: bool) -> Result<Expression, Error> {
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            if self.ends_tuple() {
                break;
            }
            items.push(self.nested(|parser| match with_choice {
                true => parser.choice(),
                false => parser.or(),
            })?);
            if !self.skip_symbol(",") {
                break;
            }
            is_tuple = true;
        }
        match (is_tuple, items.len()) {
            (false, 1) => Ok(items.remove(0)),
            (false, _) => self.unexpected("an expression"),
            (true, _) => Ok(Expression::Tuple(items)),
        }
    }

    fn ends_tuple(&self) -> bool {
        matches!(self.peek(), Token::PrintEnd | Token::BlockEnd | Token::End | Token::Symbol(")"))
    }

    fn expression(&mut self) -> Result<Expression, Error> {
        self.nested(Self::choice)
    }

    fn choice(&mut self) -> Result<Expression, Error> {
        let mut value = self.or()?;
        let mut depth = self.depth;
        while self.skip_name("if") {
            // A condition without `else` nests inside the next one.
            depth += 1;
            if depth > DEEPEST {
                return self.too_deep();
            }
            let mut cases = vec![(value, self.or()?)];
            let mut otherwise = None;
            while self.skip_name("else") {
                let next = self.or()?;
                if self.skip_name("if") {
                    cases.push((next, self.or()?));
                } else {
                    otherwise = Some(Box::new(next));
                    break;
                }
            }
            value = Expression::Choice(cases, otherwise);
        }
        Ok(value)
    }

    fn or(&mut self) -> Result<Expression, Error> {
        let mut all = vec![self.and()?];
        while self.skip_name("or") {
            all.push(self.and()?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Expression::Or(all) })
    }

    fn and(&mut self) -> Result<Expression, Error> {
        let mut all = vec![self.not()?];
        while self.skip_name("and") {
            all.push(self.not()?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Expression::And(all) })
    }

    fn not(&mut self) -> Result<Expression, Error> {
        let mut is_negated = None;
        while self.skip_name("not") {
            is_negated = Some(!is_negated.unwrap_or(false));
        }
        let value = self.comparison()?;
        let not = |value| Expression::Not(Box::new(value));
        Ok(match is_negated {
            None => value,
            Some(true) => not(value),
            Some(false) => not(not(value)),
        })
    }

    fn comparison(&mut self) -> Result<Expression, Error> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let comparison = match self.peek() {
                Token::Symbol("==") => Comparison::Equal,
                Token::Symbol("!=") => Comparison::NotEqual,
                Token::Symbol("<") => Comparison::Less,
                Token::Symbol("<=") => Comparison::LessOrEqual,
                Token::Symbol(">") => Comparison::Greater,
                Token::Symbol(">=") => Comparison::GreaterOrEqual,
                Token::Name(name) if name == "in" => Comparison::In,
                Token::Name(name)
                    if name == "not" && matches!(self.peek_second(), Token::Name(name) if name == "in") =>
                {
                    self.next();
                    Comparison::NotIn
                }
                _ => break,
            };
            self.next();
            rest.push((comparison, self.sum()?));
        }
        Ok(if rest.is_empty() { first } else { Expression::Compare(Box::new(first), rest) })
    }

    /// Operators of one precedence, from left to right.
    fn arithmetic(
        &mut self,
        operators: &[(&str, Operator)],
        operand: fn(&mut Self) -> Result<Expression, Error>,
    ) -> Result<Expression, Error> {
        let first = operand(self)?;
        let mut rest = Vec::new();
        while let Some((_, operator)) = operators.iter().find(|(symbol, _)| self.is_symbol(symbol)) {
            self.next();
            rest.push((*operator, operand(self)?));
        }
        Ok(if rest.is_empty() { first } else { Expression::Arithmetic(Box::new(first), rest) })
    }

    fn sum(&mut self) -> Result<Expression, Error> {
        self.arithmetic(&[("+", Operator::Add), ("-", Operator::Subtract)], Self::concatenation)
    }

    fn concatenation(&mut self) -> Result<Expression, Error> {
        let mut all = vec![self.product()?];
        while self.skip_symbol("~") {
            all.push(self.product()?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Expression::Concat(all) })
    }

    fn product(&mut self) -> Result<Expression, Error> {
        let operators = [
            ("*", Operator::Multiply),
            ("/", Operator::Divide),
            ("//", Operator::FloorDivide),
            ("%", Operator::Remainder),
        ];
        self.arithmetic(&operators, Self::power)
    }

    fn power(&mut self) -> Result<Expression, Error> {
        self.arithmetic(&[("**", Operator::Power)], |parser| parser.unary(true))
    }

    fn unary(&mut self, with_filters: bool) -> Result<Expression, Error> {
        let value = if self.skip_symbol("-") {
            Expression::Negative(Box::new(self.nested(|parser| parser.unary(false))?))
        } else if self.skip_symbol("+") {
            Expression::Positive(Box::new(self.nested(|parser| parser.unary(false))?))
        } else {
            self.primary()?
        };
        let mut steps = Vec::new();
        self.postfixes(&mut steps)?;
        if with_filters {
            self.filters_and_tests(&mut steps)?;
        }
        Ok(if steps.is_empty() { value } else { Expression::Path(Box::new(value), steps) })
    }

    fn primary(&mut self) -> Result<Expression, Error> {
        match self.peek() {
            Token::Name(_) => {
                let name = self.name()?;
                Ok(match name.as_str() {
                    "true" | "True" => Expression::Bool(true),
                    "false" | "False" => Expression::Bool(false),
                    "none" | "None" => Expression::None,
                    _ => {
                        let symbol = self.symbols.add(&name);
                        self.names[0] |= symbol == Symbols::VARARGS;
                        self.names[1] |= symbol == Symbols::KWARGS;
                        Expression::Name(symbol)
                    }
                })
            }
            Token::Text(_) => {
                let mut text = String::new();
                // Adjacent string literals are concatenated.
                while matches!(self.peek(), Token::Text(_)) {
                    let Token::Text(more) = self.next() else { unreachable!("the token was just peeked") };
                    text.push_str(&more);
                }
                Ok(Expression::Text(text))
            }
            Token::Int(value) => {
                let value = *value;
                self.next();
                Ok(Expression::Int(value))
            }
            Token::Float(value) => {
                let value = *value;
                self.next();
                Ok(Expression::Float(value))
            }
            Token::Symbol("(") => {
                self.next();
                if self.skip_symbol(")") {
                    return Ok(Expression::Tuple(Vec::new()));
                }
                let inside = self.tuple(true)?;
                self.expect_symbol(")")?;
                Ok(inside)
            }
            Token::Symbol("[") => {
                self.next();
                let mut items = Vec::new();
                while !self.skip_symbol("]") {
                    if !items.is_empty() {
                        self.expect_symbol(",")?;
                        if self.skip_symbol("]") {
                            break;
                        }
                    }
                    items.push(self.expression()?);
                }
                Ok(Expression::List(items))
            }
            Token::Symbol("{") => {
                self.next();
                let mut pairs = Vec::new();
                while !self.skip_symbol("}") {
                    if !pairs.is_empty() {
                        self.expect_symbol(",")?;
                        if self.skip_symbol("}") {
                            break;
                        }
                    }
                    let key = self.expression()?;
                    self.expect_symbol(":")?;
                    pairs.push((key, self.expression()?));
                }
                Ok(Expression::Dict(pairs))
            }
            _ => self.unexpected("an expression"),
        }
    }

    fn postfixes(&mut self, steps: &mut Vec<Step>) -> Result<(), Error> {
        loop {
            if self.skip_symbol(".") {
                steps.push(match self.peek() {
                    Token::Int(place) => {
                        let place = Expression::Int(*place);
                        self.next();
                        Step::Item(place)
                    }
                    _ => Step::Attribute(self.name()?),
                });
            } else if self.skip_symbol("[") {
                steps.push(self.subscript()?);
            } else if self.is_symbol("(") {
                steps.push(Step::Call(self.arguments()?));
            } else {
                return Ok(());
            }
        }
    }

    fn subscript(&mut self) -> Result<Step, Error> {
        let ends = |parser: &Self| parser.is_symbol("]") || parser.is_symbol(",") || parser.is_symbol(":");
        let first = if self.is_symbol(":") { None } else { Some(self.expression()?) };
        let step = if self.skip_symbol(":") {
            let stop = if ends(self) { None } else { Some(self.expression()?) };
            let step = if self.skip_symbol(":") && !ends(self) { Some(self.expression()?) } else { None };
            Step::Slice(Box::new([first, stop, step]))
        } else {
            let first = first.expect("only a slice begins with a colon");
            if !self.is_symbol(",") {
                Step::Item(first)
            } else {
                let mut items = vec![first];
                while self.skip_symbol(",") {
                    items.push(self.expression()?);
                }
                Step::Item(Expression::Tuple(items))
            }
        };
        self.expect_symbol("]")?;
        Ok(step)
    }

    fn arguments(&mut self) -> Result<Arguments, Error> {
        self.expect_symbol("(")?;
        let mut arguments = Arguments::default();
        let mut is_first = true;
        while !self.skip_symbol(")") {
            if !is_first {
                self.expect_symbol(",")?;
                if self.skip_symbol(")") {
                    break;
                }
            }
            is_first = false;
            if self.skip_symbol("*") {
                arguments.more_positional = Some(Box::new(self.expression()?));
            } else if self.skip_symbol("**") {
                arguments.more_named = Some(Box::new(self.expression()?));
            } else if matches!(self.peek(), Token::Name(_)) && *self.peek_second() == Token::Symbol("=") {
                let name = self.name()?;
                self.next();
                arguments.named.push((name, self.expression()?));
            } else if arguments.named.is_empty()
                && arguments.more_positional.is_none()
                && arguments.more_named.is_none()
            {
                arguments.positional.push(self.expression()?);
            } else {
                return self.wrong("a positional argument follows a named one");
            }
        }
        Ok(arguments)
    }

    fn optional_arguments(&mut self) -> Result<Arguments, Error> {
        if self.is_symbol("(") { self.arguments() } else { Ok(Arguments::default()) }
    }

    fn dotted_name(&mut self) -> Result<String, Error> {
        let mut name = self.name()?;
        while self.skip_symbol(".") {
            name.push('.');
            name.push_str(&self.name()?);
        }
        Ok(name)
    }

    fn filter(&mut self) -> Result<Step, Error> {
        let name = self.dotted_name()?;
        Ok(Step::Filter(name, self.optional_arguments()?))
    }

    fn filters_and_tests(&mut self, steps: &mut Vec<Step>) -> Result<(), Error> {
        loop {
            if self.skip_symbol("|") {
                steps.push(self.filter()?);
            } else if self.is_name("is") {
                self.next();
                steps.push(self.test()?);
            } else if self.is_symbol("(") {
                steps.push(Step::Call(self.arguments()?));
            } else {
                return Ok(());
            }
        }
    }

    fn test(&mut self) -> Result<Step, Error> {
        let is_negated = self.skip_name("not");
        let name = self.dotted_name()?;
        let takes_next = match self.peek() {
            Token::Name(name) => {
                if name == "is" {
                    return self.wrong("tests with `is` cannot be chained");
                }
                !matches!(name.as_str(), "else" | "or" | "and")
            }
            Token::Text(_) | Token::Int(_) | Token::Float(_) | Token::Symbol("[" | "{") => true,
            _ => false,
        };
        let arguments = match takes_next {
            false => self.optional_arguments()?,
            true => {
                let value = self.nested(Self::primary)?;
                let mut steps = Vec::new();
                self.postfixes(&mut steps)?;
                let value = if steps.is_empty() { value } else { Expression::Path(Box::new(value), steps) };
                Arguments { positional: vec![value], ..Arguments::default() }
            }
        };
        Ok(Step::Test { name, arguments, is_negated })
    }
}
