//! Limits on the cost of one rendering: instructions, bytes held at once, and the length of a text.
//!
//! A rendering stays on its thread and returns none of its values, so its counters are thread-local.

use std::cell::Cell;

use super::Error;

/// A conversation of a thousand turns takes about a million instructions.
const MOST_INSTRUCTIONS: u64 = 20_000_000;
/// Most bytes of one text, the output included.
const MOST_TEXT: usize = 64 << 20;
/// Most bytes of all values and texts that exist at the same time.
const MOST_HELD: usize = 192 << 20;
/// Bytes copied or compared at the cost of one instruction.
const BYTES_PER_INSTRUCTION: usize = 64;
/// Bytes whose characters are examined one by one at that cost.
const BYTES_LOOKED_AT: usize = 8;

struct Meter {
    spent: Cell<u64>,
    held: Cell<usize>,
}

thread_local! {
    static METER: Meter = const { Meter { spent: Cell::new(0), held: Cell::new(0) } };
}

/// Resets the counters for a rendering.
pub(super) fn begin() {
    METER.with(|meter| meter.spent.set(0));
}

/// The instructions of the rendering so far.
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

/// Counts the cost of copying or comparing bytes.
pub(super) fn spend_bytes(bytes: usize) -> Result<(), Error> {
    spend(1 + bytes / BYTES_PER_INSTRUCTION)
}

/// Counts the cost of examining every character of that many bytes.
pub(super) fn spend_characters(bytes: usize) -> Result<(), Error> {
    spend(1 + bytes / BYTES_LOOKED_AT)
}

/// An error where a text would exceed its limit.
pub(super) fn check_text(bytes: Option<usize>) -> Result<usize, Error> {
    bytes
        .filter(|bytes| *bytes <= MOST_TEXT)
        .ok_or_else(|| Error::Exhausted(format!("it writes more than {MOST_TEXT} bytes")))
}

/// Bytes that a live value takes. They are released when it is dropped.
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
