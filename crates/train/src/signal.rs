//! Signals that ask a run to stop.
//!
//! SIGINT, SIGTERM and SIGUSR1 (what batch systems send before time is up) raise a flag that the loop reads
//! between steps, so that it can save first. A second SIGINT leaves at once without saving, also out of a save or
//! a long step: checkpoints are whole or absent whenever the process ends.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;

/// Exit code of a run left without saving.
pub const LEFT_WITHOUT_SAVING: i32 = 1;

/// The flag. Clones share it.
#[derive(Clone, Debug)]
pub struct StopFlag {
    signal: Arc<AtomicUsize>,
}

/// Takes over the three signals for the rest of the process.
pub fn install() -> io::Result<StopFlag> {
    let signal = Arc::new(AtomicUsize::new(0));
    let interrupted = Arc::new(AtomicBool::new(false));
    // Handlers run in the order they were added: the first SIGINT finds `interrupted` unset and passes on to set it.
    flag::register_conditional_shutdown(SIGINT, LEFT_WITHOUT_SAVING, Arc::clone(&interrupted))?;
    flag::register(SIGINT, interrupted)?;
    for number in [SIGINT, SIGTERM, SIGUSR1] {
        flag::register_usize(number, Arc::clone(&signal), number as usize)?;
    }
    Ok(StopFlag { signal })
}

impl StopFlag {
    /// A flag that no signal raises, for callers that stop in other ways.
    pub fn never() -> StopFlag {
        StopFlag { signal: Arc::new(AtomicUsize::new(0)) }
    }

    /// The name of the signal that asked to stop, where one did.
    pub fn requested(&self) -> Option<&'static str> {
        match self.signal.load(Ordering::Relaxed) as i32 {
            0 => None,
            SIGINT => Some("SIGINT"),
            SIGTERM => Some("SIGTERM"),
            _ => Some("SIGUSR1"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;

    /// The test runs itself in a child process, because what is tested ends the process.
    const CHILD: &str = "FLATOUT_SIGNAL_TEST_CHILD";

    #[test]
    fn signals_raise_the_flag_and_a_second_interrupt_leaves() {
        if std::env::var_os(CHILD).is_some() {
            let stop = install().unwrap();
            assert_eq!(stop.requested(), None);
            for (number, name) in
                [(SIGUSR1, "SIGUSR1"), (SIGTERM, "SIGTERM"), (SIGTERM, "SIGTERM"), (SIGINT, "SIGINT")]
            {
                raise(number).unwrap();
                assert_eq!(stop.clone().requested(), Some(name));
            }
            println!("still here");
            raise(SIGINT).unwrap();
            unreachable!("the second interrupt ends the process");
        }
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "signal::tests::signals_raise_the_flag_and_a_second_interrupt_leaves",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("still here"), "{said}{}", String::from_utf8_lossy(&output.stderr));
        assert!(!said.contains("FAILED"), "{said}");
        assert_eq!(output.status.code(), Some(LEFT_WITHOUT_SAVING));
    }

    #[test]
    fn a_flag_without_signals_stays_down() {
        assert_eq!(StopFlag::never().requested(), None);
    }
}
