//! Files that Python's `pickle` wrote, read as data alone.
//!
//! A pickle is a program for a machine with a stack, and what it names may be called: reading one the usual way runs
//! whatever its author wanted. Here nothing is ever called. Instructions that make numbers, texts, lists, tuples and
//! dictionaries make them; those that name, call or fill an object only note that they would, and whoever reads the result
//! recognises the few shapes it knows. Every other instruction ends the reading.

use std::collections::HashMap;

/// The values of a file, by their numbers.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    values: Vec<Value<'a>>,
    /// The number of the value that the file is about.
    pub root: usize,
}

/// A value; values inside it are named by their numbers.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Whole(i64),
    Bytes(&'a [u8]),
    Text(&'a str),
    List(Vec<usize>),
    Tuple(Vec<usize>),
    Dictionary(Vec<(usize, usize)>),
    /// Something of a module.
    Name {
        module: &'a str,
        name: &'a str,
    },
    /// A call that was not made: of what, with which tuple.
    Call {
        called: usize,
        with: usize,
    },
    /// An object that was not filled: the call that would make it, and its contents.
    Filled {
        made_by: usize,
        contents: usize,
    },
}

/// Values that a file may have. CIFAR-100's has 150,000.
const MOST_VALUES: usize = 1 << 20;

impl<'a> Pickle<'a> {
    /// Reads a file, of protocols 2 to 5.
    pub fn read(bytes: &'a [u8]) -> Result<Self, String> {
        Machine {
            rest: bytes,
            values: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        }
        .run()
    }

    /// Whether bytes begin as such a file does.
    pub fn begins(bytes: &[u8]) -> bool {
        matches!(bytes, [PROTOCOL, 2..=5, ..])
    }

    pub fn get(&self, number: usize) -> &Value<'a> {
        &self.values[number]
    }

    /// The values of a tuple or list.
    pub fn inside(&self, number: usize) -> Option<&[usize]> {
        match self.get(number) {
            Value::Tuple(inside) | Value::List(inside) => Some(inside),
            _ => None,
        }
    }

    /// A call that was not made: its function and its arguments.
    pub fn call(&self, number: usize) -> Option<(&'a str, &'a str, &[usize])> {
        let Value::Call { called, with } = *self.get(number) else { return None };
        let Value::Name { module, name } = *self.get(called) else { return None };
        Some((module, name, self.inside(with)?))
    }
}

const PROTOCOL: u8 = 0x80;

struct Machine<'a> {
    rest: &'a [u8],
    values: Vec<Value<'a>>,
    stack: Vec<usize>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<usize, usize>,
}

