//! Requests to stop a run: signals, and the time it was given.
//!
//! SIGINT, SIGTERM, SIGHUP (a terminal or connection that goes away) and SIGUSR1 (what batch systems send before time is
//! up) raise a flag that the loop reads between steps and between the batches of an evaluation, so that it can save first. Before the first step there is
//! nothing to save, and a watcher leaves at once, whatever is being compiled or read. A second SIGINT leaves at once
//! without saving, also out of a save or a long step: checkpoints are whole or absent whenever the process ends.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use flatout_world::launch::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;

/// Exit code of a run left without saving.
pub const LEFT_WITHOUT_SAVING: i32 = 1;

/// The reason of a run whose time is up, in place of a signal's name.
pub const TIME_IS_UP: &str = "--max-time";

/// Every reason to stop, in the order that ranks number them in.
const REASONS: [&str; 5] = ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", TIME_IS_UP];

/// The number by which ranks tell each other a reason to stop.
pub fn number_of(reason: &str) -> Option<usize> {
    REASONS.iter().position(|own| *own == reason)
}

/// The reason of a number.
pub fn of_number(number: usize) -> Option<&'static str> {
    REASONS.get(number).copied()
}

/// How often the watcher looks.
const WATCH_EVERY: Duration = Duration::from_millis(10);

/// Nothing is trained yet.
const STARTING: u8 = 0;
/// The watcher is ending the process.
const LEAVING: u8 = 1;
/// The loop looks at the flag itself.
const TRAINING: u8 = 2;

/// The flag. Clones share it.
#[derive(Clone, Debug)]
pub struct StopFlag {
    signal: Arc<AtomicUsize>,
    phase: Arc<AtomicU8>,
    deadline: Option<Instant>,
}

/// Takes over these signals for the rest of the process. SIGHUP stays ignored where it is, as under `nohup`. A file larger than the process may write becomes an error
/// of the write instead of the end of the process.
pub fn install() -> io::Result<StopFlag> {
    let signal = Arc::new(AtomicUsize::new(0));
    let interrupted = Arc::new(AtomicBool::new(false));
    // Handlers run in the order they were added: the first SIGINT finds `interrupted` unset and passes on to set it.
    flag::register_conditional_shutdown(SIGINT, LEFT_WITHOUT_SAVING, Arc::clone(&interrupted))?;
    flag::register(SIGINT, interrupted)?;
    flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    for number in [SIGINT, SIGTERM, SIGUSR1, SIGHUP] {
        if number != SIGHUP || !is_ignored(SIGHUP) {
            flag::register_usize(number, Arc::clone(&signal), number as usize)?;
        }
    }
    Ok(StopFlag { signal, phase: Arc::new(AtomicU8::new(STARTING)), deadline: None })
}

/// Notices of SIGINT, which ends nothing by itself.
#[derive(Clone, Debug)]
pub struct Interrupts(Arc<AtomicBool>);

/// Takes over SIGINT for the rest of the process.
pub fn interrupts() -> io::Result<Interrupts> {
    let raised = Arc::new(AtomicBool::new(false));
    flag::register(SIGINT, Arc::clone(&raised))?;
    Ok(Interrupts(raised))
}

impl Interrupts {
    /// Whether there was one since the last call.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// Ends the process without what libraries do at its end: another thread may be inside one of them, and a GPU's do not
/// expect that.
pub fn leave(code: i32) -> ! {
    signal_hook::low_level::exit(code)
}

impl StopFlag {
    /// A flag that no signal raises, for callers that stop in other ways, such as [`StopFlag::interrupt`].
    pub fn never() -> StopFlag {
        let phase = Arc::new(AtomicU8::new(TRAINING));
        StopFlag { signal: Arc::new(AtomicUsize::new(0)), phase, deadline: None }
    }

    /// Asks to stop as SIGINT does, for a process whose signals are someone else's.
    pub fn interrupt(&self) {
        self.signal.store(SIGINT as usize, Ordering::Relaxed);
    }

    /// The same flag for a run that must have ended by `deadline`.
    pub fn with_deadline(self, deadline: Option<Instant>) -> StopFlag {
        StopFlag { deadline, ..self }
    }

    /// The name of the signal that asked to stop, where one did.
    pub fn requested(&self) -> Option<&'static str> {
        match self.signal.load(Ordering::Relaxed) as i32 {
            0 => None,
            SIGINT => Some("SIGINT"),
            SIGTERM => Some("SIGTERM"),
            SIGHUP => Some("SIGHUP"),
            _ => Some("SIGUSR1"),
        }
    }

