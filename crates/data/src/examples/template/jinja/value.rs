//! The values of a template: Python's, as far as templates can reach them. Only namespaces are mutable.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use super::meter::{Reservation, check_text, spend, spend_bytes};
use super::syntax::{For, Macro};
use super::{Error, failed};

/// Maximum nesting of lists and dictionaries, which bounds recursion over values.
const DEEPEST: usize = 100;

/// Bytes that a text, a list or a dictionary takes besides its content.
const OVERHEAD: usize = 64;
/// Most bytes of the name of an undefined value.
const MOST_NAME: usize = 80;

#[derive(Debug, Clone)]
pub(super) enum Value {
    /// An undefined value, with its name.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Text),
    List(List),
    Dict(Dict),
    Namespace(Rc<Namespace>),
    Loop(Rc<LoopState>),
    Macro(Rc<MacroValue>),
    /// A global function, by name.
    Function(&'static str),
    /// A method of a value, by name.
    Method(Rc<(Value, Rc<str>)>),
}

/// A string.
#[derive(Debug, Clone)]
pub(super) struct Text(Rc<TextBody>);

#[derive(Debug)]
struct TextBody {
    text: String,
    is_safe: bool,
    _held: Reservation,
}

impl Text {
    /// Whether it is marked as HTML, by `safe` or `escape`: text that is added to it is then escaped.
    pub fn is_safe(&self) -> bool {
        self.0.is_safe
    }
}

impl Deref for Text {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0.text
    }
}

/// Several values in order.
#[derive(Debug, Clone)]
pub(super) struct List(Rc<ListBody>);

