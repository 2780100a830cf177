//! Stacked area charts with a mark at the highest point and notes below.

use super::{ACROSS, COLOURS, LEFT, LETTER, RIGHT, Scale, Svg, WIDTH};

#[derive(Clone, Debug)]
pub struct Areas {
    pub title: String,
    pub x: String,
    pub y: String,
    /// Areas from the bottom up, all of one length.
    pub areas: Vec<Area>,
    /// A dashed horizontal line, and its label.
    pub level: Option<(f64, String)>,
    /// The begin and the name of each part of the axis.
    pub parts: Vec<(usize, String)>,
    pub mark: Option<Mark>,
    /// Lines below the axis.
    pub notes: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct Area {
    pub name: String,
    /// A value for each position on the axis.
    pub values: Vec<f64>,
}

#[derive(Clone, Debug)]
pub struct Mark {
    pub at: usize,
    pub value: f64,
    pub name: String,
}

const TOP: f64 = 72.0;
const DOWN: f64 = 280.0;
const NOTE: f64 = 17.0;
/// Height between the axis and the first note: two rows of part names, then the axis label.
const FOOT: f64 = 66.0;
/// Labels that are closer than this overlap.
const LINE: f64 = 16.0;

fn width(text: &str) -> f64 {
    LETTER * text.chars().count() as f64
}

/// Wraps a text between words into lines of at most this width.
fn wrapped(text: &str, most: f64) -> Vec<String> {
    let mut lines: Vec<String> = vec![];
    for word in text.split(' ') {
        match lines.last_mut().filter(|line| width(line) + width(word) + LETTER <= most) {
            Some(line) => *line += &format!(" {word}"),
            None => lines.push(word.into()),
        }
    }
    lines
}

impl Areas {
    pub fn to_svg(&self) -> String {
        let bottom = TOP + DOWN;
        let notes: Vec<String> = self.notes.iter().flat_map(|note| wrapped(note, ACROSS)).collect();
        let mut svg = Svg::new(&self.title, bottom + FOOT + NOTE * notes.len() as f64);
        svg.text("title", LEFT, 20.0, "start", &self.title);
        let count = self.areas.first().map_or(0, |area| area.values.len());
        let total = |i: usize| self.areas.iter().map(|area| area.values[i]).sum::<f64>();
        let highest =
            (0..count).map(total).chain(self.level.iter().map(|(value, _)| *value)).fold(0.0, f64::max);
        let Some(y) = Scale::over([0.0, 1.08 * highest], false, 0.0).filter(|_| count > 0 && highest > 0.0)
        else {
            svg.text("label", WIDTH / 2.0, TOP + DOWN / 2.0, "middle", "nothing to show yet");
            return svg.finish();
        };
        let height = |value: f64| bottom - y.place(value).unwrap_or(0.0) * DOWN;
        let along = |i: usize| LEFT + ACROSS * i as f64 / count as f64;
        for (value, label) in y.ticks(6) {
            svg.line("grid", LEFT, height(value), LEFT + ACROSS, height(value));
            svg.text("tick", LEFT - 8.0, height(value) + 4.0, "end", &label);
        }
        self.stack(&mut svg, &columns(count, total), &along, &height);
        if let Some((value, name)) = &self.level {
            svg.raw(&format!(
                r#"<path class="axis" stroke-dasharray="5 4" d="M{LEFT:.1} {at:.1}L{:.1} {at:.1}"/>"#,
                LEFT + ACROSS,
                at = height(*value)
            ));
            svg.text("tick", LEFT + ACROSS, height(*value) - 5.0, "end", name);
        }
        // A name that would overlap the one before goes to the second row; none extends beyond the picture.
        let mut free = [LEFT; 2];
        for (start, name) in &self.parts {
            let at = along(*start);
            if *start > 0 {
                svg.line("axis", at, TOP, at, bottom + 4.0);
            }
            let from = (at + 2.0).min(LEFT + ACROSS - width(name)).max(LEFT);
            let row = usize::from(from < free[0] && free[0] > free[1]);
            svg.text("tick", from, bottom + LINE * (1 + row) as f64, "start", name);
            free[row] = from + width(name) + LETTER;
        }
        if let Some(Mark { at, value, name }) = &self.mark {
            let (x, y) = (along(*at), height(*value));
            svg.line("axis", x, y - 10.0, x, bottom);
            // On the side with more room, and below the line where the level's label is above it.
            let (anchor, aside) = if x < LEFT + ACROSS / 2.0 { ("start", 4.0) } else { ("end", -4.0) };
            let is_taken = self.level.as_ref().is_some_and(|(level, _)| (height(*level) - y).abs() < LINE);
            svg.text("label", x + aside, if is_taken { y + LINE } else { y - 8.0 }, anchor, name);
        }
        svg.line("axis", LEFT, bottom, LEFT + ACROSS, bottom);
        svg.text("label", WIDTH - RIGHT, bottom + FOOT - LINE, "end", &self.x);
        svg.text("label", LEFT, TOP - 6.0, "end", &self.y);
        self.legend(&mut svg);
        for (i, note) in notes.iter().enumerate() {
            svg.text("tick", LEFT, bottom + FOOT + NOTE * i as f64, "start", note);
        }
        svg.finish()
    }

