//! Progress of a run while it trains: a bar on a terminal, lines elsewhere, events with --json.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use console::Term;
use flatout_train::run::events::{Event, Step};
use flatout_train::run::samples::{Prediction, Sample};
use flatout_waits as waits;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::palette::Ink;
use crate::screen::{Screen, one_line};
use crate::status::{Status, painted};
use crate::waiting::{self, Hold};

/// Time between step lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

pub struct Progress {
    screen: Screen,
    bar: Arc<Mutex<Bar>>,
    steps: u64,
    is_of_images: bool,
    smoothed: Option<f64>,
    memory_bytes: u64,
    began: Instant,
    began_step: u64,
    last_line: Option<Instant>,
}

/// The bar on a terminal. A thread redraws it when the terminal is resized, or while the run does something that takes longer than a
/// second, such as an evaluation.
struct Bar {
    bar: ProgressBar,
    status: Option<Status>,
    /// The thread that trains; only its waits are shown, not those of threads that prepare data.
    trainer: ThreadId,
    colours: bool,
    /// Columns of the terminal when the bar was last drawn, and whether it showed a wait.
    drawn_width: usize,
    is_of_wait: bool,
    /// Hides the line of `waiting` while there is a bar.
    hold: Option<Hold>,
}

impl Progress {
    /// Progress of a run with this many steps, the first `done` of which were made before.
    pub fn new(screen: Screen, [steps, done]: [u64; 2], is_of_images: bool) -> Progress {
        let bar = Arc::new(Mutex::new(Bar::new(&screen, steps)));
        if screen.live {
            let drawn = Arc::downgrade(&bar);
            // If the thread cannot start, the bar is redrawn after every step only.
            let _ = thread::Builder::new().name("bar".into()).spawn(move || keep_drawn(&drawn));
        }
        Progress {
            screen,
            bar,
            steps,
            is_of_images,
            smoothed: None,
            memory_bytes: 0,
            began: Instant::now(),
            began_step: done,
            last_line: None,
        }
    }

    pub fn event(&mut self, event: &Event) {
        if self.screen.json {
            return self.screen.json_line(&event.to_json());
        }
        let screen = self.screen;
        match event {
            Event::Start(start) => {
                self.memory_bytes = start.arena_bytes + start.driver_bytes;
                self.fact("optim", &start.optimizer);
                self.fact("loader", &start.loader);
                if let Some(attention) = &start.attention {
                    self.fact("attention", attention);
                }
            }
            Event::Step(step) => self.step(step),
            Event::Eval { step, loss, metrics, averaged } => {
                let metrics = metrics.as_ref().map_or(String::new(), |m| format!("  {}", m.words()));
                let of = if *averaged { "  (averaged weights)" } else { "" };
                let loss = screen.paint(Ink::Strong, format_args!("held-out loss {loss:.4}{metrics}"));
                self.painted_line(format!("{}  {loss}{of}", self.of_step(*step)));
            }
            Event::Saved { step, path } if self.screen.verbose => {
                self.line(format!("step {step}  saved {path}"))
            }
            Event::Warning { message } => {
                let label = screen.paint(Ink::Warning, "warning:");
                self.painted_line(format!("{label} {}", screen.paint(Ink::Plain, message)));
            }
            Event::Spike { step, loss, median, deviations } => {
                let words = format!(
                    "loss {loss:.4} is {deviations:.0} deviations above the recent median of {median:.4}"
                );
                self.painted_line(format!("{}  {}", self.of_step(*step), screen.paint(Ink::Warning, words)));
            }
            Event::Resume { step } => self.line(format!("continuing after step {step}")),
            Event::Sample(sample) => self.painted_line(screen.paint(Ink::Faint, sample_line(sample))),
            Event::Saved { .. } | Event::End(_) => {}
        }
    }

    fn step(&mut self, step: &Step) {
        let loss = step.loss as f64;
        let smoothed = self.smoothed.map_or(loss, |s| 0.95 * s + 0.05 * loss);
        let smoothed_loss = if smoothed.is_finite() { smoothed } else { loss };
        self.smoothed = Some(smoothed_loss);
        let due = self.last_line.is_none_or(|at| at.elapsed() >= LINE_EVERY) || step.step == self.steps;
        if !self.screen.live && !due {
            return;
        }
        // A rollback to a checkpoint may make the step smaller than the first one.
        let made = step.step.saturating_sub(self.began_step) as f64;
        let rate = made / self.began.elapsed().as_secs_f64();
        let status = Status {
            step: step.clone(),
            steps: self.steps,
            smoothed_loss,
            memory_bytes: self.memory_bytes,
            seconds_left: self.steps.saturating_sub(step.step) as f64 / rate,
            is_of_images: self.is_of_images,
        };
        if self.screen.live {
            let mut bar = self.bar();
            bar.status = Some(status);
            bar.draw();
        } else {
            self.last_line = Some(Instant::now());
            self.screen.note(status.line());
        }
    }

