//! Bounds on what one rendering may cost: instructions, bytes held at once, and the length of a text.
//!
//! A rendering stays on its thread and gives none of its values away, so its counters belong to the thread.

use std::cell::Cell;

use super::Error;

/// A conversation of a thousand turns takes about a million instructions.
const MOST_INSTRUCTIONS: u64 = 20_000_000;
/// Bytes of one text, what is written among them.
const MOST_TEXT: usize = 64 << 20;
/// Bytes of all values and texts that exist at the same time.
const MOST_HELD: usize = 192 << 20;
/// Bytes that are copied or compared in the time of one instruction.
const BYTES_PER_INSTRUCTION: usize = 64;
/// Bytes whose characters are looked at one by one in that time.
const BYTES_LOOKED_AT: usize = 8;

struct Meter {
    spent: Cell<u64>,
    held: Cell<usize>,
}

thread_local! {
    static METER: Meter = const { Meter { spent: Cell::new(0), held: Cell::new(0) } };
}

/// Begins to count the instructions of a rendering.
pub(super) fn begin() {
    METER.with(|meter| meter.spent.set(0));
}

/// The instructions of the rendering up to now.
pub(super) fn spent() -> u64 {
    METER.with(|meter| meter.spent.get())
}

/// Counts instructions.
pub(super) fn spend(instructions: usize) -> Result<(), Error> {
    METER.with(|meter| {
        let spent = meter.spent.get() + instructions as u64;
        meter.spent.set(spent);
        match spent > MOST_INSTRUCTIONS {
            true => Err(Error::Exhausted(format!("it takes more than {MOST_INSTRUCTIONS} instructions"))),
            false => Ok(()),
        }
    })
}

/// Counts the time that it takes to copy or compare bytes.
pub(super) fn spend_bytes(bytes: usize) -> Result<(), Error> {
    spend(1 + bytes / BYTES_PER_INSTRUCTION)
}

/// Counts the time that it takes to look at every character of that many bytes.
pub(super) fn spend_characters(bytes: usize) -> Result<(), Error> {
    spend(1 + bytes / BYTES_LOOKED_AT)
}

/// An error where a text would have more bytes than one may.
pub(super) fn check_text(bytes: Option<usize>) -> Result<usize, Error> {
    bytes
        .filter(|bytes| *bytes <= MOST_TEXT)
        .ok_or_else(|| Error::Exhausted(format!("it writes more than {MOST_TEXT} bytes")))
}

/// Bytes that something alive takes. They are given back when it goes.
#[derive(Debug, Default)]
pub(super) struct Reservation(usize);

impl Reservation {
    pub fn grow(&mut self, bytes: usize) -> Result<(), Error> {
        spend_bytes(bytes)?;
        METER.with(|meter| {
            let held = meter.held.get() + bytes;
            if held > MOST_HELD {
                return Err(Error::Exhausted(format!("it holds more than {MOST_HELD} bytes at once")));
            }
            meter.held.set(held);
            self.0 += bytes;
            Ok(())
        })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        METER.with(|meter| meter.held.set(meter.held.get() - self.0));
    }
}
