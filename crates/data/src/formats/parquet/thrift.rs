//! Thrift's compact protocol, as far as parquet's metadata needs it: integers, strings, lists, structs.

/// A cursor over encoded bytes. Every read is checked.
pub(super) struct Thrift<'b> {
    bytes: &'b [u8],
    at: usize,
}

/// The error of decoding: the bytes end too early, or are invalid.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ThriftError {
    UnexpectedEnd,
    Invalid(&'static str),
}

type Result<T> = std::result::Result<T, ThriftError>;

/// The type ids of fields that are read here.
pub(super) const TRUE: u8 = 1;
pub(super) const FALSE: u8 = 2;
const BYTE: u8 = 3;
const I16: u8 = 4;
pub(super) const I32: u8 = 5;
pub(super) const I64: u8 = 6;
const DOUBLE: u8 = 7;
pub(super) const BINARY: u8 = 8;
pub(super) const LIST: u8 = 9;
const SET: u8 = 10;
const MAP: u8 = 11;
pub(super) const STRUCT: u8 = 12;
const UUID: u8 = 13;

/// Maximum nesting of structs. Parquet's own metadata needs six.
const DEEPEST: usize = 16;

impl<'b> Thrift<'b> {
    pub fn new(bytes: &'b [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Number of bytes read so far.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Calls `field` with the id and type of every field of a struct. It either reads the value and returns true, or leaves it
    /// and returns false.
    pub fn structure(&mut self, mut field: impl FnMut(&mut Self, i16, u8) -> Result<bool>) -> Result<()> {
        let mut last = 0;
        while let Some((id, kind)) = self.field(last)? {
            last = id;
            if !field(self, id, kind)? {
                self.skip(kind, 0)?;
            }
        }
        Ok(())
    }

    /// Calls `element` for every element of a list of `kind`.
    pub fn list(&mut self, kind: u8, mut element: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        let (found, len) = self.list_header()?;
        if found != kind && len > 0 {
            return Err(ThriftError::Invalid("a list holds another type than it should"));
        }
        (0..len).try_for_each(|_| element(self))
    }

    pub fn integer(&mut self) -> Result<i64> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    pub fn binary(&mut self) -> Result<&'b [u8]> {
        let len = self.varint()?;
        self.take(usize::try_from(len).map_err(|_| ThriftError::UnexpectedEnd)?)
    }

    fn field(&mut self, last: i16) -> Result<Option<(i16, u8)>> {
        let byte = self.byte()?;
        if byte == 0 {
            return Ok(None);
        }
        let id = match byte >> 4 {
            0 => i16::try_from(self.integer()?).ok(),
            delta => last.checked_add(i16::from(delta)),
        };
        Ok(Some((id.ok_or(ThriftError::Invalid("a field's number is too large"))?, byte & 15)))
    }

    fn list_header(&mut self) -> Result<(u8, usize)> {
        let byte = self.byte()?;
        let len = match byte >> 4 {
            15 => usize::try_from(self.varint()?).map_err(|_| ThriftError::UnexpectedEnd)?,
            short => usize::from(short),
        };
        // An element takes at least one byte, so a false length is detected before anything is allocated.
        if len > self.bytes.len() - self.at {
            return Err(ThriftError::UnexpectedEnd);
        }
        Ok((byte & 15, len))
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Result<()> {
        if depth > DEEPEST {
            return Err(ThriftError::Invalid("structures are nested too deeply"));
        }
        match kind {
            TRUE | FALSE => {}
            BYTE => drop(self.byte()?),
            I16 | I32 | I64 => drop(self.varint()?),
            DOUBLE => drop(self.take(8)?),
            UUID => drop(self.take(16)?),
            BINARY => drop(self.binary()?),
            LIST | SET => {
                let (kind, len) = self.list_header()?;
                (0..len).try_for_each(|_| self.skip_element(kind, depth))?;
            }
            MAP => {
                let len = self.varint()?;
                if len > (self.bytes.len() - self.at) as u64 {
                    return Err(ThriftError::UnexpectedEnd);
                }
                if len > 0 {
                    let kinds = self.byte()?;
                    for _ in 0..len {
                        self.skip_element(kinds >> 4, depth)?;
                        self.skip_element(kinds & 15, depth)?;
                    }
                }
            }
            STRUCT => {
                let mut last = 0;
                while let Some((id, kind)) = self.field(last)? {
                    last = id;
                    self.skip(kind, depth + 1)?;
                }
            }
            _ => return Err(ThriftError::Invalid("a field has a type that does not exist")),
        }
        Ok(())
    }

    /// Booleans in lists and maps take a byte each.
    fn skip_element(&mut self, kind: u8, depth: usize) -> Result<()> {
        match kind {
            TRUE | FALSE => self.byte().map(drop),
            kind => self.skip(kind, depth + 1),
        }
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(ThriftError::Invalid("an integer is too long"))
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn take(&mut self, len: usize) -> Result<&'b [u8]> {
        let end = self
            .at
            .checked_add(len)
            .filter(|end| *end <= self.bytes.len())
            .ok_or(ThriftError::UnexpectedEnd)?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }
}
