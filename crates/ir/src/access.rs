//! The memory that a launch reads and writes, which decides whether two launches may overlap.

use std::ops::Range;

use crate::plan::{Launch, View};

/// The bytes that a tensor spans: in the arena, or in the storage of this number, which has no offset yet.
type Extent = (Option<usize>, Range<usize>);

/// The memory that a launch reads and writes. Its workspace counts as written.
#[derive(Clone, Debug, Default)]
pub struct Access {
    pub reads: Vec<Extent>,
    pub writes: Vec<Extent>,
}

impl Access {
    /// The memory of a launch whose views lie in the arena.
    pub fn of(launch: &Launch) -> Access {
        let bytes = |view: &View| (None, view.offset..view.offset + view.span_bytes());
        let written = launch.outs.iter().flatten().chain(&launch.workspace);
        Access { reads: launch.ins.iter().map(bytes).collect(), writes: written.map(bytes).collect() }
    }

    /// Whether one of them writes what the other reads or writes, so that their order matters.
    pub fn meets(&self, other: &Access) -> bool {
        let writes = |one: &Access, other: &Access| {
            let touched = other.reads.iter().chain(&other.writes);
            touched.into_iter().any(|extent| one.writes.iter().any(|own| overlap(own, extent)))
        };
        writes(self, other) || writes(other, self)
    }
}

fn overlap((of, a): &Extent, (other, b): &Extent) -> bool {
    of == other && a.start < b.end && b.start < a.end
}
