//! Formatting of numbers for people.

/// A count with thousands separators: 4096 becomes 4,096.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The size of an image: its width, and its height if that differs.
pub(crate) fn pixels([height, width]: [usize; 2]) -> String {
    if height == width { width.to_string() } else { format!("{width} x {height}") }
}
