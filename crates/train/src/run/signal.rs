//! Requests to stop a run: signals and a time limit.
//!
//! SIGINT, SIGTERM, SIGHUP (a terminal or connection that goes away) and SIGUSR1 (sent by batch systems before the time limit)
//! raise a flag that the training loop reads between steps and between the batches of an evaluation, so that it can save first.
//! Before the first step there is nothing to save, and a watcher thread exits immediately, whatever is being compiled or read. A
//! second SIGINT exits immediately without saving, even during a save or a long step: checkpoints are complete or absent whenever
//! the process ends.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use flatout_world::launch::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;

/// Exit code of a process that ended without saving.
pub const LEFT_WITHOUT_SAVING: i32 = 1;

/// The stop reason of a run that reached its time limit, in place of a signal's name.
pub const TIME_IS_UP: &str = "--max-time";

/// Every reason to stop, in the order of their numbers.
const REASONS: [&str; 5] = ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", TIME_IS_UP];

/// The number under which ranks send each other a reason to stop.
pub fn number_of(reason: &str) -> Option<usize> {
    REASONS.iter().position(|own| *own == reason)
}

/// The reason with a number.
pub fn of_number(number: usize) -> Option<&'static str> {
    REASONS.get(number).copied()
}

/// Polling interval of the watcher.
const WATCH_EVERY: Duration = Duration::from_millis(10);

/// No step has begun.
const STARTING: u8 = 0;
/// The watcher is ending the process.
const LEAVING: u8 = 1;
/// The training loop polls the flag itself.
const TRAINING: u8 = 2;

/// The stop flag. Clones share it.
#[derive(Clone, Debug)]
pub struct StopFlag {
    signal: Arc<AtomicUsize>,
    phase: Arc<AtomicU8>,
    deadline: Option<Instant>,
}

/// Installs handlers of these signals for the rest of the process. SIGHUP stays ignored if it is ignored already, as under
/// `nohup`. Exceeding the limit on file sizes becomes an error of the write instead of ending the process.
pub fn install() -> io::Result<StopFlag> {
    let signal = Arc::new(AtomicUsize::new(0));
    let interrupted = Arc::new(AtomicBool::new(false));
    // Handlers run in the order they were added: at the first SIGINT this one finds `interrupted` unset, and the next one sets
    // it.
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

/// Records SIGINT, which then ends nothing by itself.
#[derive(Clone, Debug)]
pub struct Interrupts(Arc<AtomicBool>);

/// Installs a handler of SIGINT for the rest of the process.
pub fn interrupts() -> io::Result<Interrupts> {
    let raised = Arc::new(AtomicBool::new(false));
    flag::register(SIGINT, Arc::clone(&raised))?;
    Ok(Interrupts(raised))
}

impl Interrupts {
    /// Whether SIGINT came since the last call.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// Ends the process without the exit handlers of libraries: another thread may be inside one of them, and those of a GPU do not
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

    /// Requests a stop as SIGINT does, for a process that does not handle signals itself.
    pub fn interrupt(&self) {
        self.signal.store(SIGINT as usize, Ordering::Relaxed);
    }

    /// The same flag for a run that must have ended by `deadline`.
    pub fn with_deadline(self, deadline: Option<Instant>) -> StopFlag {
        StopFlag { deadline, ..self }
    }

    /// The name of the signal that requested a stop, if one did.
    pub fn requested(&self) -> Option<&'static str> {
        match self.signal.load(Ordering::Relaxed) as i32 {
            0 => None,
            SIGINT => Some("SIGINT"),
            SIGTERM => Some("SIGTERM"),
            SIGHUP => Some("SIGHUP"),
            _ => Some("SIGUSR1"),
        }
    }

    /// The reason to stop now, if there is one, where stopping takes `room`: a signal, or no more time left than that.
    pub fn asked(&self, room: Duration) -> Option<&'static str> {
        let is_short = |deadline: Instant| deadline.saturating_duration_since(Instant::now()) <= room;
        self.requested().or_else(|| self.deadline.filter(|deadline| is_short(*deadline)).map(|_| TIME_IS_UP))
    }

    /// Until `begin_steps`, a reason to stop is acted on immediately: `leave` is called with it on a thread of its own and must
    /// end the process. A run that is only starting can be ended safely at any moment, as it can be killed.
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

    /// From here on the training loop polls the flag. Does not return if the process is being ended already.
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
        // The environment of the tests may ignore SIGHUP.
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
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(stdout.contains("still here"), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
        assert!(!stdout.contains("FAILED"), "{stdout}");
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
