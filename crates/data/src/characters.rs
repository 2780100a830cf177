//! Classes of characters, from the tables that regular expressions use.

use regex_syntax::hir::{Class, HirKind};

/// Characters of one class, as ranges.
pub(crate) struct Ranges(Vec<(char, char)>);

impl Ranges {
    /// The characters of an expression that is a class.
    pub(crate) fn of(expression: &str) -> Self {
        let parsed = regex_syntax::parse(expression).expect("an expression of ours");
        let HirKind::Class(Class::Unicode(class)) = parsed.kind() else {
            unreachable!("a class of characters")
        };
        Self(class.ranges().iter().map(|range| (range.start(), range.end())).collect())
    }

    pub(crate) fn have(&self, character: char) -> bool {
        let at = self.0.partition_point(|(_, end)| *end < character);
        self.0.get(at).is_some_and(|(start, _)| *start <= character)
    }
}
