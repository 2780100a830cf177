//! Reads files of Python's `pickle` as data only.
//!
//! A pickle is a program for a stack machine that may name and call functions, so unpickling runs whatever its author wanted.
//! Here nothing is ever called. Opcodes that build numbers, texts, lists, tuples and dictionaries are executed; those that
//! name, call or build objects only record it, and the reader of the result recognises the few shapes it knows. Every other
//! opcode is an error.

use std::collections::HashMap;

/// The values of a file, by number.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    values: Vec<Value<'a>>,
    /// The number of the top-level value.
    pub root: usize,
}

/// A value; nested values are referred to by number.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Whole(i64),
    Bytes(&'a [u8]),
    Text(&'a str),
    List(Vec<usize>),
    Tuple(Vec<usize>),
    Dictionary(Vec<(usize, usize)>),
    /// A global of a module.
    Global {
        module: &'a str,
        name: &'a str,
    },
    /// A recorded call: the function and the tuple of arguments.
    Call {
        called: usize,
        with: usize,
    },
    /// A recorded BUILD: the call that would create the object, and its state.
    Built {
        created_by: usize,
        contents: usize,
    },
}

/// Most values of a file. CIFAR-100's has 150,000.
const MOST_VALUES: usize = 1 << 20;

impl<'a> Pickle<'a> {
    /// Reads a file of protocols 2 to 5.
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

    /// Whether bytes begin like such a file.
    pub fn begins(bytes: &[u8]) -> bool {
        matches!(bytes, [PROTOCOL, 2..=5, ..])
    }

    pub fn get(&self, number: usize) -> &Value<'a> {
        &self.values[number]
    }

    /// The items of a tuple or list.
    pub fn items(&self, number: usize) -> Option<&[usize]> {
        match self.get(number) {
            Value::Tuple(items) | Value::List(items) => Some(items),
            _ => None,
        }
    }

    /// A recorded call: module and name of its function, and its arguments.
    pub fn call(&self, number: usize) -> Option<(&'a str, &'a str, &[usize])> {
        let Value::Call { called, with } = *self.get(number) else { return None };
        let Value::Global { module, name } = *self.get(called) else { return None };
        Some((module, name, self.items(with)?))
    }
}

const PROTOCOL: u8 = 0x80;

struct Machine<'a> {
    rest: &'a [u8],
    values: Vec<Value<'a>>,
    stack: Vec<usize>,
    /// Stack heights at marks.
    marks: Vec<usize>,
    memo: HashMap<usize, usize>,
}

impl<'a> Machine<'a> {
    fn run(mut self) -> Result<Pickle<'a>, String> {
        loop {
            let instruction = self.take(1)?[0];
            match instruction {
                // PROTO, FRAME and STOP.
                PROTOCOL => drop(self.take(1)?),
                0x95 => drop(self.take(8)?),
                b'.' => {
                    let root = self.pop()?;
                    return Ok(Pickle { values: self.values, root });
                }
                b'N' => self.push(Value::None)?,
                0x88 => self.push(Value::Whole(1))?,
                0x89 => self.push(Value::Whole(0))?,
                b'K' => self.whole(1)?,
                b'M' => self.whole(2)?,
                b'J' => {
                    let four = self.take(4)?.try_into().expect("four bytes");
                    self.push(Value::Whole(i32::from_le_bytes(four).into()))?;
                }
                b'U' | b'C' => self.bytes(1)?,
                b'T' | b'B' => self.bytes(4)?,
                // BINBYTES8 and BYTEARRAY8.
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
                    self.memoize(place)?;
                }
                b'r' => {
                    let place = self.number(4)?;
                    self.memoize(place)?;
                }
                0x94 => self.memoize(self.memo.len())?,
                b'h' => self.recall(1)?,
                b'j' => self.recall(4)?,
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.push(Value::Global { module, name })?;
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    match (&self.values[module], &self.values[name]) {
                        (&Value::Text(module), &Value::Text(name)) => {
                            self.push(Value::Global { module, name })?
                        }
                        _ => return Err("a name in it is not text".into()),
                    }
                }
                b'R' => {
                    let (with, called) = (self.pop()?, self.pop()?);
                    self.push(Value::Call { called, with })?;
                }
                b'b' => {
                    let contents = self.pop()?;
                    let object = self.top()?;
                    // All references to the object see its state, so the call moves to a new number.
                    let created_by = self.values.len();
                    let call =
                        std::mem::replace(&mut self.values[object], Value::Built { created_by, contents });
                    self.add(call)?;
                }
                other => {
                    return Err(format!("it has the instruction {other:#04x}, which no file of CIFAR has"));
                }
            }
        }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or("it is cut short")?;
        self.rest = rest;
        Ok(taken)
    }

    /// An unsigned little-endian number.
    fn number(&mut self, bytes: usize) -> Result<usize, String> {
        let bytes = self.take(bytes)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let end = memchr::memchr(b'\n', self.rest).ok_or("it is cut short")?;
        let line = self.take(end + 1)?;
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

    /// Bytes preceded by their length.
    fn bytes(&mut self, length_bytes: usize) -> Result<(), String> {
        let length = self.number(length_bytes)?;
        let bytes = self.take(length)?;
        self.push(Value::Bytes(bytes))
    }

    fn text(&mut self, length_bytes: usize) -> Result<(), String> {
        let length = self.number(length_bytes)?;
        let text = std::str::from_utf8(self.take(length)?).map_err(|_| "a text in it is not UTF-8")?;
        self.push(Value::Text(text))
    }

    /// The number on top of the stack, above the last mark.
    fn top(&self) -> Result<usize, String> {
        self.height_below(1).map(|place| self.stack[place])
    }

    fn pop(&mut self) -> Result<usize, String> {
        let place = self.height_below(1)?;
        Ok(self.stack.remove(place))
    }

    /// The stack height below `count` values, which must be above the last mark.
    fn height_below(&self, count: usize) -> Result<usize, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack
            .len()
            .checked_sub(count)
            .filter(|height| *height >= floor)
            .ok_or("its stack underflows".into())
    }

    fn mark(&mut self) -> Result<usize, String> {
        self.marks.pop().ok_or("its stack underflows".into())
    }

    fn tuple(&mut self, from: usize) -> Result<(), String> {
        let items = self.stack.split_off(from);
        self.push(Value::Tuple(items))
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

    fn memoize(&mut self, place: usize) -> Result<(), String> {
        let top = self.top()?;
        self.memo.insert(place, top);
        Ok(())
    }

    fn recall(&mut self, bytes: usize) -> Result<(), String> {
        let place = self.number(bytes)?;
        let number = *self.memo.get(&place).ok_or("it reads a memo entry that it has not stored")?;
        self.stack.push(number);
        Ok(())
    }
}
