//! Draws curves as self-contained SVG that is readable on light and dark pages.

mod areas;
mod bars;
mod scale;

pub use areas::{Area, Areas, Mark};
pub use bars::{Bar, Bars};
pub use scale::Scale;

/// Curves on the same axes.
#[derive(Clone, Debug)]
pub struct Plot {
    pub title: String,
    pub x: String,
    pub y: String,
    pub log_x: bool,
    pub log_y: bool,
    /// The share of the x axis at its start whose points do not extend the y axis, because a loss falls as much in its first
    /// steps as in all others. Their curve is clipped to the axes.
    pub skipped: f64,
    pub series: Vec<Series>,
}

#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend, unless empty.
    pub name: String,
    /// Points in the order in which they are joined. A point that is not finite, or not positive on a logarithmic axis, leaves a
    /// gap.
    pub points: Vec<(f64, f64)>,
    pub style: Style,
    /// Series of one colour belong together; counted from 0.
    pub colour: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Line,
    /// A thin line behind the others, without an entry in the legend.
    Faint,
    /// A marker at every point, joined by dashes.
    Marks,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 46.0;
const ACROSS: f64 = WIDTH - LEFT - RIGHT;
const DOWN: f64 = HEIGHT - TOP - BOTTOM;
/// Approximate width of a character in the legend.
const LETTER: f64 = 6.6;

/// Colours on a light and on a dark background, distinguishable also with colour blindness.
const COLOURS: [(&str, &str); 8] = [
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff9d5c"),
    ("#009e73", "#3ddc97"),
    ("#b5478f", "#f29ac8"),
    ("#a67c00", "#f0c419"),
    ("#5b4fc4", "#a79bff"),
    ("#7a4a2b", "#d1a27c"),
    ("#4d4d4d", "#c8c8c8"),
];

impl Plot {
    pub fn to_svg(&self) -> String {
        let points = || self.series.iter().flat_map(|s| &s.points).filter(|(x, y)| self.has_place(*x, *y));
        let x = Scale::over(points().map(|(x, _)| *x), self.log_x, 0.0);
        let counts = |(at, _): &&(f64, f64)| x.is_some_and(|x| x.place(*at) >= Some(self.skipped));
        let y = Scale::over(points().filter(counts).map(|(_, y)| *y), self.log_y, 0.05);
        let mut svg = Svg::new(&self.title, HEIGHT);
        svg.text("title", LEFT, 20.0, "start", &self.title);
        match (x, y) {
            (Some(x), Some(y)) => {
                self.axes(&mut svg, &x, &y);
                self.legend(&mut svg);
                svg.raw(&format!(
                    r#"<clipPath id="axes"><path d="M{LEFT} {TOP}h{ACROSS}v{DOWN}h-{ACROSS}z"/></clipPath><g clip-path="url(#axes)">"#
                ));
                // Faint curves first, so that the others are drawn over them.
                for is_faint in [true, false] {
                    for series in self.series.iter().filter(|s| (s.style == Style::Faint) == is_faint) {
                        draw(&mut svg, series, &x, &y);
                    }
                }
                svg.raw("</g>");
            }
            _ => svg.text("label", LEFT + ACROSS / 2.0, TOP + DOWN / 2.0, "middle", "nothing to show yet"),
        }
        svg.finish()
    }

    fn has_place(&self, x: f64, y: f64) -> bool {
        let fits = |v: f64, log: bool| v.is_finite() && (!log || v > 0.0);
        fits(x, self.log_x) && fits(y, self.log_y)
    }

    fn axes(&self, svg: &mut Svg, x: &Scale, y: &Scale) {
        let bottom = TOP + DOWN;
        for (value, label) in y.ticks(6) {
            let Some(at) = y.place(value).map(|p| bottom - p * DOWN) else { continue };
            svg.line("grid", LEFT, at, LEFT + ACROSS, at);
            svg.text("tick", LEFT - 8.0, at + 4.0, "end", &label);
        }
        for (value, label) in x.ticks(8) {
            let Some(at) = x.place(value).map(|p| LEFT + p * ACROSS) else { continue };
            svg.line("axis", at, bottom, at, bottom + 4.0);
            svg.text("tick", at, bottom + 18.0, "middle", &label);
        }
        svg.line("axis", LEFT, bottom, LEFT + ACROSS, bottom);
        svg.text("label", LEFT + ACROSS / 2.0, HEIGHT - 8.0, "middle", &self.x);
        svg.text("label", LEFT, TOP - 6.0, "end", &self.y);
    }