#[derive(Debug)]
struct ListBody {
    items: Vec<Value>,
    kind: ListKind,
    depth: usize,
    _held: Reservation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListKind {
    List,
    Tuple,
    /// A result of `groupby`: the common key, and the list of members.
    Group,
    /// `range` with its three numbers.
    Range(i128, i128, i128),
    /// A view of a dictionary, by the name of its method.
    View(&'static str),
    /// Values that can be iterated and nothing else.
    Generator,
}

impl List {
    pub fn kind(&self) -> ListKind {
        self.0.kind
    }

    /// Whether items can be accessed by index.
    pub fn is_indexed(&self) -> bool {
        !matches!(self.0.kind, ListKind::View(_) | ListKind::Generator)
    }

    pub fn is_tuple(&self) -> bool {
        matches!(self.0.kind, ListKind::Tuple | ListKind::Group)
    }
}

impl Deref for List {
    type Target = [Value];
    fn deref(&self) -> &[Value] {
        &self.0.items
    }
}

/// Pairs of a key and a value in insertion order.
#[derive(Debug, Clone)]
pub(super) struct Dict(Rc<DictBody>);

#[derive(Debug)]
struct DictBody {
    pairs: Vec<(Value, Value)>,
    depth: usize,
    _held: Reservation,
}

impl Deref for Dict {
    type Target = [(Value, Value)];
    fn deref(&self) -> &[(Value, Value)] {
        &self.0.pairs
    }
}

impl Dict {
    pub fn get(&self, key: &Value) -> Result<Option<&Value>, Error> {
        find(&self.0.pairs, key).map(|at| at.map(|at| &self.0.pairs[at].1))
    }

    /// As [`Dict::get`], for a text.
    pub fn named(&self, name: &str) -> Result<Option<&Value>, Error> {
        spend_bytes(self.len().saturating_mul(8 + name.len()))?;
        Ok(self.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value))
    }
}

fn find(pairs: &[(Value, Value)], key: &Value) -> Result<Option<usize>, Error> {
    spend(1 + pairs.len() / 8)?;
    for (at, (known, _)) in pairs.iter().enumerate() {
        if equal(known, key)? {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Mutable fields. The interpreter empties all namespaces at the end, because they may refer to one another.
#[derive(Debug, Default)]
pub(super) struct Namespace {
    pub fields: RefCell<Vec<(Text, Value)>>,
}

/// The state of a loop.
#[derive(Debug)]
pub(super) struct LoopState {
    pub items: List,
    pub at: Cell<usize>,
    pub depth: usize,
    /// The last values of `loop.changed`, as text: the values themselves could refer to the loop.
    pub seen: RefCell<Option<Text>>,
    pub statement: Arc<For>,
}

#[derive(Debug)]
pub(super) struct MacroValue {
    pub definition: Arc<Macro>,
    /// Number of scopes that are visible from its definition.
    pub scopes: usize,
    /// Whether it is the block of a `{% call %}`.
    pub is_caller: bool,
}

/// Builds a text.
#[derive(Debug, Default)]
pub(super) struct TextBuilder {
    text: String,
    is_safe: bool,
    held: Reservation,
}

impl TextBuilder {
    pub fn push(&mut self, more: &str) -> Result<(), Error> {
        check_text(self.text.len().checked_add(more.len()))?;
        let is_first = self.text.capacity() == 0;
        self.held.grow(more.len() + if is_first { OVERHEAD } else { 0 })?;
        self.text.push_str(more);
        Ok(())
    }

    pub fn push_char(&mut self, more: char) -> Result<(), Error> {
        self.push(more.encode_utf8(&mut [0; 4]))
    }

    pub fn repeat(&mut self, piece: &str, times: usize) -> Result<(), Error> {
        let more = check_text(piece.len().checked_mul(times))?;
        check_text(self.text.len().checked_add(more))?;
        self.held.grow(more)?;
        (0..times).for_each(|_| self.text.push_str(piece));
        Ok(())
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Appends a text to HTML, escaped unless it is safe, and marks the result as HTML.
    pub fn push_safe(&mut self, more: &str, is_safe: bool) -> Result<(), Error> {
        self.is_safe = true;
        let mut rest = more;
        while let Some(at) = rest.find(['&', '<', '>', '"', '\'']).filter(|_| !is_safe) {
            self.push(&rest[..at])?;
            self.push(match rest.as_bytes()[at] {
                b'&' => "&amp;",
                b'<' => "&lt;",
                b'>' => "&gt;",
                b'"' => "&#34;",
                _ => "&#39;",
            })?;
            rest = &rest[at + 1..];
        }
        self.push(rest)
    }

    pub fn text(self) -> Text {
        Text(Rc::new(TextBody { text: self.text, is_safe: self.is_safe, _held: self.held }))
    }

    pub fn value(self) -> Value {
        Value::Text(self.text())
    }

    pub fn into_string(self) -> String {
        self.text
    }
}

/// Builds a list.
#[derive(Debug, Default)]
pub(super) struct ListBuilder {
    items: Vec<Value>,
    depth: usize,
    held: Reservation,
}

impl ListBuilder {
    pub fn push(&mut self, item: Value) -> Result<(), Error> {
        self.held.grow(size_of::<Value>())?;
        self.depth = self.depth.max(item.depth());
        self.items.push(item);
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    pub fn last(&self) -> Option<&Value> {
        self.items.last()
    }

    pub fn reverse(&mut self) {
        self.items.reverse();
    }

    pub fn list(mut self, kind: ListKind) -> Result<List, Error> {
        let depth = nested(self.depth)?;
        self.held.grow(OVERHEAD)?;
        Ok(List(Rc::new(ListBody { items: self.items, kind, depth, _held: self.held })))
    }

    pub fn value(self, kind: ListKind) -> Result<Value, Error> {
        self.list(kind).map(Value::List)
    }
}

/// Builds a dictionary.
#[derive(Debug, Default)]
pub(super) struct DictBuilder {
    pairs: Vec<(Value, Value)>,
    depth: usize,
    held: Reservation,
}

impl DictBuilder {
    /// Sets a pair. An existing key keeps its position.
    pub fn set(&mut self, key: Value, value: Value) -> Result<(), Error> {
        if matches!(&key, Value::Dict(_)) || matches!(&key, Value::List(list) if !list.is_tuple()) {
            return failed(format!("{} cannot be a key", key.kind()));
        }
        self.depth = self.depth.max(value.depth()).max(key.depth());
        match find(&self.pairs, &key)? {
            Some(at) => self.pairs[at].1 = value,
            None => {
                self.held.grow(2 * size_of::<Value>())?;
                self.pairs.push((key, value));
            }
        }
        Ok(())
    }

    pub fn value(mut self) -> Result<Value, Error> {
        let depth = nested(self.depth)?;
        self.held.grow(OVERHEAD)?;
        Ok(Value::Dict(Dict(Rc::new(DictBody { pairs: self.pairs, depth, _held: self.held }))))
    }
}

/// The prefix of a text of at most `most` bytes.
pub(super) fn clipped(text: &str, most: usize) -> &str {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn nested(depth: usize) -> Result<usize, Error> {
    match depth < DEEPEST {
        true => Ok(depth + 1),
        false => Err(too_deep()),
    }
}

fn too_deep() -> Error {
    Error::Exhausted(format!("it nests values more than {DEEPEST} deep"))
}

/// Counts the depth of a walk through values; namespaces may contain themselves.
pub(super) fn deeper(depth: usize) -> Result<usize, Error> {
    // A namespace counts as one level, and so does its content.
    match depth < 2 * DEEPEST {
        true => Ok(depth + 1),
        false => Err(too_deep()),
    }
}

impl Value {
    pub fn text(text: &str) -> Result<Value, Error> {
        let mut out = TextBuilder::default();
        out.push(text)?;
        Ok(out.value())
    }

    pub fn list(items: impl IntoIterator<Item = Value>, kind: ListKind) -> Result<Value, Error> {
        let mut list = ListBuilder::default();
        items.into_iter().try_for_each(|item| list.push(item))?;
        list.value(kind)
    }

    /// An undefined value, with its name shortened for messages.
    pub fn undefined(name: &str) -> Value {
        Value::Undefined(clipped(name, MOST_NAME).into())
    }

    fn depth(&self) -> usize {
        match self {
            Value::List(list) => list.0.depth,
            Value::Dict(dict) => dict.0.depth,
            Value::Method(method) => method.0.depth(),
            Value::Loop(state) => state.items.0.depth,
            _ => 0,
        }
    }

    /// Its type, by Python's name.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "an undefined value",
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) => "an int",
            Value::Float(_) => "a float",
            Value::Text(_) => "a str",
            Value::List(list) => match list.kind() {
                ListKind::List => "a list",
                ListKind::Tuple | ListKind::Group => "a tuple",
                ListKind::Range(..) => "a range",
                ListKind::View(_) => "a view of a dict",
                ListKind::Generator => "a generator",
            },
            Value::Dict(_) => "a dict",
            Value::Namespace(_) => "a namespace",
            Value::Loop(_) => "a loop",
            Value::Macro(_) => "a macro",
            Value::Function(_) | Value::Method(_) => "a function",
        }
    }

    pub fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    pub fn is_safe(&self) -> bool {
        matches!(self, Value::Text(text) if text.is_safe())
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// As an integer: `True` is 1, as in Python.
    pub fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(value) => Some(*value),
            Value::Bool(value) => Some(i128::from(*value)),
            _ => None,
        }
    }

    pub fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(value) => Some(*value),
            other => other.as_int().map(|value| value as f64),
        }
    }

    pub fn is_true(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(value) => *value,
            Value::Int(value) => *value != 0,
            Value::Float(value) => *value != 0.0,
            Value::Text(text) => !text.is_empty(),
            Value::List(list) => list.kind() == ListKind::Generator || !list.is_empty(),
            Value::Dict(dict) => !dict.is_empty(),
            _ => true,
        }
    }

