//! `doctor --speed attention`: times every attention kernel on this machine, on a list of representative shapes.

use std::process::ExitCode;

use flatout_train::Failure;
use flatout_train::device::kernels::{self, COPY, Lap, PADDED, Raced, Shape};
use serde_json::{Value, json};

use crate::screen::Screen;

/// Times the shapes and prints each when it is done; the exit code is 1 if one cannot be timed.
pub fn attention(only: &str, screen: &Screen) -> Result<ExitCode, Failure> {
    let mut show = |raced: &Raced| {
        if !screen.json {
            lines(raced).into_iter().for_each(|line| screen.result(line));
        }
    };
    let (gpu, all) = kernels::race_attention(only, &mut show).map_err(Failure::Environment)?;
    if screen.json {
        let shapes: Vec<Value> = all.iter().map(shape).collect();
        screen.object(&json!({ "gpu": gpu, "attention": shapes }));
    } else {
        screen.result(format!("{} shapes on the {gpu}", all.len()));
    }
    let failed = all.iter().any(|raced| raced.laps.is_err());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The baseline of the comparison: cuDNN on padded sequences if the shape has them, else on the same sequences.
fn baseline(laps: &[Lap]) -> Option<&Lap> {
    let named = |name: &str| laps.iter().find(|lap| lap.kernel == name);
    named(PADDED).or_else(|| named("cudnn"))
}

fn copy(laps: &[Lap]) -> Option<&Lap> {
    laps.iter().find(|lap| lap.kernel == COPY)
}

fn lines(raced: &Raced) -> Vec<String> {
    let laps = match &raced.laps {
        Ok(laps) => laps,
        Err(why) => return vec![format!("{}\n  FAILED: {why}", raced.name)],
    };
    let mut lines = vec![raced.name.clone()];
    for lap in laps {
        let spread = format!("{:.3} to {:.3}", lap.shortest_ms, lap.longest_ms);
        let rate = match copy(laps) {
            Some(copy) => {
                let share = 100.0 * lap.gigabytes_a_second() / copy.gigabytes_a_second();
                format!("{:7.0} GB/s  {share:4.0}% of copy", lap.gigabytes_a_second())
            }
            None => format!("{:7.1} TFLOP/s", lap.teraflops()),
        };
        let against = baseline(laps).filter(|baseline| baseline.kernel != lap.kernel && lap.kernel != COPY);
        let against = against
            .map(|baseline| format!("  {:5.2} times the speed of {}", baseline.ms / lap.ms, baseline.kernel))
            .unwrap_or_default();
        lines.push(format!("  {:14} {:8.3} ms ({spread})  {rate}{against}", lap.kernel, lap.ms));
    }
    lines
}

fn shape(raced: &Raced) -> Value {
    let Shape { backward, causal, heads, kv_heads, size, lengths, padded_to } = &raced.shape;
    let mut object = json!({
        "shape": raced.name,
        "backward": backward,
        "causal": causal,
        "heads": heads,
        "kv_heads": kv_heads,
        "size": size,
        "lengths": lengths,
        "padded_to": padded_to,
    });
    let laps = match &raced.laps {
        Ok(laps) => laps,
        Err(why) => {
            object["failed"] = json!(why);
            return object;
        }
    };
    let lap = |lap: &Lap| {
        json!({
            "kernel": lap.kernel,
            "ms": lap.ms,
            "shortest_ms": lap.shortest_ms,
            "longest_ms": lap.longest_ms,
            "tflops": lap.teraflops(),
            "gb_per_s": lap.gigabytes_a_second(),
            "times_cudnn": baseline(laps).map(|baseline| baseline.ms / lap.ms),
            "of_copy": copy(laps).map(|copy| lap.gigabytes_a_second() / copy.gigabytes_a_second()),
        })
    };
    object["kernels"] = laps.iter().map(lap).collect();
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lap(kernel: &str, ms: f64) -> Lap {
        let (flops, bytes) = (1_000_000_000_000, 4_000_000_000);
        Lap { kernel: kernel.into(), ms, shortest_ms: ms, longest_ms: ms, flops, bytes }
    }

    fn raced(name: &str, laps: Result<Vec<Lap>, String>) -> Raced {
        let lengths = vec![(3, 3), (5, 5)];
        let shape = Shape {
            backward: false,
            causal: true,
            heads: 4,
            kv_heads: 1,
            size: 64,
            lengths,
            padded_to: Some(8),
        };
        Raced { name: name.into(), shape, laps }
    }

    #[test]
    fn kernels_are_compared_with_cudnn_and_with_a_copy() {
        let packed = vec![lap("cudnn", 4.0), lap("mma", 2.0), lap(PADDED, 8.0)];
        let packed = raced("packed", Ok(packed));
        let shown = lines(&packed);
        assert!(shown[2].ends_with("500.0 TFLOP/s   4.00 times the speed of cudnn, padded"), "{}", shown[2]);
        assert!(shown[3].ends_with("125.0 TFLOP/s"), "{}", shown[3]);
        assert_eq!(shape(&packed)["kernels"][0]["times_cudnn"], 2.0);
        assert_eq!(shape(&packed)["lengths"][1][0], 5);
        let decode = raced("decode", Ok(vec![lap("decode", 2.0), lap(COPY, 1.0)]));
        assert!(lines(&decode)[1].ends_with("2000 GB/s    50% of copy"), "{}", lines(&decode)[1]);
        let failed = raced("x", Err("no memory".into()));
        assert_eq!(shape(&failed)["failed"], "no memory");
    }
}
