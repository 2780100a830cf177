//! The status of a run as one line: the figures after an update, in full or shortened to a width.

use flatout_train::metrics::Metrics;
use flatout_train::run::events::Step;

use crate::palette::Ink;
use crate::screen::{bytes, count, duration};

/// The figures shown after an update.
pub struct Status {
    pub step: Step,
    /// Steps of the whole run.
    pub steps: u64,
    pub smoothed_loss: f64,
    /// Planned memory and the driver's.
    pub memory_bytes: u64,
    pub seconds_left: f64,
    /// Whether the model is trained on images, whose rate is not in tokens.
    pub is_of_images: bool,
}

/// A field of the line with its rank: fields of the highest rank are dropped first where there is no room.
type StatusField = (u8, String);

const GAP: &str = "  ";
/// (terminal width, width of the bar from there on).
const BARS: [(usize, usize); 3] = [(120, 28), (80, 16), (56, 8)];

impl Status {
    /// The full line, for a log.
    pub fn line(&self) -> String {
        let texts: Vec<String> = self.fields().into_iter().map(|(_, text)| text).collect();
        format!("step {}/{}{GAP}{}", self.step.step, self.steps, texts.join(GAP))
    }

    /// A bar and the fields that fit beside it, at most `width` characters.
    pub fn bar(&self, width: usize) -> String {
        let places = BARS.iter().find(|(from, _)| width >= *from).map_or(0, |(_, places)| *places);
        let mut head = format!("{}/{}", self.step.step, self.steps);
        if places > 0 {
            head = format!("{} {head}", bar(self.step.step as f64 / self.steps.max(1) as f64, places));
        }
        let mut fields = self.fields();
        loop {
            let texts = fields.iter().map(|(_, text)| text.as_str());
            let line = std::iter::once(head.as_str()).chain(texts).collect::<Vec<_>>().join(GAP);
            if line.chars().count() <= width {
                return line;
            }
            match fields.iter().map(|(rank, _)| *rank).max() {
                Some(last) => fields.retain(|(rank, _)| *rank != last),
                None => return line.chars().take(width).collect(),
            }
        }
    }

    fn fields(&self) -> Vec<StatusField> {
        let step = &self.step;
        let percent = |share: f64| format!("{:.0}%", 100.0 * share);
        let mut fields =
            vec![(0, format!("loss {:.4}", step.loss)), (4, format!("mean {:.4}", self.smoothed_loss))];
        if let Some(rewards) = step.metrics.as_ref().and_then(Metrics::rewards) {
            fields.push((2, format!("reward accuracy {:.2}", rewards.reward_accuracy)));
            fields.push((3, format!("margin {:.3}", rewards.reward_margin)));
        }
        match self.is_of_images {
            true => fields.push((2, format!("{} images/s", rate(step.samples_per_second)))),
            false => fields.extend([
                (2, format!("{} tok/s", count(step.tokens_per_second as u64))),
                (10, format!("{} rows/s", rate(step.samples_per_second))),
            ]),
        }
        let mut known = |rank, text: Option<String>| fields.extend(text.map(|text| (rank, text)));
        known(5, step.mfu.map(|mfu| format!("MFU {:.1}%", 100.0 * mfu)));
        known(8, step.of_predicted.map(|share| format!("{} of predicted", percent(share))));
        known(8, step.of_roofline.map(|share| format!("{} of roofline", percent(share))));
        known(9, Some(bytes(self.memory_bytes)));
        known(6, step.data_wait_ms.map(|wait| format!("data {}", percent(wait / step.step_ms))));
        if let Some(gpu) = &step.gpu {
            let load = gpu.utilization.map(percent);
            let power = gpu.power_watts.map(|watts| format!("{watts:.0} W"));
            let of_gpu: Vec<String> = load.into_iter().chain(power).collect();
            known(7, (!of_gpu.is_empty()).then(|| format!("GPU {}", of_gpu.join(" "))));
            known(
                3,
                (!gpu.throttled.is_empty()).then(|| format!("throttled by {}", gpu.throttled.join(", "))),
            );
        }
        known(3, (step.skipped > 0).then(|| format!("{} updates skipped", step.skipped)));
        known(1, self.seconds_left.is_finite().then(|| format!("{} left", duration(self.seconds_left))));
        fields
    }
}

/// Colours the line of a bar; escape sequences take no columns.
pub fn painted(line: &str) -> String {
    let from = line.find(|c: char| c.is_ascii_digit()).unwrap_or(0);
    let (bar, rest) = line.split_at(from);
    let bar = Ink::Bar.paint(bar, !bar.trim().is_empty());
    match rest.split(GAP).find(|piece| piece.starts_with("loss ")) {
        Some(loss) => format!("{bar}{}", rest.replacen(loss, &Ink::Strong.paint(loss, true), 1)),
        None => format!("{bar}{rest}"),
    }
}