    /// Why to stop now, if there is a reason, where stopping takes `room`: a signal, or no more time than that.
    pub fn asked(&self, room: Duration) -> Option<&'static str> {
        let is_short = |deadline: Instant| deadline.saturating_duration_since(Instant::now()) <= room;
        self.requested().or_else(|| self.deadline.filter(|deadline| is_short(*deadline)).map(|_| TIME_IS_UP))
    }

    /// Until `begin_steps`, a reason to stop is answered at once: `leave` is called with it, on a thread of its own, and
    /// must end the process. A run that is only starting is safe to leave at any moment, as it is to kill.
    pub fn watch_start(&self, leave: impl FnOnce(&'static str) + Send + 'static) -> io::Result<()> {
        let stop = self.clone();
        let watch = move || {
            while stop.phase.load(Ordering::SeqCst) == STARTING {
                if let Some(reason) = stop.asked(Duration::ZERO) {
                    if stop.step_to(LEAVING) {
                        leave(reason);
                    }
                    return;
                }
                std::thread::sleep(WATCH_EVERY);
            }
        };
        std::thread::Builder::new().name("start".into()).spawn(watch).map(drop)
    }

    /// The loop looks at the flag from here on. Does not return where the process is being left already.
    pub fn begin_steps(&self) {
        if !self.step_to(TRAINING) {
            while self.phase.load(Ordering::SeqCst) == LEAVING {
                std::thread::park();
            }
        }
    }

    fn step_to(&self, phase: u8) -> bool {
        self.phase.compare_exchange(STARTING, phase, Ordering::SeqCst, Ordering::SeqCst).is_ok()
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
            for (number, name) in [
                (SIGUSR1, "SIGUSR1"),
                (SIGHUP, "SIGHUP"),
                (SIGTERM, "SIGTERM"),
                (SIGTERM, "SIGTERM"),
                (SIGINT, "SIGINT"),
            ] {
                raise(number).unwrap();
                assert_eq!(stop.clone().requested(), Some(name));
            }
            println!("still here");
            raise(SIGINT).unwrap();
            unreachable!("the second interrupt ends the process");
        }
        // Whoever runs tests may ignore SIGHUP.
        let output = std::process::Command::new("env")
            .arg("--default-signal=HUP")
            .arg(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "run::signal::tests::signals_raise_the_flag_and_a_second_interrupt_leaves",
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
    fn reasons_have_the_numbers_of_the_flags_of_an_update() {
        assert_eq!(REASONS.len(), flatout_ir::passes::totals::STOP_FLAGS.len());
        for (number, reason) in REASONS.into_iter().enumerate() {
            assert_eq!((number_of(reason), of_number(number)), (Some(number), Some(reason)));
        }
    }

    #[test]
    fn a_flag_without_signals_stays_down() {
        assert_eq!(StopFlag::never().requested(), None);
        assert_eq!(StopFlag::never().asked(Duration::MAX), None);
        StopFlag::never().begin_steps();
        let stop = StopFlag::never();
        stop.clone().interrupt();
        assert_eq!(stop.asked(Duration::ZERO), Some("SIGINT"), "clones share it");
    }

    #[test]
    fn time_is_up_while_there_is_still_room_to_save() {
        let hour = Duration::from_secs(3600);
        let stop = StopFlag::never().with_deadline(Some(Instant::now() + hour));
        assert_eq!(stop.asked(hour / 2), None);
        assert_eq!(stop.asked(hour), Some(TIME_IS_UP));
        let late = StopFlag::never().with_deadline(Some(Instant::now()));
        assert_eq!(late.asked(Duration::ZERO), Some(TIME_IS_UP));
    }

    #[test]
    fn a_start_is_left_once_and_steps_are_not() {
        let starting = || StopFlag { phase: Arc::new(AtomicU8::new(STARTING)), ..StopFlag::never() };
        let (left, leave) = std::sync::mpsc::channel();
        let late = starting().with_deadline(Some(Instant::now()));
        late.watch_start(move |reason| left.send(reason).unwrap()).unwrap();
        assert_eq!(leave.recv(), Ok(TIME_IS_UP));
        assert!(!late.step_to(TRAINING), "no step begins once the process is being left");

        let (left, leave) = std::sync::mpsc::channel::<&str>();
        let begun = starting();
        begun.begin_steps();
        begun.signal.store(SIGTERM as usize, Ordering::SeqCst);
        begun.watch_start(move |reason| left.send(reason).unwrap()).unwrap();
        assert!(leave.recv().is_err(), "the watcher goes without a word once steps have begun");
    }
}