impl<'a> Machine<'a> {
    fn run(mut self) -> Result<Pickle<'a>, String> {
        loop {
            let instruction = self.taken(1)?[0];
            match instruction {
                // The protocol, the length of what follows, and the end.
                PROTOCOL => drop(self.taken(1)?),
                0x95 => drop(self.taken(8)?),
                b'.' => {
                    let root = self.popped()?;
                    return Ok(Pickle { values: self.values, root });
                }
                b'N' => self.push(Value::None)?,
                0x88 => self.push(Value::Whole(1))?,
                0x89 => self.push(Value::Whole(0))?,
                b'K' => self.whole(1)?,
                b'M' => self.whole(2)?,
                b'J' => {
                    let four = self.taken(4)?.try_into().expect("four bytes");
                    self.push(Value::Whole(i32::from_le_bytes(four).into()))?;
                }
                b'U' | b'C' => self.bytes(1)?,
                b'T' | b'B' => self.bytes(4)?,
                // Bytes, and bytes that may be changed.
                0x8e | 0x96 => self.bytes(8)?,
                0x8c => self.text(1)?,
                b'X' => self.text(4)?,
                b']' => self.push(Value::List(vec![]))?,
                b'}' => self.push(Value::Dictionary(vec![]))?,
                b')' => self.push(Value::Tuple(vec![]))?,
                0x85..=0x87 => {
                    let from = self.height_below(usize::from(instruction - 0x84))?;
                    self.tuple(from)?;
                }
                b't' => {
                    let from = self.mark()?;
                    self.tuple(from)?;
                }
                b'(' => self.marks.push(self.stack.len()),
                b'a' => {
                    let from = self.height_below(1)?;
                    self.append(from)?;
                }
                b'e' => {
                    let from = self.mark()?;
                    self.append(from)?;
                }
                b's' => {
                    let from = self.height_below(2)?;
                    self.set(from)?;
                }
                b'u' => {
                    let from = self.mark()?;
                    self.set(from)?;
                }
                b'q' => {
                    let place = self.number(1)?;
                    self.keep(place)?;
                }
                b'r' => {
                    let place = self.number(4)?;
                    self.keep(place)?;
                }
                0x94 => self.keep(self.memo.len())?,
                b'h' => self.recall(1)?,
                b'j' => self.recall(4)?,
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.push(Value::Name { module, name })?;
                }
                0x93 => {
                    let (name, module) = (self.popped()?, self.popped()?);
                    match (&self.values[module], &self.values[name]) {
                        (&Value::Text(module), &Value::Text(name)) => {
                            self.push(Value::Name { module, name })?
                        }
                        _ => return Err("a name in it is not text".into()),
                    }
                }
                b'R' => {
                    let (with, called) = (self.popped()?, self.popped()?);
                    self.push(Value::Call { called, with })?;
                }
                b'b' => {
                    let contents = self.popped()?;
                    let object = self.top()?;
                    // Everyone who knows the object sees that it is filled, and the call moves to a number of its own.
                    let made_by = self.values.len();
                    let call =
                        std::mem::replace(&mut self.values[object], Value::Filled { made_by, contents });
                    self.add(call)?;
                }
                other => {
                    return Err(format!("it has the instruction {other:#04x}, which no file of CIFAR has"));
                }
            }
        }
    }

    fn taken(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or("it is cut short")?;
        self.rest = rest;
        Ok(taken)
    }

    /// A number without a sign, its lowest byte first.
    fn number(&mut self, bytes: usize) -> Result<usize, String> {
        let bytes = self.taken(bytes)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let end = memchr::memchr(b'\n', self.rest).ok_or("it is cut short")?;
        let line = self.taken(end + 1)?;
        std::str::from_utf8(&line[..end]).map_err(|_| "a name in it is not UTF-8".into())
    }

    fn add(&mut self, value: Value<'a>) -> Result<(), String> {
        if self.values.len() >= MOST_VALUES {
            return Err(format!("it has more than {MOST_VALUES} values"));
        }
        self.values.push(value);
        Ok(())
    }

    fn push(&mut self, value: Value<'a>) -> Result<(), String> {
        self.add(value)?;
        self.stack.push(self.values.len() - 1);
        Ok(())
    }

    fn whole(&mut self, bytes: usize) -> Result<(), String> {
        let number = self.number(bytes)?;
        self.push(Value::Whole(number as i64))
    }

    /// Bytes behind their length.
    fn bytes(&mut self, length_bytes: usize) -> Result<(), String> {
        let length = self.number(length_bytes)?;
        let bytes = self.taken(length)?;
        self.push(Value::Bytes(bytes))
    }

    fn text(&mut self, length_bytes: usize) -> Result<(), String> {
        let length = self.number(length_bytes)?;
        let text = std::str::from_utf8(self.taken(length)?).map_err(|_| "a text in it is not UTF-8")?;
        self.push(Value::Text(text))
    }

    /// The number on top of the stack, above the last mark.
    fn top(&self) -> Result<usize, String> {
        self.height_below(1).map(|place| self.stack[place])
    }

    fn popped(&mut self) -> Result<usize, String> {
        let place = self.height_below(1)?;
        Ok(self.stack.remove(place))
    }

    /// The place of the stack below which `count` values above the last mark lie.
    fn height_below(&self, count: usize) -> Result<usize, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack
            .len()
            .checked_sub(count)
            .filter(|height| *height >= floor)
            .ok_or("it takes what it has not made".into())
    }

    fn mark(&mut self) -> Result<usize, String> {
        self.marks.pop().ok_or("it takes what it has not made".into())
    }

    fn tuple(&mut self, from: usize) -> Result<(), String> {
        let inside = self.stack.split_off(from);
        self.push(Value::Tuple(inside))
    }

    fn append(&mut self, from: usize) -> Result<(), String> {
        let added = self.stack.split_off(from);
        let list = self.top()?;
        match &mut self.values[list] {
            Value::List(list) => {
                list.extend(added);
                Ok(())
            }
            _ => Err("it appends to something other than a list".into()),
        }
    }

    fn set(&mut self, from: usize) -> Result<(), String> {
        let added = self.stack.split_off(from);
        let dictionary = self.top()?;
        match &mut self.values[dictionary] {
            Value::Dictionary(pairs) if added.len().is_multiple_of(2) => {
                pairs.extend(added.chunks_exact(2).map(|pair| (pair[0], pair[1])));
                Ok(())
            }
            _ => Err("it sets keys of something other than a dictionary".into()),
        }
    }

    fn keep(&mut self, place: usize) -> Result<(), String> {
        let top = self.top()?;
        self.memo.insert(place, top);
        Ok(())
    }

    fn recall(&mut self, bytes: usize) -> Result<(), String> {
        let place = self.number(bytes)?;
        let number = *self.memo.get(&place).ok_or("it takes what it has not kept")?;
        self.stack.push(number);
        Ok(())
    }
}
