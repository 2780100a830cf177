//! Formats numbers for people.

pub use flatout_models::words::count;

/// Bytes in the largest unit in which they are at least one.
pub fn bytes(n: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} bytes") } else { format!("{value:.1} {}", units[unit]) }
}

/// A count with a unit: 226.5M.
pub fn short(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1}K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1}M", n as f64 / 1e6),
        _ => format!("{:.2}B", n as f64 / 1e9),
    }
}

/// Arithmetic with a unit: 1.66 GFLOP.
pub fn flops(n: f64) -> String {
    let units = [(1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "KFLOP")];
    match units.into_iter().find(|(unit, _)| n >= *unit) {
        Some((unit, name)) => format!("{:.2} {name}", n / unit),
        None => format!("{n:.0} FLOP"),
    }
}

/// A duration in the unit that suits it.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}

/// A measured time in milliseconds.
pub fn milliseconds(ms: f64) -> String {
    if ms < 100.0 { format!("{ms:.2} ms") } else { format!("{ms:.1} ms") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_has_the_unit_that_fits() {
        assert_eq!(flops(1.66e9), "1.66 GFLOP");
        assert_eq!(flops(2.247e14), "224.70 TFLOP");
        assert_eq!(flops(12.0), "12 FLOP");
    }

    #[test]
    fn numbers_have_units_that_suit_them() {
        assert_eq!([count(7), count(4096), count(1_234_567)], ["7", "4,096", "1,234,567"]);
        assert_eq!([bytes(512), bytes(1536), bytes(3 << 30)], ["512 bytes", "1.5 KiB", "3.0 GiB"]);
        assert_eq!([short(512), short(826_000), short(226_546_432)], ["512", "826.0K", "226.5M"]);
        assert_eq!([duration(4.2), duration(61.0), duration(600.0)], ["4.2 s", "61 s", "10 min"]);
    }
}