/// Formats rows per second, with a decimal below 10.
fn rate(rows: f64) -> String {
    if rows < 10.0 { format!("{rows:.1}") } else { count(rows as u64) }
}

/// Draws a bar of `places` characters that is filled to a share, in steps of half a character.
fn bar(share: f64, places: usize) -> String {
    let halves = (share.clamp(0.0, 1.0) * 2.0 * places as f64) as usize;
    let (full, half) = (halves / 2, halves % 2);
    format!("{}{}{}", "━".repeat(full), "╸".repeat(half), " ".repeat(places - full - half))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_train::run::events::GpuSample;

    fn step() -> Step {
        let gpu = GpuSample {
            utilization: Some(0.98),
            power_watts: Some(690.4),
            throttled: vec!["power".into()],
            ..GpuSample::default()
        };
        let line = r#"{"step":317,"epoch":0,"loss":1.5001,"grad_norm":1,"lr":1,"tokens":1,"samples":1,"step_ms":250,
            "tokens_per_second":255358,"samples_per_second":124.7,"mfu":0.412,"of_predicted":0.88,"data_wait_ms":5}"#;
        Step { gpu: Some(gpu), ..serde_json::from_str(line).expect("a step") }
    }

    fn status(step: &Step) -> Status {
        Status {
            step: step.clone(),
            steps: 800,
            smoothed_loss: 1.487,
            memory_bytes: 35 << 30,
            seconds_left: 725.0,
            is_of_images: false,
        }
    }

    #[test]
    fn a_line_has_every_known_figure() {
        assert_eq!(
            status(&step()).line(),
            "step 317/800  loss 1.5001  mean 1.4870  255,358 tok/s  124 rows/s  MFU 41.2%  88% of predicted  35.0 GiB  \
             data 2%  GPU 98% 690 W  throttled by power  12 min left"
        );
        let roofline = Step { of_predicted: None, of_roofline: Some(0.58), ..step() };
        assert!(status(&roofline).line().contains("58% of roofline"));
        let plain = Step { gpu: None, mfu: None, of_predicted: None, data_wait_ms: None, ..step() };
        assert_eq!(
            status(&plain).line(),
            "step 317/800  loss 1.5001  mean 1.4870  255,358 tok/s  124 rows/s  35.0 GiB  12 min left",
            "unknown figures are left out"
        );
        let rewards =
            r#"{"reward_accuracy":0.9375,"reward_margin":1.25,"reward_chosen":1.0,"reward_rejected":-0.25}"#;
        let rewards = Step { metrics: serde_json::from_str(rewards).expect("metrics"), ..plain.clone() };
        assert!(
            status(&rewards)
                .line()
                .contains("  mean 1.4870  reward accuracy 0.94  margin 1.250  255,358 tok/s")
        );
        let skipped = Step { skipped: 3, ..plain };
        assert!(status(&skipped).line().contains("  3 updates skipped  "));
    }

    #[test]
    fn a_bar_never_wraps_and_keeps_what_matters_most() {
        let step = step();
        let status = status(&step);
        let mut before = 0;
        for width in 0..260 {
            let line = status.bar(width);
            assert!(line.chars().count() <= width, "{width}: {line}");
            let shown = line.split(GAP).filter(|piece| !piece.trim().is_empty()).count();
            // Where a longer bar begins, fields may be dropped.
            assert!(shown + 3 >= before, "{width}: {line}");
            before = shown;
        }
        assert_eq!(status.bar(7), "317/800");
        assert_eq!(status.bar(3), "317");
        assert_eq!(status.bar(30), "317/800  loss 1.5001");
        assert_eq!(status.bar(34), "317/800  loss 1.5001  12 min left");
        assert_eq!(status.bar(80), "━━━━━━           317/800  loss 1.5001  255,358 tok/s  12 min left");
        assert!(status.bar(250).ends_with("data 2%  GPU 98% 690 W  throttled by power  12 min left"));
    }

    #[test]
    fn colours_take_no_columns() {
        let line = status(&step()).bar(80);
        let painted = painted(&line);
        assert_eq!(console::strip_ansi_codes(&painted), line);
        assert!(
            painted.contains("\x1b[1mloss 1.5001\x1b[0m") && painted.starts_with("\x1b[36m"),
            "{painted:?}"
        );
        assert_eq!(super::painted("317"), "317");
    }

    #[test]
    fn a_bar_fills_by_halves() {
        assert_eq!(
            [0.0, 0.126, 0.5, 1.0, 1.5].map(|share| bar(share, 4)),
            ["    ", "╸   ", "━━  ", "━━━━", "━━━━"]
        );
    }
}
