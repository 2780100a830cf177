//! Horizontal bar charts with an interval for each bar.

use super::{Scale, Svg, WIDTH};

#[derive(Clone, Debug)]
pub struct Bars {
    pub title: String,
    pub x: String,
    /// Where bars begin: 0, or 1 for ratios.
    pub from: f64,
    pub bars: Vec<Bar>,
}

#[derive(Clone, Debug)]
pub struct Bar {
    pub name: String,
    pub value: f64,
    /// The interval, drawn as an error bar.
    pub range: Option<(f64, f64)>,
    /// Text after the bar.
    pub note: String,
    /// The index of its colour, as for curves.
    pub colour: usize,
}

const LEFT: f64 = 210.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;
const ROW: f64 = 22.0;
const THICK: f64 = 12.0;
const ACROSS: f64 = WIDTH - LEFT - RIGHT;

impl Bars {
    pub fn to_svg(&self) -> String {
        let down = ROW * self.bars.len().max(1) as f64;
        let mut svg = Svg::new(&self.title, TOP + down + BOTTOM);
        svg.text("title", 16.0, 20.0, "start", &self.title);
        let ends = |bar: &Bar| {
            [bar.value, bar.range.map_or(bar.value, |r| r.0), bar.range.map_or(bar.value, |r| r.1)]
        };
        let shown = || self.bars.iter().filter(|bar| bar.value.is_finite());
        let Some(x) = Scale::over(shown().flat_map(ends).chain([self.from]), false, 0.04)
            .filter(|_| shown().next().is_some())
        else {
            svg.text("label", WIDTH / 2.0, TOP + ROW / 2.0, "middle", "nothing to show yet");
            return svg.finish();
        };
        let at = |value: f64| x.place(value).map_or(LEFT, |place| LEFT + place * ACROSS);
        let bottom = TOP + down;
        for (value, label) in x.ticks(8) {
            svg.line("grid", at(value), TOP, at(value), bottom);
            svg.text("tick", at(value), bottom + 16.0, "middle", &label);
        }
        svg.text("label", LEFT + ACROSS / 2.0, bottom + 36.0, "middle", &self.x);
        for (i, bar) in self.bars.iter().enumerate() {
            let middle = TOP + ROW * (i as f64 + 0.5);
            svg.text("tick", LEFT - 8.0, middle + 4.0, "end", &bar.name);
            if !bar.value.is_finite() {
                continue;
            }
            let (a, b) = (at(self.from).min(at(bar.value)), at(self.from).max(at(bar.value)));
            let (wide, top) = ((b - a).max(1.0), middle - THICK / 2.0);
            let colour = bar.colour % super::COLOURS.len();
            svg.raw(&format!(
                r#"<rect class="f{colour}" x="{a:.1}" y="{top:.1}" width="{wide:.1}" height="{THICK}"/>"#
            ));
            let mut end = b;
            if let Some((low, high)) = bar.range {
                svg.line("axis", at(low), middle, at(high), middle);
                for place in [at(low), at(high)] {
                    svg.line("axis", place, middle - 4.0, place, middle + 4.0);
                }
                end = end.max(at(high));
            }
            svg.text("tick", end + 6.0, middle + 4.0, "start", &bar.note);
        }
        svg.line("axis", at(self.from), TOP, at(self.from), bottom);
        svg.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(name: &str, value: f64, range: Option<(f64, f64)>) -> Bar {
        Bar { name: name.into(), value, range, note: format!("{value}x"), colour: 0 }
    }

    fn bars(bars: Vec<Bar>) -> String {
        Bars { title: "Worth".into(), x: "times".into(), from: 1.0, bars }.to_svg()
    }

    #[test]
    fn bars_begin_at_the_base_and_carry_their_range() {
        let svg = bars(vec![bar("up", 1.5, Some((1.4, 1.6))), bar("down", 0.5, None)]);
        let rect = |i: usize| {
            let line = svg.lines().filter(|line| line.starts_with("<rect")).nth(i).expect("a bar");
            let number = |name: &str| -> f64 {
                let from = line.find(&format!(" {name}=\"")).expect(name) + name.len() + 3;
                line[from..].split('"').next().unwrap().parse().unwrap()
            };
            (number("x"), number("width"))
        };
        let (up, down) = (rect(0), rect(1));
        assert!((up.0 - (down.0 + down.1)).abs() < 0.2, "one ends where the other begins");
        assert!((up.1 - down.1).abs() < 0.2, "half more is as long as half less");
        assert_eq!(svg.matches("class=\"axis\"").count(), 4, "a range with two ends, and the base");
        assert!(svg.contains(">up</text>") && svg.contains(">1.5x</text>") && svg.contains(">times</text>"));
        assert!(svg.contains("viewBox=\"0 0 760 124\""), "as high as its rows: {svg}");
    }

    #[test]
    fn empty_charts_say_so_and_a_gap_keeps_its_name() {
        assert!(bars(vec![]).contains("nothing to show yet"));
        let svg = bars(vec![bar("gone", f64::NAN, None), bar("there", 2.0, None)]);
        assert!(svg.contains(">gone</text>") && svg.matches("<rect").count() == 1 && !svg.contains("NaN\" "));
    }
}
