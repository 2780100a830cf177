//! The syntax tree of a template. Chains of operators are lists, so that long ones do not nest.

use std::collections::HashMap;
use std::sync::Arc;

/// The number of a variable's name.
pub(super) type Symbol = u32;

/// The names of all variables of a template.
#[derive(Debug)]
pub(super) struct Symbols {
    names: Vec<String>,
    numbers: HashMap<String, Symbol>,
}

impl Symbols {
    pub const LOOP: Symbol = 0;
    pub const VARARGS: Symbol = 1;
    pub const KWARGS: Symbol = 2;
    pub const CALLER: Symbol = 3;

    /// The names that the interpreter itself assigns.
    pub fn new() -> Self {
        let mut symbols = Self { names: Vec::new(), numbers: HashMap::new() };
        for name in ["loop", "varargs", "kwargs", "caller"] {
            symbols.add(name);
        }
        symbols
    }

    pub fn add(&mut self, name: &str) -> Symbol {
        if let Some(known) = self.find(name) {
            return known;
        }
        let symbol = self.names.len() as Symbol;
        self.names.push(name.into());
        self.numbers.insert(name.into(), symbol);
        symbol
    }

    pub fn find(&self, name: &str) -> Option<Symbol> {
        self.numbers.get(name).copied()
    }

    pub fn name(&self, symbol: Symbol) -> &str {
        &self.names[symbol as usize]
    }
}

#[derive(Debug)]
pub(super) enum Expression {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    Name(Symbol),
    List(Vec<Expression>),
    Tuple(Vec<Expression>),
    Dict(Vec<(Expression, Expression)>),
    Not(Box<Expression>),
    Negative(Box<Expression>),
    Positive(Box<Expression>),
    /// Operators of one precedence, from left to right.
    Arithmetic(Box<Expression>, Vec<Term>),
    /// `~`: concatenation of everything as text.
    Concat(Vec<Expression>),
    And(Vec<Expression>),
    Or(Vec<Expression>),
    Compare(Box<Expression>, Vec<(Comparison, Expression)>),
    /// `a if b else c if d else e`: each value with its condition, and the last without one.
    Choice(Vec<(Expression, Expression)>, Option<Box<Expression>>),
    /// A value and the operations on it, in order.
    Path(Box<Expression>, Vec<Step>),
}

/// A term with the operator before it.
pub(super) type Term = (Operator, Expression);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}

#[derive(Debug)]
pub(super) enum Step {
    Attribute(String),
    Item(Expression),
    Slice(Box<[Option<Expression>; 3]>),
    Call(Arguments),
    Filter(String, Arguments),
    Test { name: String, arguments: Arguments, is_negated: bool },
}

#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub positional: Vec<Expression>,
    pub named: Vec<(String, Expression)>,
    /// `*list` and `**dictionary`.
    pub more_positional: Option<Box<Expression>>,
    pub more_named: Option<Box<Expression>>,
}

/// A statement and its line in the template.
#[derive(Debug)]
pub(super) struct Node {
    pub line: u32,
    pub statement: Statement,
}

#[derive(Debug)]
pub(super) enum Statement {
    Data(String),
    Print(Expression),
    For(Arc<For>),
    /// Conditions with their blocks, and the block where none holds.
    If(Vec<(Expression, Vec<Node>)>, Vec<Node>),
    Set(Target, Expression),
    /// Assigns the text of a block, filtered.
    SetBlock(Target, Vec<Step>, Vec<Node>),
    Macro(Symbol, Arc<Macro>),
    /// A call of a macro that can call the block as `caller`.
    CallBlock(Expression, Arc<Macro>),
    FilterBlock(Vec<Step>, Vec<Node>),
    With(Vec<(Target, Expression)>, Vec<Node>),
    /// A block with variables of its own.
    Scope(Vec<Node>),
    /// `{% generation %}`: text that is learned.
    Generation(Vec<Node>),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub target: Target,
    pub over: Expression,
    pub condition: Option<Expression>,
    pub body: Vec<Node>,
    pub otherwise: Vec<Node>,
    pub is_recursive: bool,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub name: String,
    /// Parameters in order, with their defaults.
    pub parameters: Vec<(Symbol, Option<Expression>)>,
    pub body: Vec<Node>,
    /// Whether it accepts further arguments, positional and by name.
    pub takes_more: bool,
    pub takes_more_named: bool,
}

/// The target of an assignment.
#[derive(Debug)]
pub(super) enum Target {
    Name(Symbol),
    /// A field of a namespace.
    Field(Symbol, String),
    Several(Vec<Target>),
}
