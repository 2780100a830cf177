//! Draws curves with Braille characters, for a terminal.

use console::Term;
use flatout_report::plot::Scale;

use crate::palette::{has_colours, paint_curve};

pub struct Curve {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// The size and style of a sketch.
#[derive(Clone, Copy)]
pub struct Paper {
    /// Characters, labels included.
    pub width: usize,
    pub height: usize,
    pub log_x: bool,
    /// Curves are distinguished by colours, otherwise by letters.
    pub colours: bool,
}

impl Paper {
    /// The terminal's width within bounds, and colours if the terminal takes them.
    pub fn of(terminal: &Term, height: usize, log_x: bool) -> Paper {
        let (_, width) = terminal.size_checked().unwrap_or((0, 80));
        Paper {
            width: (width as usize).clamp(40, 120),
            height,
            log_x,
            colours: has_colours(terminal.is_term()),
        }
    }
}

/// A Braille character has two columns of four dots.
const ACROSS: usize = 2;
const DOWN: usize = 4;
/// The bit of a dot by row and column in Unicode's Braille patterns.
const DOTS: [[u8; ACROSS]; DOWN] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];

/// The lines of a sketch: a legend, the curves with labels on the left, and the labels below. Empty if there is nothing to draw.
pub fn sketch(curves: &[Curve], paper: Paper) -> Vec<String> {
    let fits = |(x, y): &&(f64, f64)| x.is_finite() && y.is_finite() && (!paper.log_x || *x > 0.0);
    let points = || curves.iter().flat_map(|curve| &curve.points).filter(fits);
    let Some(x) = Scale::over(points().map(|p| p.0), paper.log_x, 0.0) else { return vec![] };
    let Some(y) = Scale::over(points().map(|p| p.1), false, 0.0) else { return vec![] };
    let rows = paper.height.max(2);
    let mut labels: Vec<(usize, String)> = vec![];
    for (value, label) in y.ticks(rows.div_ceil(3)) {
        if let Some(place) = y.place(value).filter(|p| (0.0..=1.0).contains(p)) {
            labels.push((((1.0 - place) * (rows - 1) as f64).round() as usize, label));
        }
    }
    let margin = labels.iter().map(|(_, label)| label.chars().count()).max().unwrap_or(0);
    let columns = paper.width.saturating_sub(margin + 2).max(8);
    let grids: Vec<Grid> = curves.iter().map(|curve| grid(curve, &x, &y, columns, rows)).collect();

    let mut lines = vec![];
    if curves.len() > 1 {
        let names = curves.iter().enumerate().map(|(i, curve)| match paper.colours {
            true => format!("{} {}", paint_curve(i, "━━"), curve.name),
            false => format!("{} {}", letter(i), curve.name),
        });
        lines.push(format!("{:margin$}  {}", "", names.collect::<Vec<_>>().join("   ")));
    }
    for row in 0..rows {
        let label = labels.iter().find(|(at, _)| *at == row).map_or("", |(_, label)| label);
        let edge = if label.is_empty() { '│' } else { '┤' };
        let cells: String =
            (0..columns).map(|column| cell(&grids, row * columns + column, paper.colours)).collect();
        lines.push(format!("{label:>margin$} {edge}{}", cells.trim_end()));
    }
    let (ticks, labels) = below(&x, columns);
    lines.push(format!("{:margin$} └{ticks}", ""));
    lines.push(format!("{:margin$}  {}", "", labels.trim_end()));
    lines
}

/// The dots of one curve in every character.
type Grid = Vec<u8>;

fn grid(curve: &Curve, x: &Scale, y: &Scale, columns: usize, rows: usize) -> Grid {
    let mut dots = vec![0; columns * rows];
    let (wide, high) = ((columns * ACROSS - 1) as f64, (rows * DOWN - 1) as f64);
    let mut set = |a: f64, b: f64| {
        let (a, b) = (a.round().clamp(0.0, wide) as usize, b.round().clamp(0.0, high) as usize);
        dots[b / DOWN * columns + a / ACROSS] |= DOTS[b % DOWN][a % ACROSS];
    };
    let mut before: Option<(f64, f64)> = None;
    for (a, b) in &curve.points {
        let spot = x.place(*a).zip(y.place(*b)).map(|(a, b)| (a * wide, (1.0 - b) * high));
        if let Some((a, b)) = spot {
            let (from_a, from_b) = before.unwrap_or((a, b));
            let steps = (a - from_a).abs().max((b - from_b).abs()).ceil().max(1.0) as usize;
            for i in 0..=steps {
                let share = i as f64 / steps as f64;
                set(from_a + share * (a - from_a), from_b + share * (b - from_b));
            }
        }
        before = spot;
    }
    dots
}