    /// The number of its characters, items or keys.
    pub fn len(&self) -> Result<usize, Error> {
        match self {
            Value::Undefined(_) => Ok(0),
            Value::Text(text) => {
                spend_bytes(text.len())?;
                Ok(text.chars().count())
            }
            Value::List(list) if list.kind() != ListKind::Generator => Ok(list.len()),
            Value::Dict(dict) => Ok(dict.len()),
            Value::Loop(state) => Ok(state.items.len()),
            other => failed(format!("{} has no length", other.kind())),
        }
    }

    /// Whether it can be iterated.
    pub fn is_iterable(&self) -> bool {
        matches!(
            self,
            Value::Undefined(_) | Value::Text(_) | Value::List(_) | Value::Dict(_) | Value::Loop(_)
        )
    }

    /// The items that iteration gives: characters, items, keys.
    pub fn items(&self) -> Result<List, Error> {
        let mut items = ListBuilder::default();
        match self {
            Value::List(list) => return Ok(list.clone()),
            Value::Undefined(_) => {}
            Value::Text(text) => {
                for character in text.chars() {
                    items.push(Value::text(character.encode_utf8(&mut [0; 4]))?)?;
                }
            }
            Value::Dict(dict) => dict.iter().try_for_each(|(key, _)| items.push(key.clone()))?,
            other => return failed(format!("{} is not iterable", other.kind())),
        }
        items.list(ListKind::List)
    }
}

