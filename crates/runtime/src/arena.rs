//! The arena of a run on the CPU: allocated once, zeroed, aligned for the widest vectors.

use std::alloc::{Layout, alloc_zeroed, dealloc};

pub const ALIGN: usize = 64;

pub struct Arena {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: the arena owns its memory; who may touch it when is the session's affair, through `&mut`.
unsafe impl Send for Arena {}
// SAFETY: a shared arena only gives out an address.
unsafe impl Sync for Arena {}

impl Arena {
    /// `None` where the system does not give the memory.
    pub fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(ALIGN), ALIGN).ok()?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        (!start.is_null()).then_some(Arena { start, layout })
    }

    pub fn start(&mut self) -> *mut u8 {
        self.start
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the arena's own memory, zeroed at first; a session writes it only through `&mut`.
        unsafe { std::slice::from_raw_parts(self.start, self.layout.size()) }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.layout.size()) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start, self.layout) }
    }
}
