//! The palette of terminal colours, and when colours are used.

/// The role of a piece of text, which decides its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    Plain,
    /// The label at the beginning of a line.
    Label,
    /// The most important number of a line.
    Strong,
    /// The bar of a run.
    Bar,
    Good,
    Warning,
    /// Text of less importance.
    Faint,
}

/// Colours of curves, repeated if there are more curves.
const CURVES: [u8; 6] = [36, 33, 32, 35, 34, 31];

impl Ink {
    /// The parameters of its escape sequence.
    fn code(self) -> &'static str {
        match self {
            Ink::Plain => "",
            Ink::Label => "36",
            Ink::Strong => "1",
            Ink::Bar => "36",
            Ink::Good => "32",
            Ink::Warning => "33",
            Ink::Faint => "2",
        }
    }

    /// Colours a text, which must have gone through [`crate::screen::printable`].
    pub fn paint(self, text: &str, colours: bool) -> String {
        match self {
            _ if !colours || text.trim().is_empty() => text.into(),
            Ink::Plain => text.into(),
            ink => format!("\x1b[{}m{text}\x1b[0m", ink.code()),
        }
    }
}

/// Colours a text like one of several curves.
pub fn paint_curve(number: usize, text: &str) -> String {
    format!("\x1b[{}m{text}\x1b[0m", CURVES[number % CURVES.len()])
}

/// Whether a stream takes colours: it is a terminal that supports them, or the environment overrides that.
pub fn has_colours(is_terminal: bool) -> bool {
    wants_colours(|name| std::env::var(name).ok(), is_terminal)
}

/// `NO_COLOR` and `CLICOLOR=0` turn colours off, `CLICOLOR_FORCE` turns them on where there is no terminal.
fn wants_colours(variable: impl Fn(&str) -> Option<String>, is_terminal: bool) -> bool {
    let is_given = |name: &str| variable(name).is_some_and(|value| !value.is_empty());
    let is_zero = |name: &str| variable(name).is_some_and(|value| value == "0");
    if is_given("NO_COLOR") {
        return false;
    }
    if is_given("CLICOLOR_FORCE") && !is_zero("CLICOLOR_FORCE") {
        return true;
    }
    let moves = variable("TERM").is_some_and(|term| !term.is_empty() && term != "dumb");
    is_terminal && moves && !is_zero("CLICOLOR")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_have_colours_unless_the_environment_turns_them_off() {
        let wants = |variables: &[(&str, &str)], is_terminal: bool| {
            let of = |name: &str| {
                variables.iter().find(|(own, _)| *own == name).map(|(_, value)| value.to_string())
            };
            wants_colours(of, is_terminal)
        };
        let xterm = ("TERM", "xterm-256color");
        assert!(wants(&[xterm], true));
        assert!(!wants(&[xterm], false), "a pipe has no colours");
        assert!(!wants(&[("TERM", "dumb")], true) && !wants(&[], true));
        assert!(!wants(&[xterm, ("NO_COLOR", "1")], true));
        assert!(wants(&[xterm, ("NO_COLOR", "")], true), "an empty value counts as unset");
        assert!(!wants(&[xterm, ("CLICOLOR", "0")], true));
        assert!(wants(&[("CLICOLOR_FORCE", "1")], false));
        assert!(!wants(&[("CLICOLOR_FORCE", "0")], false));
        assert!(!wants(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")], true));
    }

    #[test]
    fn text_is_painted_only_with_colours() {
        assert_eq!(Ink::Warning.paint("warning:", true), "\x1b[33mwarning:\x1b[0m");
        assert_eq!(Ink::Warning.paint("warning:", false), "warning:");
        assert_eq!(Ink::Plain.paint("text", true), "text");
        assert_eq!(paint_curve(7, "x"), "\x1b[33mx\x1b[0m");
    }
}