/// Python's `==`.
pub(super) fn equal(a: &Value, b: &Value) -> Result<bool, Error> {
    spend(1)?;
    Ok(match (a, b) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Text(a), Value::Text(b)) => {
            spend_bytes(a.len().min(b.len()))?;
            **a == **b
        }
        (Value::List(a), Value::List(b)) => {
            if (a.kind() == ListKind::List) != (b.kind() == ListKind::List) || a.len() != b.len() {
                return Ok(false);
            }
            for (a, b) in a.iter().zip(b.iter()) {
                if !equal(a, b)? {
                    return Ok(false);
                }
            }
            true
        }
        (Value::Dict(a), Value::Dict(b)) => {
            if a.len() != b.len() {
                return Ok(false);
            }
            for (key, value) in a.iter() {
                match b.get(key)? {
                    Some(other) if equal(value, other)? => {}
                    _ => return Ok(false),
                }
            }
            true
        }
        (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
        (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
        (Value::Loop(a), Value::Loop(b)) => Rc::ptr_eq(a, b),
        (Value::Function(a), Value::Function(b)) => a == b,
        _ => match (a.as_int(), b.as_int()) {
            (Some(a), Some(b)) => a == b,
            _ => match (a.as_float(), b.as_float()) {
                (Some(a), Some(b)) => a == b,
                _ => false,
            },
        },
    })
}

/// Python's order. `None` where numbers have none, as with NaN.
pub(super) fn compare(a: &Value, b: &Value) -> Result<Option<Ordering>, Error> {
    spend(1)?;
    match (a, b) {
        (Value::Text(a), Value::Text(b)) => {
            spend_bytes(a.len().min(b.len()))?;
            Ok(Some((**a).cmp(&**b)))
        }
        (Value::List(a), Value::List(b))
            if a.is_indexed() && b.is_indexed() && a.is_tuple() == b.is_tuple() =>
        {
            for (a, b) in a.iter().zip(b.iter()) {
                if !equal(a, b)? {
                    return compare(a, b);
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        _ => match (a.as_int(), b.as_int()) {
            (Some(a), Some(b)) => Ok(Some(a.cmp(&b))),
            _ => match (a.as_float(), b.as_float()) {
                (Some(a), Some(b)) => Ok(a.partial_cmp(&b)),
                _ => failed(format!("{} and {} have no order", a.kind(), b.kind())),
            },
        },
    }
}

/// The indices of keys in stable sorted order. A merge sort of its own, because values may have no order, on which the standard
/// library may panic.
pub(super) fn sort_order(keys: &[Value], is_reversed: bool) -> Result<Vec<usize>, Error> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    let mut merged = Vec::with_capacity(order.len());
    let mut width = 1;
    while width < order.len() {
        for pair in order.chunks(2 * width) {
            let (mut left, mut right) = pair.split_at(width.min(pair.len()));
            while let ([a, left_rest @ ..], [b, right_rest @ ..]) = (left, right) {
                let (first, second) = if is_reversed { (a, b) } else { (b, a) };
                if compare(&keys[*first], &keys[*second])? == Some(Ordering::Less) {
                    merged.push(*b);
                    right = right_rest;
                } else {
                    merged.push(*a);
                    left = left_rest;
                }
            }
            merged.extend_from_slice(left);
            merged.extend_from_slice(right);
        }
        std::mem::swap(&mut order, &mut merged);
        merged.clear();
        width *= 2;
    }
    Ok(order)
}

/// Whether values are identical, as Python's `is` says for the values that templates compare with it.
pub(super) fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::Int(a), Value::Int(b)) => a == b,
        (Value::Text(a), Value::Text(b)) => **a == **b,
        (Value::List(a), Value::List(b)) => Rc::ptr_eq(&a.0, &b.0),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(&a.0, &b.0),
        (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
        _ => false,
    }
}