    fn legend(&self, svg: &mut Svg) {
        let shown: Vec<&Series> =
            self.series.iter().filter(|s| s.style != Style::Faint && !s.name.is_empty()).collect();
        if shown.len() < 2 && shown.iter().all(|s| self.title.starts_with(&s.name)) {
            return;
        }
        let wide = |name: &str| 26.0 + LETTER * name.chars().count() as f64 + 14.0;
        let total: f64 = shown.iter().map(|s| wide(&s.name)).sum();
        let mut at = (LEFT + ACROSS - total).max(LEFT + 24.0);
        for series in shown {
            let colour = series.colour % COLOURS.len();
            svg.raw(&format!(r#"<path class="{} c{colour}" d="M{at:.1} 38h20"/>"#, class(series.style)));
            if series.style == Style::Marks {
                svg.dot(colour, at + 10.0, 38.0);
            }
            svg.text("tick", at + 26.0, 42.0, "start", &series.name);
            at += wide(&series.name);
        }
    }
}

fn class(style: Style) -> &'static str {
    match style {
        Style::Line => "line",
        Style::Faint => "faint",
        Style::Marks => "marks",
    }
}

fn draw(svg: &mut Svg, series: &Series, x: &Scale, y: &Scale) {
    let spot = |(a, b): (f64, f64)| {
        Some((LEFT + x.place(a)? * ACROSS, TOP + (1.0 - y.place(b)?) * DOWN))
            .filter(|(a, b)| (a + b).is_finite())
    };
    let spots = thinned(series.points.iter().map(|point| spot(*point)));
    let (mut path, mut joined) = (String::new(), false);
    for spot in &spots {
        joined = match spot {
            Some((a, b)) => {
                path += &format!("{}{a:.1} {b:.1}", if joined { "L" } else { "M" });
                true
            }
            None => false,
        };
    }
    let colour = series.colour % COLOURS.len();
    if !path.is_empty() {
        svg.raw(&format!(r#"<path class="{} c{colour}" d="{path}"/>"#, class(series.style)));
    }
    if series.style == Style::Marks {
        for (a, b) in spots.iter().flatten() {
            svg.dot(colour, *a, *b);
        }
    }
}

/// Keeps the first, lowest, highest and last of many points within one pixel column, which looks the same.
fn thinned(spots: impl Iterator<Item = Option<(f64, f64)>>) -> Vec<Option<(f64, f64)>> {
    let mut kept: Vec<Option<(f64, f64)>> = vec![];
    let mut column: Vec<(f64, f64)> = vec![];
    let empty = |column: &mut Vec<(f64, f64)>, kept: &mut Vec<_>| {
        if column.len() <= 4 {
            return kept.extend(column.drain(..).map(Some));
        }
        let by_height = |a: &usize, b: &usize| column[*a].1.total_cmp(&column[*b].1);
        let mut chosen = vec![0, column.len() - 1];
        chosen.extend((0..column.len()).min_by(by_height));
        chosen.extend((0..column.len()).max_by(by_height));
        chosen.sort_unstable();
        chosen.dedup();
        kept.extend(chosen.into_iter().map(|i| Some(column[i])));
        column.clear();
    };
    for spot in spots {
        match spot {
            Some(spot) => {
                if column.last().is_some_and(|last| last.0.floor() != spot.0.floor()) {
                    empty(&mut column, &mut kept);
                }
                column.push(spot);
            }
            None => {
                empty(&mut column, &mut kept);
                kept.push(None);
            }
        }
    }
    empty(&mut column, &mut kept);
    kept
}

/// An exponential moving average over `span` tokens, with bias correction at the start. A value is weighted by the tokens since
/// the one before and decays with the tokens that follow, so the result does not depend on how often a run logs. `tokens` has the
/// tokens seen up to each point. Points that are not finite stay as they are.
pub fn smoothed(points: &[(f64, f64)], tokens: &[f64], span: f64) -> Vec<(f64, f64)> {
    let (mut sum, mut weight, mut before) = (0.0, 0.0, 0.0);
    let mean = |((x, y), seen): (&(f64, f64), &f64)| {
        let keep = (-(seen - before).max(0.0) / span).exp();
        before = *seen;
        if !y.is_finite() {
            return (*x, *y);
        }
        sum = keep * sum + (1.0 - keep) * y;
        weight = keep * weight + (1.0 - keep);
        (*x, if weight > 0.0 { sum / weight } else { *y })
    };
    points.iter().zip(tokens).map(mean).collect()
}

/// An SVG document under construction.
struct Svg(String);

impl Svg {
    fn new(title: &str, height: f64) -> Svg {
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" role=\"img\">\n<title>{}</title>\n<style>\n",
            escape(title)
        );
        svg += "text{font:12px system-ui,sans-serif;fill:#24292f}.title{font-weight:600;font-size:14px}.tick{font-size:11px}\n";
        svg += "path{fill:none}.line{stroke-width:1.8}.faint{stroke-width:1;opacity:.3}.marks{stroke-width:1.4;stroke-dasharray:4 3}\n";
        svg += ".axis{stroke:#57606a}.grid{stroke:#57606a;opacity:.18}\n";
        let colours = |pick: fn(&(&'static str, &'static str)) -> &'static str| -> String {
            let rule = |(i, pair)| format!(".c{i}{{stroke:{0}}}.f{i}{{fill:{0}}}", pick(pair));
            COLOURS.iter().enumerate().map(rule).collect()
        };
        svg += &colours(|pair| pair.0);
        svg += "\n@media (prefers-color-scheme:dark){text{fill:#d0d7de}.axis,.grid{stroke:#9ea7b3}";
        svg += &colours(|pair| pair.1);
        svg += "}\n</style>\n";
        Svg(svg)
    }

    fn raw(&mut self, element: &str) {
        self.0 += element;
        self.0.push('\n');
    }

    fn line(&mut self, class: &str, x1: f64, y1: f64, x2: f64, y2: f64) {
        self.raw(&format!(r#"<path class="{class}" d="M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}"/>"#));
    }

    fn dot(&mut self, colour: usize, x: f64, y: f64) {
        self.raw(&format!(r#"<circle class="f{colour}" cx="{x:.1}" cy="{y:.1}" r="3"/>"#));
    }

    fn text(&mut self, class: &str, x: f64, y: f64, anchor: &str, text: &str) {
        let text = escape(text);
        self.raw(&format!(
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#
        ));
    }

    fn finish(mut self) -> String {
        self.0 += "</svg>\n";
        self.0
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, points: &[(f64, f64)], style: Style, colour: usize) -> Series {
        Series { name: name.into(), points: points.to_vec(), style, colour }
    }

    fn plot(series: Vec<Series>) -> Plot {
        Plot {
            title: "Loss".into(),
            x: "step".into(),
            y: "nats".into(),
            log_x: false,
            log_y: false,
            skipped: 0.0,
            series,
        }
    }

    /// The points of all paths of a class.
    fn paths<'a>(svg: &'a str, class: &str) -> Vec<&'a str> {
        let start = format!("<path class=\"{class}\" d=\"");
        svg.lines().filter_map(|line| line.strip_prefix(&start)?.strip_suffix("\"/>")).collect()
    }

    #[test]
    fn curves_share_their_axes() {
        let a = series("a", &[(0.0, 4.0), (100.0, 2.0)], Style::Line, 0);
        let b = series("b", &[(50.0, 0.0), (100.0, 3.0)], Style::Line, 1);
        let svg = plot(vec![a, b]).to_svg();
        // A margin of a twentieth is free above and below: 4 is at 1.05/1.1 of the height, 0 at 0.05/1.1.
        let at = |value: f64| format!("{:.1}", TOP + DOWN * (1.0 - (value / 4.0 + 0.05) / 1.1));
        assert_eq!(paths(&svg, "line c0")[1..], [format!("M64.0 {}L744.0 {}", at(4.0), at(2.0))]);
        assert_eq!(paths(&svg, "line c1")[1..], [format!("M404.0 {}L744.0 {}", at(0.0), at(3.0))]);
        assert_eq!(paths(&svg, "grid").len(), 5, "0, 1, 2, 3, 4");
        for text in [">Loss</text>", ">step</text>", ">nats</text>", ">a</text>", ">b</text>", ">20</text>"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("@media (prefers-color-scheme:dark)"));
    }

    #[test]
    fn gaps_marks_and_faint_curves() {
        let gap = [(0.0, 1.0), (1.0, 2.0), (2.0, f64::NAN), (3.0, 1.0), (4.0, 2.0)];
        let svg = plot(vec![
            series("held-out", &[(0.0, 1.0), (4.0, 2.0)], Style::Marks, 1),
            series("raw", &gap, Style::Faint, 0),
        ])
        .to_svg();
        let [path] = paths(&svg, "faint c0")[..] else { panic!("{svg}") };
        assert_eq!(path.matches('M').count(), 2, "a gap begins a new stroke: {path}");
        assert!(!path.contains("NaN"));
        assert_eq!(svg.matches("<circle class=\"f1\"").count(), 3, "two points and the legend");
        let (faint, marks) = (svg.find("\"faint c0\"").unwrap(), svg.rfind("\"marks c1\"").unwrap());
        assert!(faint < marks, "faint curves lie behind");
        assert!(!svg.contains(">raw</text>"), "and have no entry in the legend");
    }

    #[test]
    fn downsampling_keeps_spikes() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|i| (i as f64, (i % 7) as f64)).collect();
        points[54_321].1 = 100.0;
        let svg = plot(vec![series("a", &points, Style::Line, 0)]).to_svg();
        let path = paths(&svg, "line c0").pop().unwrap();
        let count = path.matches('L').count();
        assert!((1000..4 * ACROSS as usize + 8).contains(&count), "{count}");
        let top = format!(" {:.1}", TOP + DOWN * (1.0 - 1.05 / 1.1));
        assert!(path.contains(&top), "the spike is there");
    }

    #[test]
    fn names_are_escaped_and_empty_plots_say_so() {
        let svg = plot(vec![series("<b>&\"", &[(1.0, f64::NAN)], Style::Line, 0)]).to_svg();
        assert!(svg.contains("nothing to show yet"));
        let svg = plot(vec![series("<b>&\"", &[(1.0, 2.0)], Style::Line, 9)]).to_svg();
        assert!(svg.contains("&lt;b&gt;&amp;&quot;") && svg.contains("line c1"), "colours begin again");
    }

    #[test]
    fn a_logarithmic_axis_leaves_out_values_that_are_not_positive() {
        let points = [(0.0, 1.0), (1.0, 1.0), (10.0, 2.0), (100.0, 3.0)];
        let svg = Plot { log_x: true, ..plot(vec![series("a", &points, Style::Line, 0)]) }.to_svg();
        let path = paths(&svg, "line c0").pop().unwrap();
        assert!(path.starts_with("M64.0 ") && path.contains("L404.0 ") && path.contains("L744.0 "), "{path}");
    }

    #[test]
    fn first_steps_do_not_stretch_the_axis() {
        let points: Vec<(f64, f64)> = (0..=100).map(|i| (i as f64, if i < 3 { 50.0 } else { 2.0 })).collect();
        let all = plot(vec![series("a", &points, Style::Line, 0)]);
        assert!(all.to_svg().contains(">30</text>"));
        let svg = Plot { skipped: 0.05, ..all }.to_svg();
        assert!(!svg.contains(">30</text>") && svg.contains(">2</text>") && svg.contains("clip-path"));
    }

    #[test]
    fn smoothing_is_by_tokens_and_has_no_lag_at_the_start() {
        let points: Vec<(f64, f64)> = (0..200).map(|i| (i as f64, if i < 100 { 4.0 } else { 2.0 })).collect();
        let tokens: Vec<f64> = (1..=200).map(|i| 64.0 * i as f64).collect();
        let mean = smoothed(&points, &tokens, 5.0 * 64.0);
        assert_eq!(mean[0], (0.0, 4.0));
        assert!(mean[101].1 > 3.0 && (mean[199].1 - 2.0).abs() < 1e-6);
        let gap = smoothed(&[(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)], &[1.0, 2.0, 3.0], 1.0);
        assert!(gap[1].1.is_nan());
        // A shorter run has the same curve, and one that logs every second step nearly the same.
        assert_eq!(smoothed(&points[..120], &tokens[..120], 320.0)[..], mean[..120]);
        let level: Vec<(f64, f64)> = points.iter().step_by(2).copied().collect();
        let seen: Vec<f64> = tokens.iter().step_by(2).copied().collect();
        let half = smoothed(&level, &seen, 320.0);
        assert!((half[60].1 - mean[120].1).abs() < 0.1, "{} against {}", half[60].1, mean[120].1);
    }
}
