//! What a run shows while it trains: a bar on a terminal, lines elsewhere, events as JSON where asked for.

use std::time::{Duration, Instant};

use console::Term;
use flatout_train::run::events::{Event, Step};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::screen::Screen;
use crate::status::Status;

/// Seconds between lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);
/// Of a terminal that does not tell its width.
const USUAL_WIDTH: u16 = 80;

pub struct Progress {
    screen: Screen,
    bar: ProgressBar,
    steps: u64,
    is_of_images: bool,
    smoothed: Option<f64>,
    memory_bytes: u64,
    began: Instant,
    began_step: u64,
    last_line: Option<Instant>,
    /// Columns of the terminal when the bar was last drawn.
    drawn_width: usize,
}

impl Progress {
    /// Of a run with this many steps, some of which are done.
    pub fn new(screen: Screen, [steps, done]: [u64; 2], is_of_images: bool) -> Progress {
        let bar = ProgressBar::new(steps);
        bar.set_draw_target(if screen.live {
            ProgressDrawTarget::stderr_with_hz(8)
        } else {
            ProgressDrawTarget::hidden()
        });
        // Cut off at the terminal's edge even where it became narrower since the message was made.
        bar.set_style(ProgressStyle::with_template("{wide_msg}").expect("a template that parses"));
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
            drawn_width: 0,
        }
    }

    pub fn event(&mut self, event: &Event) {
        if self.screen.json {
            return self.screen.json_line(&event.to_json());
        }
        match event {
            Event::Start(start) => {
                self.memory_bytes = start.arena_bytes + start.driver_bytes;
                self.line(format!("optim    {}", start.optimizer));
                self.line(format!("loader   {}", start.loader));
                if let Some(attention) = &start.attention {
                    self.line(format!("attention {attention}"));
                }
            }
            Event::Step(step) => self.step(step),
            Event::Eval { step, loss, metrics, averaged } => {
                let metrics = metrics.as_ref().map_or(String::new(), |m| format!("  {}", m.words()));
                let of = if *averaged { "  (averaged weights)" } else { "" };
                self.line(format!("step {step}  held-out loss {loss:.4}{metrics}{of}"));
            }
            Event::Saved { step, path } if self.screen.verbose => {
                self.line(format!("step {step}  saved {path}"))
            }
            Event::Warning { message } => self.line(format!("warning: {message}")),
            Event::Spike { step, loss, median, deviations } => self.line(format!(
                "step {step}  loss {loss:.4} stands {deviations:.0} deviations above its median of {median:.4}"
            )),
            Event::Resume { step } => self.line(format!("continuing after step {step}")),
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
        // A step back, as after a checkpoint was taken up again, is no progress.
        let made = step.step.saturating_sub(self.began_step) as f64;
        let rate = made / self.began.elapsed().as_secs_f64();
        let status = Status {
            step,
            steps: self.steps,
            smoothed_loss,
            memory_bytes: self.memory_bytes,
            seconds_left: self.steps.saturating_sub(step.step) as f64 / rate,
            is_of_images: self.is_of_images,
        };
        if self.screen.live {
            let terminal = Term::stderr();
            let (_, width) = terminal.size_checked().unwrap_or((0, USUAL_WIDTH));
            let width = usize::from(width).max(1);
            // A terminal that became narrower has broken the bar's line in several, and the bar clears only the last.
            let above = self.drawn_width.div_ceil(width).saturating_sub(1);
            if above > 0 {
                self.bar.suspend(|| {
                    let _ = terminal.clear_last_lines(above);
                });
            }
            self.drawn_width = width;
            self.bar.set_message(status.bar(width));
        } else {
            self.last_line = Some(Instant::now());
            self.screen.note(status.line());
        }
    }

    pub fn line(&self, line: String) {
        self.screen.note_above(self.screen.live.then_some(&self.bar), line);
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
