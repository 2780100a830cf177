//! The CPU arena: one zeroed allocation, aligned for the widest vectors.

use std::alloc::{Layout, alloc_zeroed, dealloc};

pub const ALIGN: usize = 64;

pub struct Arena {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: the arena owns its memory; the session decides who may touch it, through `&mut`.
unsafe impl Send for Arena {}
// SAFETY: a shared reference only exposes the address.
unsafe impl Sync for Arena {}

impl Arena {
    /// Returns `None` if the system refuses the memory.
    pub fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(ALIGN), ALIGN).ok()?;
        // SAFETY: the layout has a non-zero size.
        let start = unsafe { alloc_zeroed(layout) };
        (!start.is_null()).then_some(Arena { start, layout })
    }

    pub fn start(&mut self) -> *mut u8 {
        self.start
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the arena's own memory, zero-initialised; a session writes it only through `&mut`.
        unsafe { std::slice::from_raw_parts(self.start, self.layout.size()) }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: as above, under an exclusive borrow.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.layout.size()) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start, self.layout) }
    }
}
