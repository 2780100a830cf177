//! Unicode character classes, from the tables of the regular expression library.

use regex_syntax::hir::{Class, HirKind};

/// The characters of one class, as ranges.
pub(crate) struct Ranges(Vec<(char, char)>);

impl Ranges {
    /// Parses an expression that is a single character class.
    pub(crate) fn of(expression: &str) -> Self {
        let parsed = regex_syntax::parse(expression).expect("the expressions of this crate parse");
        let HirKind::Class(Class::Unicode(class)) = parsed.kind() else {
            unreachable!("the expression is a character class")
        };
        Self(class.ranges().iter().map(|range| (range.start(), range.end())).collect())
    }

    pub(crate) fn contains(&self, character: char) -> bool {
        let at = self.0.partition_point(|(_, end)| *end < character);
        self.0.get(at).is_some_and(|(start, _)| *start <= character)
    }
}
