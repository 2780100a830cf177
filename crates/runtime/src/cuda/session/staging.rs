//! Pinned staging buffers: a ring for host-to-device copies, a double buffer for device-to-host copies.

use std::collections::VecDeque;

use crate::cuda::context::{CudaError, Stream};
use crate::cuda::driver::{DeviceMemory, Driver, Event, PinnedMemory};

/// Pieces in the ring are aligned to this.
const ALIGN: usize = 256;
/// Reads are split into pieces of this size, two in flight at a time.
const READ_BYTES: usize = 4 << 20;

/// A ring for writes. A piece is free once the stream has copied it: a writer only waits for what it wrote a whole ring ago.
pub struct Ring {
    driver: &'static Driver,
    memory: PinnedMemory,
    head: usize,
    /// Pieces that the stream may still read, oldest first.
    busy: VecDeque<(std::ops::Range<usize>, Event)>,
    /// Events to reuse.
    spare: Vec<Event>,
}

impl Ring {
    pub fn new(driver: &'static Driver, bytes: usize) -> Result<Ring, CudaError> {
        let memory = PinnedMemory::new(driver, bytes.next_multiple_of(ALIGN))?;
        Ok(Ring { driver, memory, head: 0, busy: VecDeque::new(), spare: vec![] })
    }

    /// Copies bytes into device memory, in stream order. The caller may reuse `bytes` as soon as this returns.
    pub fn write(
        &mut self,
        to: &DeviceMemory,
        offset: usize,
        bytes: &[u8],
        stream: Stream,
    ) -> Result<(), CudaError> {
        // At most half the ring, so that filling one piece overlaps copying the other.
        let most = (self.memory.bytes() / 2).next_multiple_of(ALIGN);
        for (i, piece) in bytes.chunks(most).enumerate() {
            let at = self.claim(piece.len())?;
            // SAFETY: `claim` waited until the stream was done with this piece.
            unsafe { &mut self.memory.as_mut_slice()[at..at + piece.len()] }.copy_from_slice(piece);
            to.copy_in(offset + i * most, &self.memory, at, piece.len(), stream)?;
            let event = self.spare.pop().map_or_else(|| Event::untimed(self.driver), Ok)?;
            event.record(stream)?;
            self.busy.push_back((at..at + piece.len(), event));
        }
        Ok(())
    }

    /// Claims room for up to half a ring of bytes.
    fn claim(&mut self, bytes: usize) -> Result<usize, CudaError> {
        let at = place(self.head, bytes, self.memory.bytes());
        // The stream completes pieces in order, so waiting for the last piece that overlaps also completes all before it.
        while let Some(last) = self.busy.iter().rposition(|(r, _)| r.start < at + bytes && at < r.end) {
            self.busy[last].1.synchronize()?;
            self.spare.extend(self.busy.drain(..=last).map(|(_, event)| event));
        }
        self.head = (at + bytes).next_multiple_of(ALIGN);
        Ok(at)
    }
}

/// Offset of the next piece: at the head, or at the start if it does not fit before the end.
fn place(head: usize, bytes: usize, ring_bytes: usize) -> usize {
    if head + bytes <= ring_bytes { head } else { 0 }
}

/// A double buffer for reads: one pinned piece is unpacked while the other fills.
pub struct ReadBuffers {
    pieces: [(PinnedMemory, Event); 2],
}

impl ReadBuffers {
    /// Sized to read `most` bytes at once, up to a limit.
    pub fn new(driver: &'static Driver, most: usize) -> Result<ReadBuffers, CudaError> {
        let piece = || {
            Ok::<_, CudaError>((PinnedMemory::new(driver, most.min(READ_BYTES))?, Event::untimed(driver)?))
        };
        Ok(ReadBuffers { pieces: [piece()?, piece()?] })
    }

    /// Reads bytes of device memory after all work on the stream.
    pub fn read(
        &mut self,
        from: &DeviceMemory,
        offset: usize,
        bytes: usize,
        stream: Stream,
    ) -> Result<Vec<u8>, CudaError> {
        let size = self.pieces[0].0.bytes();
        let mut out = Vec::with_capacity(bytes);
        let starts: Vec<usize> = (0..bytes).step_by(size).collect();
        let length = |i: usize| size.min(bytes - starts[i]);
        for i in 0..=starts.len() {
            if i < starts.len() {
                let (memory, event) = &self.pieces[i % 2];
                from.copy_out(offset + starts[i], memory, 0, length(i), stream)?;
                event.record(stream)?;
            }
            if let Some(done) = i.checked_sub(1) {
                let (memory, event) = &self.pieces[done % 2];
                event.synchronize()?;
                // SAFETY: the copy into this piece is complete, and the next one into it starts below.
                out.extend_from_slice(unsafe { &memory.as_slice()[..length(done)] });
            }
        }
        Ok(out)
    }
}

/// Single values on their way to the host while it continues: a ring of pinned words, with an event after each batch.
pub struct Mailbox {
    places: Vec<(PinnedMemory, Event)>,
    next: usize,
}

/// Values that may be in flight at once.
const MAILBOX_VALUES: usize = 64;

impl Mailbox {
    pub fn new(driver: &'static Driver) -> Result<Mailbox, CudaError> {
        let place = |_| Ok((PinnedMemory::new(driver, size_of::<f32>())?, Event::untimed(driver)?));
        Ok(Mailbox { places: (0..MAILBOX_VALUES).map(place).collect::<Result<_, CudaError>>()?, next: 0 })
    }

    /// Enqueues copies of one f32 at each offset; returns the index of the first.
    pub fn post(
        &mut self,
        from: &DeviceMemory,
        offsets: &[usize],
        stream: Stream,
    ) -> Result<usize, CudaError> {
        let first = self.next;
        for (i, offset) in offsets.iter().enumerate() {
            let (memory, event) = &self.places[(first + i) % MAILBOX_VALUES];
            from.copy_out(*offset, memory, 0, size_of::<f32>(), stream)?;
            event.record(stream)?;
        }
        self.next = (first + offsets.len()) % MAILBOX_VALUES;
        Ok(first)
    }

    pub fn collect(&self, first: usize, count: usize) -> Result<Vec<f32>, CudaError> {
        let value = |i: usize| {
            let (memory, event) = &self.places[(first + i) % MAILBOX_VALUES];
            event.synchronize()?;
            // SAFETY: the copy into this word is complete, and no other was enqueued since.
            let bytes = unsafe { memory.as_slice() };
            Ok(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        (0..count).map(value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn a_ring_wraps_before_its_end() {
        assert_eq!(place(0, 256, 1024), 0);
        assert_eq!(place(768, 256, 1024), 768);
        assert_eq!(place(768, 257, 1024), 0);
        assert_eq!(place(1024, 1, 1024), 0);
    }
}