/// One character: dots if there is only one curve or if there are colours, otherwise the curve's letter, or a star where several
/// meet.
fn cell(grids: &[Grid], at: usize, colours: bool) -> String {
    let here: Vec<usize> = (0..grids.len()).filter(|i| grids[*i][at] != 0).collect();
    let Some(first) = here.first() else { return " ".into() };
    let dots = here.iter().fold(0, |dots, i| dots | grids[*i][at]);
    let dots = char::from_u32(0x2800 + dots as u32).unwrap_or(' ').to_string();
    match (colours, grids.len(), here.len()) {
        (_, 1, _) => dots,
        (true, ..) => paint_curve(*first, &dots),
        (false, _, 1) => letter(*first).to_string(),
        (false, ..) => "*".into(),
    }
}

fn letter(i: usize) -> char {
    (b'a' + (i % 26) as u8) as char
}

/// The axis below the curves with its ticks, and the line of labels, which do not overlap.
fn below(x: &Scale, columns: usize) -> (String, String) {
    let mut ticks = vec!['─'; columns];
    let mut labels = vec![' '; columns];
    let mut free = 0;
    for (value, label) in x.ticks((columns / 12).max(2)) {
        let Some(place) = x.place(value).filter(|p| (0.0..=1.0).contains(p)) else { continue };
        let at = (place * (columns - 1) as f64).round() as usize;
        let wide = label.chars().count();
        let start = at.saturating_sub(wide / 2).min(columns.saturating_sub(wide));
        if start < free || wide > columns {
            continue;
        }
        ticks[at] = '┴';
        labels[start..start + wide].iter_mut().zip(label.chars()).for_each(|(place, c)| *place = c);
        free = start + wide + 1;
    }
    (ticks.into_iter().collect(), labels.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAPER: Paper = Paper { width: 30, height: 5, log_x: false, colours: false };

    fn curve(name: &str, points: &[(f64, f64)]) -> Curve {
        Curve { name: name.into(), points: points.to_vec() }
    }

    #[test]
    fn one_curve_is_drawn_in_dots() {
        let down: Vec<(f64, f64)> = (0..=100).map(|i| (i as f64, 4.0 - i as f64 / 25.0)).collect();
        let lines = sketch(&[curve("a", &down)], PAPER);
        assert_eq!(
            lines,
            [
                "4 ┤⠉⠒⠦⢤⣀⡀",
                "  │     ⠉⠑⠲⠤⢄⣀",
                "2 ┤          ⠈⠉⠒⠢⠤⣀⡀",
                "  │                ⠉⠑⠒⠦⢄⣀",
                "0 ┤                     ⠈⠉⠓⠲⠤⣀",
                "  └┴────────────┴────────────┴",
                "   0           50          100",
            ]
        );
    }

    #[test]
    fn several_curves_are_distinguished() {
        let curves = [curve("one", &[(0.0, 0.0), (10.0, 10.0)]), curve("two", &[(0.0, 10.0), (10.0, 0.0)])];
        let lines = sketch(&curves, PAPER);
        assert!(lines[0].contains("a one   b two"), "{lines:?}");
        let drawn = lines[1..6].concat();
        assert!(drawn.contains('a') && drawn.contains('b') && drawn.contains('*'), "{lines:?}");
        let coloured = sketch(&curves, Paper { colours: true, ..PAPER }).concat();
        assert!(coloured.contains("\x1b[36m") && coloured.contains("\x1b[33m") && !coloured.contains('*'));
    }

    #[test]
    fn a_sketch_fits_its_paper() {
        let points: Vec<(f64, f64)> = (1..500).map(|i| (i as f64, (i as f64).sin() * 12_345.0)).collect();
        for width in 24..120 {
            let lines = sketch(
                &[curve("a", &points)],
                Paper { width, height: 8, log_x: width % 2 == 0, colours: false },
            );
            assert_eq!(lines.len(), 10);
            assert!(lines.iter().all(|line| line.chars().count() <= width), "{width}: {lines:#?}");
        }
    }

    #[test]
    fn nothing_to_draw_is_no_sketch() {
        assert!(sketch(&[curve("a", &[(1.0, f64::NAN)])], PAPER).is_empty());
        assert!(!sketch(&[curve("a", &[(1.0, 2.0)])], PAPER).is_empty(), "one point is a sketch");
    }
}