    fn bar(&self) -> MutexGuard<'_, Bar> {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of_step(&self, step: u64) -> String {
        self.screen.paint(Ink::Label, format_args!("step {step}"))
    }

    fn fact(&self, label: &str, text: &str) {
        let label = self.screen.paint(Ink::Label, format_args!("{label:<8}"));
        self.painted_line(format!("{label} {}", self.screen.paint(Ink::Plain, text)));
    }

    pub fn line(&self, line: String) {
        self.painted_line(self.screen.paint(Ink::Plain, line));
    }

    /// Prints a line above the bar; its texts went through [`Screen::paint`].
    fn painted_line(&self, line: String) {
        match self.screen.live {
            true => self.bar().bar.println(line),
            false => self.screen.painted_note(line),
        }
    }

    pub fn finish(&self) {
        let mut bar = self.bar();
        bar.status = None;
        bar.bar.finish_and_clear();
        bar.hold = None;
    }
}

/// A sample as one line.
fn sample_line(sample: &Sample) -> String {
    const MOST: usize = 160;
    let name = sample.image.as_deref().unwrap_or(&sample.prompt);
    let line = match (&sample.text, &sample.prediction) {
        (Some(text), _) if text.starts_with(char::is_whitespace) => format!("{}{text}", sample.prompt),
        (Some(text), _) => format!("{}  {text}", sample.prompt),
        (None, Some(Prediction { predicted, probability, truth, .. })) => {
            let truth = truth.as_ref().map_or(String::new(), |truth| format!(", true class {truth}"));
            let short: String = name.chars().take(MOST / 2).collect();
            format!("{predicted} ({:.0}%){truth}: {short}", 100.0 * probability)
        }
        (None, None) => name.to_string(),
    };
    let line: String = line.chars().take(MOST).collect();
    format!("sample   {}", one_line(&line))
}

impl Bar {
    fn new(screen: &Screen, steps: u64) -> Bar {
        let bar = ProgressBar::new(steps);
        bar.set_draw_target(if screen.live {
            ProgressDrawTarget::stderr_with_hz(8)
        } else {
            ProgressDrawTarget::hidden()
        });
        // `wide_msg` cuts the message at the terminal's edge, even if the terminal became narrower since it was made.
        bar.set_style(ProgressStyle::with_template("{wide_msg}").expect("a template that parses"));
        Bar {
            bar,
            status: None,
            trainer: thread::current().id(),
            colours: screen.colours,
            drawn_width: 0,
            is_of_wait: false,
            hold: Some(waiting::hold()),
        }
    }

    fn draw(&mut self) {
        let Some(status) = &self.status else { return };
        let width = waiting::width();
        let wait = waits::newest_by(self.trainer, waiting::AFTER);
        let head = format!("{}/{}", status.step.step, status.steps);
        let text = match &wait {
            Some(wait) => format!("{head}  {}", waiting::words(wait)).chars().take(width).collect(),
            None => status.bar(width),
        };
        // The bar's line is padded to the width it was drawn at. A terminal that became narrower has wrapped it into several, of which
        // the bar clears only the last.
        let above = self.drawn_width.div_ceil(width).saturating_sub(1);
        if above > 0 {
            self.bar.suspend(|| {
                let _ = Term::stderr().clear_last_lines(above);
            });
        }
        (self.drawn_width, self.is_of_wait) = (width, wait.is_some());
        self.bar.set_message(if self.colours { painted(&text) } else { text });
    }

    /// Whether drawing it again would change it.
    fn is_stale(&self) -> bool {
        let waits = waits::newest_by(self.trainer, waiting::AFTER).is_some();
        waits || self.is_of_wait || self.drawn_width != waiting::width()
    }
}

/// Redraws a bar whenever it is stale, until it is dropped.
fn keep_drawn(bar: &Weak<Mutex<Bar>>) {
    loop {
        thread::sleep(waiting::EVERY);
        let Some(bar) = bar.upgrade() else { return };
        let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
        if bar.is_stale() {
            bar.draw();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_one_short_line_without_control_characters() {
        let mut sample = Sample {
            step: 1,
            prompt: "once\x1b[2J".into(),
            text: Some(" upon\na\rtime \u{9b}31m".into()),
            image: None,
            prediction: None,
        };
        let line = sample_line(&sample);
        assert!(!line.contains(char::is_control) && line.starts_with("sample   once"), "{line}");
        assert!(line.contains("upon\\na\\rtime"), "{line}");
        sample.text = Some("x".repeat(5000));
        assert!(sample_line(&sample).chars().count() < 200);
        sample.text = None;
        sample.prediction = Some(Prediction {
            predicted: "cat\x07".into(),
            probability: 0.75,
            truth: Some("dog".into()),
            is_right: false,
        });
        sample.image = Some("3.png".into());
        assert_eq!(sample_line(&sample), "sample   cat\\u{7} (75%), true class dog: 3.png");
    }
}
