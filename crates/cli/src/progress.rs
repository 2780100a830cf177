//! What a run shows while it trains: a bar on a terminal, lines elsewhere, events as JSON where asked for.

use std::time::{Duration, Instant};

use flatout_train::events::Event;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::screen::{Screen, count, duration};

/// Seconds between lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

pub struct Progress {
    screen: Screen,
    bar: ProgressBar,
    steps: u64,
    smoothed: Option<f64>,
    began: Instant,
    began_step: u64,
    last_line: Option<Instant>,
}

impl Progress {
    pub fn new(screen: Screen, steps: u64, done: u64) -> Progress {
        let bar = ProgressBar::new(steps);
        bar.set_draw_target(if screen.live {
            ProgressDrawTarget::stderr_with_hz(8)
        } else {
            ProgressDrawTarget::hidden()
        });
        let style =
            ProgressStyle::with_template("{bar:28} {pos}/{len}  {msg}").expect("a template that parses");
        bar.set_style(style.progress_chars("━╸ "));
        bar.set_position(done);
        Progress {
            screen,
            bar,
            steps,
            smoothed: None,
            began: Instant::now(),
            began_step: done,
            last_line: None,
        }
    }

    pub fn event(&mut self, event: &Event) {
        if self.screen.json {
            return self.screen.result(event.to_json());
        }
        match event {
            Event::Step(step) => {
                let loss = step.loss as f64;
                let smoothed = self.smoothed.map_or(loss, |s| 0.95 * s + 0.05 * loss);
                self.smoothed = Some(if smoothed.is_finite() { smoothed } else { loss });
                let rate = (step.step - self.began_step) as f64 / self.began.elapsed().as_secs_f64();
                let left = duration((self.steps - step.step) as f64 / rate);
                let speed = count(step.tokens_per_second as u64);
                let line = format!("loss {smoothed:.4}  {speed} tok/s  {left} left");
                self.bar.set_position(step.step);
                self.bar.set_message(line.clone());
                let due =
                    self.last_line.is_none_or(|at| at.elapsed() >= LINE_EVERY) || step.step == self.steps;
                if !self.screen.live && due {
                    self.last_line = Some(Instant::now());
                    self.screen.note(format!("step {}/{}  {line}", step.step, self.steps));
                }
            }
            Event::Eval { step, loss } => self.line(format!("step {step}  held-out loss {loss:.4}")),
            Event::Saved { step, path } if self.screen.verbose => {
                self.line(format!("step {step}  saved {path}"))
            }
            Event::Warning { message } => self.line(format!("warning: {message}")),
            Event::Spike { step, loss, median, deviations } => self.line(format!(
                "step {step}  loss {loss:.4} stands {deviations:.0} deviations above its median of {median:.4}"
            )),
            Event::Resume { step } => self.line(format!("continuing after step {step}")),
            Event::Start(_) | Event::Saved { .. } | Event::End(_) => {}
        }
    }

    pub fn line(&self, line: String) {
        if self.screen.live {
            self.bar.println(line);
        } else {
            self.screen.note(line);
        }
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
