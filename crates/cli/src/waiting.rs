//! A status line on the terminal for work that takes longer than a second: it shows the progress, and is erased when the work is done.
//! Nothing appears where standard error is not a terminal.

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use console::Term;
use flatout_waits::{self as waits, Unit, WaitSnapshot};

use crate::palette::Ink;
use crate::screen::{Screen, bytes, count, duration, one_line};

/// Work that takes less time than this is not shown.
pub const AFTER: Duration = Duration::from_secs(1);
/// Time between two redraws.
pub const EVERY: Duration = Duration::from_millis(100);
/// Columns of a terminal that does not report its width.
const USUAL_WIDTH: u16 = 80;

/// The state of the line on the terminal.
struct Line {
    /// Columns of its text; 0 while it is erased.
    columns: usize,
    /// Number of [`Hold`]s, each of which hides the line.
    holds: usize,
}

static LINE: Mutex<Line> = Mutex::new(Line { columns: 0, holds: 0 });

fn line() -> MutexGuard<'static, Line> {
    LINE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread that draws the line. If it cannot start, there is no line.
pub fn start(screen: &Screen) {
    let colours = screen.colours;
    if !screen.live {
        return;
    }
    let draw = move || {
        loop {
            std::thread::sleep(EVERY);
            let mut line = line();
            match waits::newest(AFTER).filter(|_| line.holds == 0) {
                Some(wait) => line.draw(&words(&wait), colours),
                None => line.erase(),
            }
        }
    };
    let _ = std::thread::Builder::new().name("waiting".into()).spawn(draw);
}

/// Calls `print` while the line is erased. `print` must not call this function again.
pub fn above<T>(print: impl FnOnce() -> T) -> T {
    let mut line = line();
    line.erase();
    print()
}

/// Erases the line for good, at the end of the command.
pub fn end() {
    std::mem::forget(hold());
}

/// Hides the line for as long as this lives, for other code that draws on the terminal.
pub struct Hold;

pub fn hold() -> Hold {
    let mut line = line();
    line.erase();
    line.holds += 1;
    Hold
}

impl Drop for Hold {
    fn drop(&mut self) {
        line().holds -= 1;
    }
}

/// Columns of the terminal behind standard error.
pub fn width() -> usize {
    let (_, width) = Term::stderr().size_checked().unwrap_or((0, USUAL_WIDTH));
    usize::from(width).max(1)
}

impl Line {
    fn draw(&mut self, text: &str, colours: bool) {
        let erasing = self.erase_sequence();
        // The last column stays free: a full line would wrap.
        let text: String = text.chars().take(width().saturating_sub(1)).collect();
        self.columns = text.chars().count();
        put(&format!("{erasing}{}", Ink::Faint.paint(&text, colours)));
    }

    fn erase(&mut self) {
        if self.columns > 0 {
            put(&self.erase_sequence());
            self.columns = 0;
        }
    }

    /// The escape sequences that erase the line. A terminal that became narrower has wrapped it into several, which are erased one by
    /// one: erasing to the end of the screen would put the line into tmux's history where nothing stands above it.
    fn erase_sequence(&self) -> String {
        match self.columns.div_ceil(width()) {
            0 => String::new(),
            lines => format!("\r\x1b[K{}", "\x1b[A\x1b[2K".repeat(lines - 1)),
        }
    }
}

/// Writes and flushes. Errors are ignored: the command does not need the terminal.
fn put(text: &str) {
    let mut out = io::stderr();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// The text of the line: name of the work, amount done of the total, rate and elapsed time.
pub fn words(wait: &WaitSnapshot) -> String {
    let WaitSnapshot { what, unit, done, total, time } = wait;
    let seconds = time.as_secs_f64();
    let rate = *done as f64 / seconds;
    let mut pieces = vec![one_line(what).into_owned()];
    match (unit, total) {
        (Unit::Nothing, _) => {}
        (Unit::Bytes, Some(total)) => pieces.push(format!("{} of {}", bytes(*done), bytes(*total))),
        (Unit::Bytes, None) => pieces.push(bytes(*done)),
        (Unit::Things(things), Some(total)) => {
            pieces.push(format!("{} of {} {things}", count(*done), count(*total)));
        }
        (Unit::Things(things), None) => pieces.push(format!("{} {things}", count(*done))),
    }
    if let Some(total) = total {
        pieces.push(format!("{:.0}%", (100.0 * *done as f64 / *total as f64).min(100.0)));
    }
    match unit {
        _ if *done == 0 => {}
        Unit::Nothing => {}
        Unit::Bytes => pieces.push(format!("{}/s", bytes(rate as u64))),
        Unit::Things(_) if rate < 10.0 => pieces.push(format!("{rate:.1}/s")),
        Unit::Things(_) => pieces.push(format!("{}/s", count(rate as u64))),
    }
    pieces.push(duration(seconds));
    pieces.join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_shown_with_its_share_and_its_rate() {
        let wait = |unit, done, total| WaitSnapshot {
            what: "work".into(),
            unit,
            done,
            total,
            time: Duration::from_secs(4),
        };
        assert_eq!(words(&wait(Unit::Nothing, 0, None)), "work  4.0 s");
        assert_eq!(
            words(&wait(Unit::Bytes, 1 << 30, Some(4 << 30))),
            "work  1.0 GiB of 4.0 GiB  25%  256.0 MiB/s  4.0 s"
        );
        assert_eq!(
            words(&wait(Unit::Things("kernels"), 6, Some(24))),
            "work  6 of 24 kernels  25%  1.5/s  4.0 s"
        );
        assert_eq!(words(&wait(Unit::Things("tokens"), 4000, None)), "work  4,000 tokens  1,000/s  4.0 s");
        assert_eq!(words(&wait(Unit::Bytes, 0, Some(4 << 30))), "work  0 bytes of 4.0 GiB  0%  4.0 s");
        let hostile = WaitSnapshot { what: "a\x1b[2J\n".into(), ..wait(Unit::Nothing, 0, None) };
        assert!(!words(&hostile).contains(['\x1b', '\n']), "names of files cannot move the cursor");
    }
}