    /// Draws each area, in steps, on top of the sum of those below it.
    fn stack(
        &self,
        svg: &mut Svg,
        columns: &[usize],
        along: &impl Fn(usize) -> f64,
        height: &impl Fn(f64) -> f64,
    ) {
        let count = self.areas[0].values.len();
        let mut below = vec![0.0; columns.len()];
        for (colour, area) in self.areas.iter().enumerate() {
            let above: Vec<f64> =
                columns.iter().zip(&below).map(|(i, base)| base + area.values[*i]).collect();
            let end = |n: usize| columns.get(n + 1).map_or(along(count), |next| along(*next));
            let edge = |values: &[f64]| -> Vec<(f64, f64)> {
                let corners = |(n, i): (usize, &usize)| {
                    let y = height(values[n]);
                    [(along(*i), y), (end(n), y)]
                };
                columns.iter().enumerate().flat_map(corners).collect()
            };
            let (top, foot) = (edge(&above), edge(&below));
            let outline = top.into_iter().chain(foot.into_iter().rev());
            let points: Vec<String> = outline.map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
            let colour = colour % COLOURS.len();
            svg.raw(&format!(r#"<path class="f{colour}" opacity="0.8" d="M{}Z"/>"#, points.join("L")));
            below = above;
        }
    }

    fn legend(&self, svg: &mut Svg) {
        let (mut at, mut y) = (LEFT, 32.0);
        for (colour, area) in self.areas.iter().enumerate() {
            let (colour, wide) = (colour % COLOURS.len(), 17.0 + width(&area.name));
            if at + wide > LEFT + ACROSS {
                (at, y) = (LEFT, y + LINE);
            }
            svg.raw(&format!(
                r#"<rect class="f{colour}" opacity="0.8" x="{at:.1}" y="{y:.0}" width="12" height="12"/>"#
            ));
            svg.text("tick", at + 17.0, y + 10.0, "start", &area.name);
            at += wide + 16.0;
        }
    }
}

/// The positions that are drawn: all where they are few, otherwise the highest of every pixel column.
fn columns(count: usize, total: impl Fn(usize) -> f64) -> Vec<usize> {
    let wide = ACROSS as usize;
    if count <= wide {
        return (0..count).collect();
    }
    let column = |n: usize| n * count / wide..(n + 1) * count / wide;
    let highest =
        |n: usize| column(n).rev().max_by(|a, b| total(*a).total_cmp(&total(*b))).expect("not empty");
    (0..wide).map(highest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn areas(values: [Vec<f64>; 2]) -> Areas {
        let [a, b] = values;
        Areas {
            title: "Arena".into(),
            x: "4 launches".into(),
            y: "MiB".into(),
            areas: vec![Area { name: "below".into(), values: a }, Area { name: "above".into(), values: b }],
            level: Some((10.0, "all".into())),
            parts: vec![(0, "grad".into()), (2, "apply".into())],
            mark: Some(Mark { at: 1, value: 9.0, name: "peak 9".into() }),
            notes: vec!["alive: a & b".into()],
        }
    }

    #[test]
    fn areas_are_stacked() {
        let svg = areas([vec![4.0, 4.0, 4.0, 4.0], vec![1.0, 5.0, 2.0, 0.0]]).to_svg();
        let path = |class: &str| {
            let start = format!("<path class=\"{class}\" opacity=\"0.8\" d=\"M");
            let path = svg.lines().find_map(|line| line.strip_prefix(&start)).expect("an area");
            path.trim_end_matches("Z\"/>").split('L').map(String::from).collect::<Vec<_>>()
        };
        let (below, above) = (path("f0"), path("f1"));
        assert_eq!((below.len(), above.len()), (16, 16), "four places, two corners each, there and back");
        let top = |path: &[String]| path[..8].to_vec();
        let foot = |path: &[String]| path[8..].iter().rev().cloned().collect::<Vec<_>>();
        assert_eq!(foot(&above), top(&below), "one begins where the other ends");
        let at = |value: f64| format!("{:.1}", TOP + DOWN * (1.0 - value / 10.8));
        assert_eq!(top(&above)[2], format!("234.0 {}", at(9.0)), "the second place begins at a quarter");
        for text in
            [">peak 9</text>", ">apply</text>", ">all</text>", ">alive: a &amp; b</text>", ">above</text>"]
        {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn labels_neither_overlap_nor_leave_the_picture() {
        let mut crowded = areas([vec![4.0; 100], vec![5.9; 100]]);
        crowded.parts = vec![(0, "grad".into()), (97, "evaluation".into()), (99, "apply".into())];
        crowded.mark = Some(Mark { at: 90, value: 9.9, name: "peak of 9.9 MiB".into() });
        crowded.notes = vec!["a buffer with a long name, ".repeat(12)];
        let svg = crowded.to_svg();
        let at = |text: &str| -> (f64, f64) {
            let line = svg.lines().find(|line| line.contains(&format!(">{text}</text>"))).expect(text);
            let number = |key: &str| -> f64 {
                let rest = &line[line.find(key).expect(key) + key.len()..];
                rest[..rest.find('"').unwrap()].parse().unwrap()
            };
            (number(" x=\""), number(" y=\""))
        };
        assert!(at("evaluation").0 + width("evaluation") <= LEFT + ACROSS + 0.1);
        assert!(at("apply").0 + width("apply") <= LEFT + ACROSS + 0.1);
        assert!(at("apply").1 > at("evaluation").1, "side by side they would overlap");
        assert!((at("peak of 9.9 MiB").1 - at("all").1).abs() >= LINE);
        let longest = svg.lines().filter(|line| line.contains("a long name")).map(str::len).max().unwrap();
        assert!(longest < 220, "{longest}");
    }

    #[test]
    fn downsampling_keeps_the_highest_position() {
        let mut values: Vec<f64> = (0..10_000).map(|i| (i % 7) as f64).collect();
        values[5_432] = 50.0;
        let kept = columns(values.len(), |i| values[i]);
        assert_eq!(kept.len(), ACROSS as usize);
        assert!(kept.contains(&5_432) && kept.is_sorted());
        assert!(areas([vec![], vec![]]).to_svg().contains("nothing to show yet"));
    }
}
