//! Charts as SVG: bars, histograms, stacked bars, heat maps. Colors and fonts come from the style sheet of the page,
//! which supports light and dark mode; a tooltip shows the numbers of each shape.

use super::{escape, number, shorten};
use crate::units::percentage;
use std::fmt::Write;

/// Width of every chart in SVG units; the page scales it.
const WIDTH: f64 = 640.0;
/// Left end of the bars in SVG units; labels are placed left of it.
const LEFT: f64 = 170.0;
/// Width of the space for numbers right of the bars.
const RIGHT: f64 = 70.0;

/// Attribute of every chart; the section that holds it adds its name.
pub(super) const IMAGE: &str = "role=\"img\"";

/// Attribute that gives bars their color.
const BAR: &str = "class=\"bar\"";

/// One horizontal bar.
pub struct Bar {
    /// Text left of the bar.
    pub label: String,
    /// Value that determines the length of the bar.
    pub value: f64,
    /// Tooltip of the bar.
    pub note: String,
}

/// Draws horizontal bars from zero, with the values as `show` formats them.
pub fn bars(bars: &[Bar], show: impl Fn(f64) -> String) -> String {
    let top = bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    let mut svg = Svg::new(24.0 * bars.len() as f64 + 4.0);
    for (i, bar) in bars.iter().enumerate() {
        let (y, width) = (24.0 * i as f64 + 2.0, (WIDTH - LEFT - RIGHT) * bar.value / top);
        svg.text(LEFT - 10.0, y + 14.0, "label", &shorten(&bar.label, 24));
        svg.rect([LEFT, y, width, 20.0], BAR, &bar.note);
        svg.text(LEFT + width + 6.0, y + 14.0, "value", &show(bar.value));
    }
    svg.end()
}

/// Draws a histogram of `values`, with a named vertical line at each of `marks`. Values far beyond the last mark are
/// counted in the last bin.
pub fn histogram(values: &[f64], marks: &[(&str, f64)], unit: &str) -> String {
    const BINS: usize = 48;
    const BASE: f64 = 190.0;
    const TALLEST: f64 = 138.0;
    let axis = Axis::of(values, marks);
    let mut counts = [0usize; BINS];
    let bin = |value: f64| ((axis.place(value) * BINS as f64) as usize).min(BINS - 1);
    values.iter().for_each(|value| counts[bin(*value)] += 1);
    let top = counts.iter().copied().max().unwrap_or(0).max(1) as f64;
    let (left, width) = (10.0, WIDTH - 20.0);
    let mut svg = Svg::new(BASE + 30.0);
    for (i, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let [from, to] = [i, i + 1].map(|i| i as f64 / BINS as f64);
        let upper = if i + 1 < BINS { format!("to {}", number(axis.value(to))) } else { "and more".to_string() };
        let height = TALLEST * *count as f64 / top;
        let note = format!("{} {upper} {unit}: {count}", number(axis.value(from)));
        svg.rect([left + width * from, BASE - height, width / BINS as f64 - 1.0, height], BAR, &note);
    }
    svg.line([left, BASE, left + width, BASE], "axis");
    for tick in axis.ticks() {
        let x = left + width * axis.place(tick);
        svg.line([x, BASE, x, BASE + 4.0], "axis");
        svg.text(x, BASE + 18.0, "tick", &format!("{} {unit}", number(tick)));
    }
    for (i, (name, at)) in marks.iter().enumerate() {
        let (x, y) = (left + width * axis.place(*at), 14.0 * i as f64 + 6.0);
        svg.line([x, y, x, BASE], "mark");
        let (class, aside) = if x > WIDTH - 120.0 { ("label", -4.0) } else { ("value", 4.0) };
        svg.text(x + aside, y + 8.0, class, &format!("{name} {}", number(*at)));
    }
    svg.end()
}

/// Axis of a histogram, logarithmic if its range is wide.
struct Axis {
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Axis {
    /// Creates an axis from the smallest value to somewhat beyond the last mark.
    fn of(values: &[f64], marks: &[(&str, f64)]) -> Axis {
        let from = values.iter().copied().fold(f64::INFINITY, f64::min);
        let from = if from.is_finite() { from } else { 0.0 };
        let most = values.iter().copied().fold(from, f64::max);
        let to = marks.iter().map(|(_, at)| from + (at - from) * 1.25).fold(from, f64::max).min(most);
        let to = if to > from { to } else { from + from.abs().max(1e-9) };
        Axis { from, to, logarithmic: from > 0.0 && to > 10.0 * from }
    }

    /// Creates an axis that shows all values; a logarithmic one shows the positive values.
    fn around(values: impl Iterator<Item = f64>, logarithmic: bool) -> Axis {
        let shown = values.filter(|value| value.is_finite() && (!logarithmic || *value > 0.0));
        let (from, to) = shown.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), value| (a.min(value), b.max(value)));
        let from = if from.is_finite() { from } else { 1.0 };
        let to = if to > from { to } else { from + from.abs().max(1e-9) };
        Axis { from, to, logarithmic }
    }

    /// Returns the position of a value on the axis, 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let place = if self.logarithmic {
            (value / self.from).ln() / (self.to / self.from).ln()
        } else {
            (value - self.from) / (self.to - self.from)
        };
        place.clamp(0.0, 1.0)
    }

    /// Returns the value at a position of the axis.
    fn value(&self, place: f64) -> f64 {
        if self.logarithmic {
            self.from * (self.to / self.from).powf(place)
        } else {
            self.from + (self.to - self.from) * place
        }
    }

    /// Returns a few round numbers within the range.
    fn ticks(&self) -> Vec<f64> {
        let power = |value: f64| 10f64.powf(value.log10().floor());
        let candidates: Vec<f64> = if self.logarithmic {
            let tens = (0..12).map(|i| power(self.from) * 10f64.powi(i));
            tens.flat_map(|ten| [ten, 2.0 * ten, 5.0 * ten]).collect()
        } else {
            let rough = (self.to - self.from) / 6.0;
            let steps = [1.0, 2.0, 5.0, 10.0].map(|m| m * power(rough));
            let step = steps.into_iter().find(|step| *step >= rough).unwrap_or(rough);
            let first = (self.from / step).ceil();
            (0..8).map(|i| (first + f64::from(i)) * step).collect()
        };
        candidates.into_iter().filter(|tick| (self.from..=self.to).contains(tick)).collect()
    }
}

/// Label of a bar, and the names and values of its parts.
pub type Parts = (String, Vec<(String, f64)>);

/// Label of a row, and its value in each column, if known.
pub type HeatRow = (String, Vec<Option<f64>>);

/// Length of stacked bars.
#[derive(Clone, Copy, PartialEq)]
pub enum Lengths {
    /// All bars have full width.
    Full,
    /// Lengths are proportional to the sums of the parts; the longest bar has full width.
    Sums,
}

/// Draws a bar for each row, divided in proportion to the values of its parts. Part `i` has the CSS class `c{i}`.
pub fn stacked(rows: &[Parts], unit: &str, lengths: Lengths) -> String {
    const STEP: f64 = 46.0;
    let sum = |(_, parts): &Parts| parts.iter().map(|(_, value)| value).sum::<f64>().max(f64::MIN_POSITIVE);
    let longest = rows.iter().map(sum).fold(f64::MIN_POSITIVE, f64::max);
    let mut svg = Svg::new(STEP * rows.len() as f64);
    for (row, bar) in rows.iter().enumerate() {
        let ((label, parts), total) = (bar, sum(bar));
        let length = if lengths == Lengths::Full { 1.0 } else { total / longest };
        let (y, width) = (STEP * row as f64, (WIDTH - 110.0) * length);
        svg.text(90.0, y + 25.0, "label", label);
        let mut x = 100.0;
        for (i, (name, value)) in parts.iter().enumerate().filter(|(_, (_, value))| *value > 0.0) {
            let share = value / total;
            let note = format!("{name}: {} {unit}, {}", number(*value), percentage(*value, total));
            svg.rect([x, y + 4.0, width * share, 34.0], &format!("class=\"c{i}\""), &note);
            if share * length > 0.07 {
                svg.text(x + width * share / 2.0, y + 25.0, "inside", &format!("{:.0} %", share * 100.0));
            }
            x += width * share;
        }
    }
    svg.end()
}

/// Draws a heat map: one row per kind, one column per layer, with opacity from the smallest value to the largest.
pub fn heat_map(rows: &[HeatRow], columns: &str, show: impl Fn(f64) -> String) -> String {
    const HEIGHT: f64 = 22.0;
    let count = rows.iter().map(|(_, cells)| cells.len()).max().unwrap_or(0).max(1);
    let width = (WIDTH - LEFT - 4.0) / count as f64;
    let values = || rows.iter().flat_map(|(_, cells)| cells).flatten().copied();
    let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    let depth = |value: f64| if most > least { 0.05 + 0.95 * (value - least) / (most - least) } else { 0.5 };
    let foot = HEIGHT * rows.len() as f64;
    let mut svg = Svg::new(foot + 36.0);
    for (i, (label, cells)) in rows.iter().enumerate() {
        let y = HEIGHT * i as f64;
        svg.text(LEFT - 10.0, y + 15.0, "label", &shorten(label, 24));
        for (column, value) in cells.iter().enumerate().filter_map(|(column, value)| Some((column, (*value)?))) {
            let note = format!("{label}, {columns} {column}: {}", show(value));
            let place = [LEFT + width * column as f64, y, width, HEIGHT];
            svg.rect(place, &format!("class=\"heat\" fill-opacity=\"{:.3}\"", depth(value)), &note);
            if width > 40.0 {
                let class = if depth(value) > 0.6 { "inside" } else { "cell" };
                svg.text(place[0] + width / 2.0, y + 15.0, class, &show(value));
            }
        }
    }
    let step = count.div_ceil(16).max(1);
    for column in (0..count).step_by(step) {
        svg.text(LEFT + width * (column as f64 + 0.5), foot + 14.0, "tick", &column.to_string());
    }
    svg.text(LEFT - 10.0, foot + 14.0, "label", columns);
    if most >= least {
        let range = format!("faint: {}, deep: {}", show(least), show(most));
        svg.text(LEFT + width * count as f64, foot + 30.0, "label", &range);
    }
    svg.end()
}

/// Draws two histograms with the same bins on top of each other, as bars and as an outline. Heights are logarithmic,
/// so that small counts are visible.
pub fn overlay(limit: f64, bars: &[u64], outline: Option<&[u64]>) -> String {
    const BASE: f64 = 170.0;
    const TALLEST: f64 = 160.0;
    let height = |count: u64, top: u64| TALLEST * ((count + 1) as f64).ln() / ((top + 1) as f64).ln();
    let top = bars.iter().chain(outline.unwrap_or_default()).copied().max().unwrap_or(0).max(1);
    let (left, width) = (10.0, (WIDTH - 20.0) / bars.len().max(1) as f64);
    let edge = |i: usize| limit * (2.0 * i as f64 / bars.len() as f64 - 1.0);
    let mut svg = Svg::new(BASE + 30.0);
    for (i, count) in bars.iter().enumerate().filter(|(_, count)| **count > 0) {
        let tall = height(*count, top);
        let note = format!("{} to {}: {count}", exact(edge(i)), exact(edge(i + 1)));
        svg.rect([left + width * i as f64, BASE - tall, width - 0.5, tall], BAR, &note);
    }
    if let Some(counts) = outline {
        let mut points = String::new();
        for (i, count) in counts.iter().enumerate() {
            let y = BASE - if *count > 0 { height(*count, top) } else { 0.0 };
            let x = [i, i + 1].map(|i| left + width * i as f64);
            write!(points, "{:.1},{y:.1} {:.1},{y:.1} ", x[0], x[1]).expect("a string takes everything");
        }
        svg.add(format_args!("<polyline class=\"outline\" points=\"{}\"/>", points.trim_end()));
    }
    svg.line([left, BASE, WIDTH - left, BASE], "axis");
    for part in [-1.0, -0.5, 0.0, 0.5, 1.0] {
        let x = WIDTH / 2.0 + part * (WIDTH / 2.0 - left);
        svg.line([x, BASE, x, BASE + 4.0], "axis");
        let class = if part < -0.9 {
            "value"
        } else if part > 0.9 {
            "label"
        } else {
            "tick"
        };
        svg.text(x, BASE + 18.0, class, &exact(part * limit));
    }
    svg.end()
}

/// Point of a trade-off with a name.
#[derive(Debug, Clone, Copy)]
pub struct Mark<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its place: both quantities.
    pub at: (f64, f64),
}

/// Draws a quantity over another as a line through `points`, which must ascend in the first, with named points beside
/// it. `units` are those of both quantities; the second may have a logarithmic axis.
pub fn trade_off(points: &[(f64, f64)], marks: &[Mark<'_>], units: (&str, &str), logarithmic: bool) -> String {
    const BASE: f64 = 250.0;
    const TOP: f64 = 24.0;
    let points: Vec<_> = points.iter().filter(|(a, b)| a.is_finite() && b.is_finite()).collect();
    let all = || points.iter().copied().copied().chain(marks.iter().map(|mark| mark.at));
    let x = Axis::around(all().map(|(x, _)| x), false);
    let y = Axis::around(all().map(|(_, y)| y), logarithmic);
    let (left, right) = (70.0, WIDTH - 20.0);
    let place = |(a, b): (f64, f64)| (left + (right - left) * x.place(a), BASE - (BASE - TOP) * y.place(b));
    let mut svg = Svg::new(BASE + 44.0);
    svg.text(left, TOP - 10.0, "value", units.1);
    for tick in y.ticks() {
        let (_, at) = place((x.from, tick));
        svg.line([left, at, right, at], "axis");
        svg.text(left - 6.0, at + 4.0, "label", &exact(tick));
    }
    for tick in x.ticks() {
        let (at, _) = place((tick, y.from));
        svg.line([at, BASE, at, BASE + 4.0], "axis");
        svg.text(at, BASE + 18.0, "tick", &number(tick));
    }
    svg.line([left, BASE, right, BASE], "axis");
    svg.text(right, BASE + 38.0, "label", units.0);
    let mut line = String::new();
    for (x, y) in points.iter().map(|point| place(**point)) {
        write!(line, "{x:.1},{y:.1} ").expect("a string takes everything");
    }
    svg.add(format_args!("<polyline class=\"line l0\" points=\"{}\"/>", line.trim_end()));
    let note = |(a, b): (f64, f64)| format!("{} {}, {} {}", exact(a), units.0, exact(b), units.1);
    for point in &points {
        let (x, y) = place(**point);
        svg.rect([x - 2.0, y - 2.0, 4.0, 4.0], BAR, &note(**point));
    }
    for Mark { name, at } in marks {
        let (x, y) = place(*at);
        svg.rect([x - 4.0, y - 4.0, 8.0, 8.0], "class=\"heat\"", &format!("{name}: {}", note(*at)));
        let (class, aside) = if x > WIDTH - 120.0 { ("label", -8.0) } else { ("value", 8.0) };
        svg.text(x + aside, y - 6.0, class, name);
    }
    svg.end()
}

/// Quantity over time: the number of its color, its name, and its mean in each interval.
pub type Curve<'a> = (usize, &'a str, Vec<f64>);

/// Draws counts over time as lines from zero, with a legend. The numbers at the axis of counts are whole. An interval
/// has `width` units of time.
pub fn lines(curves: &[Curve<'_>], width: f64, unit: &str) -> String {
    const BASE: f64 = 170.0;
    const TALLEST: f64 = 150.0;
    let top = curves.iter().flat_map(|(.., values)| values).copied().fold(1.0, f64::max);
    let top = 2.0 * (top / 2.0).ceil();
    let count = curves.iter().map(|(.., values)| values.len()).max().unwrap_or(0).max(1) as f64;
    let (left, right) = (60.0, WIDTH - 10.0);
    let step = (right - left) / count;
    let mut svg = Svg::new(BASE + 30.0);
    for part in [0.0, 0.5, 1.0] {
        let (x, y) = (left + part * (right - left), BASE - TALLEST * part);
        svg.line([left, y, right, y], "axis");
        svg.text(left - 6.0, y + 4.0, "label", &format!("{:.0}", top * part));
        let class = if part < 1.0 { "tick" } else { "label" };
        svg.text(x, BASE + 18.0, class, &format!("{} {unit}", number(part * count * width)));
    }
    let mut legend = String::new();
    for (color, name, values) in curves {
        let mut points = String::new();
        for (i, value) in values.iter().enumerate() {
            let (x, y) = (left + step * (i as f64 + 0.5), BASE - TALLEST * value / top);
            write!(points, "{x:.1},{y:.1} ").expect("a string takes everything");
        }
        svg.add(format_args!("<polyline class=\"line l{color}\" points=\"{}\"/>", points.trim_end()));
        write!(legend, "<li><i class=\"c{color}\"></i>{}</li>", escape(name)).expect("a string takes everything");
    }
    format!("{}<ul class=\"legend\">{legend}</ul>\n", svg.end())
}

/// Formats a number with three significant digits.
fn exact(value: f64) -> String {
    let digits = if value == 0.0 { 0 } else { (2 - value.abs().log10().floor() as i32).clamp(0, 12) as usize };
    format!("{value:.digits$}")
}

/// SVG document under construction.
struct Svg(String);

impl Svg {
    fn new(height: f64) -> Svg {
        Svg(format!("<svg viewBox=\"0 0 {WIDTH} {height:.0}\" {IMAGE}>\n"))
    }

    /// Adds a rectangle with the attributes `color` and the tooltip `note`.
    fn rect(&mut self, [x, y, width, height]: [f64; 4], color: &str, note: &str) {
        let shape = format!("x=\"{x:.2}\" y=\"{y:.2}\" width=\"{:.2}\" height=\"{height:.2}\"", width.max(0.0));
        self.add(format_args!("<rect {color} {shape}><title>{}</title></rect>", escape(note)));
    }

    fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], class: &str) {
        self.add(format_args!("<line class=\"{class}\" x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\"/>"));
    }

    fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        self.add(format_args!("<text class=\"{class}\" x=\"{x:.2}\" y=\"{y:.2}\">{}</text>", escape(text)));
    }

    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        writeln!(self.0, "{element}").expect("a string takes everything");
    }

    fn end(self) -> String {
        self.0 + "</svg>\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_in_some_bin_and_outliers_do_not_flatten_the_rest() {
        let mut values: Vec<f64> = (0..1000).map(|i| 10.0 + f64::from(i) / 1000.0).collect();
        values.push(500.0);
        let svg = histogram(&values, &[("p50", 10.5), ("p99", 10.99)], "ms");
        let counts = svg.lines().filter_map(|line| line.split("ms: ").nth(1)?.split('<').next()?.parse::<usize>().ok());
        assert_eq!(counts.sum::<usize>(), 1001);
        assert!(svg.contains("and more ms: ") && svg.contains("p99 11.0"));
        assert!(svg.matches("class=\"bar\"").count() > 30);
        for odd in [vec![], vec![0.0], vec![5.0; 3]] {
            assert!(!histogram(&odd, &[("p50", 5.0)], "ms").contains("NaN"), "{odd:?}");
        }
    }

    #[test]
    fn a_trade_off_shows_its_line_and_the_named_points() {
        let points = [(2.0, 1.0), (4.0, 0.01), (8.0, 0.0)];
        let marks = [Mark { name: "<plan>", at: (4.0, 0.01) }];
        let svg = trade_off(&points, &marks, ("bits", "nats"), true);
        // Zero has no place on a logarithmic axis and is drawn at its lower end.
        assert!(svg.contains("points=\"70.0,24.0 253.3,250.0 620.0,250.0\""), "{svg}");
        assert!(svg.contains("&lt;plan&gt;: 4.00 bits, 0.0100 nats") && svg.contains(">0.1"), "{svg}");
        for odd in [&[][..], &[(1.0, f64::NAN)], &[(3.0, 3.0)]] {
            assert!(!trade_off(odd, &[], ("a", "b"), true).contains("NaN"), "{odd:?}");
        }
    }

    #[test]
    fn shares_fill_the_bar() {
        let parts = vec![("a".to_string(), 1.0), ("b".to_string(), 0.0), ("c".to_string(), 3.0)];
        let svg = stacked(&[("decode".into(), parts)], "ms", Lengths::Full);
        assert!(svg.contains("class=\"c0\" x=\"100.00\" y=\"4.00\" width=\"132.50\""), "{svg}");
        assert!(svg.contains("class=\"c2\" x=\"232.50\" y=\"4.00\" width=\"397.50\"") && !svg.contains("c1"), "{svg}");
    }

    #[test]
    fn bars_of_sums_are_as_long_as_these() {
        let bar = |n: f64| ("x".to_string(), vec![("a".to_string(), n)]);
        let svg = stacked(&[bar(4.0), bar(1.0)], "MB", Lengths::Sums);
        assert!(svg.contains("width=\"530.00\"") && svg.contains("width=\"132.50\""), "{svg}");
    }

    #[test]
    fn the_largest_value_is_the_deepest_and_gaps_stay_empty() {
        let rows = [("<q>".to_string(), vec![Some(1.0), None]), ("k".to_string(), vec![Some(4.0), Some(0.0)])];
        let svg = heat_map(&rows, "layer", |v| format!("{v:.1} %"));
        assert_eq!(svg.matches("class=\"heat\"").count(), 3);
        for depth in ["0.050", "0.287", "1.000"] {
            assert!(svg.contains(&format!("fill-opacity=\"{depth}\"")), "{svg}");
        }
        assert!(svg.contains("&lt;q&gt;, layer 0: 1.0 %") && !svg.contains("<q>"));
        assert!(!heat_map(&[], "layer", |v| v.to_string()).contains("NaN"));
    }

    #[test]
    fn lines_reach_from_zero_to_the_largest_value() {
        let svg = lines(&[(2, "<a>", vec![0.0, 4.0]), (4, "b", vec![2.0])], 30.0, "s");
        assert!(svg.contains("class=\"line l2\" points=\"202.5,170.0 487.5,20.0\""), "{svg}");
        assert!(svg.contains("points=\"202.5,95.0\"") && svg.contains("&lt;a&gt;") && svg.contains("60.0 s"), "{svg}");
        assert!(!lines(&[], 1.0, "s").contains("NaN"));
        let svg = lines(&[(0, "a", vec![4.2])], 1.0, "s");
        for count in [">0<", ">3<", ">6<"] {
            assert!(svg.contains(count), "{svg}");
        }
    }

    #[test]
    fn an_outline_lies_over_the_bars() {
        let svg = overlay(0.02, &[1, 0, 3], Some(&[0, 4, 0]));
        assert_eq!(svg.matches("class=\"bar\"").count(), 2);
        assert!(svg.contains("class=\"outline\"") && svg.contains(">0.0200<") && svg.contains(">-0.0100<"), "{svg}");
        assert!(!overlay(1.0, &[], None).contains("NaN"));
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let ticks = |from, to| Axis { from, to, logarithmic: from > 0.0 && to > 10.0 * from }.ticks();
        assert_eq!(ticks(9.7, 16.2), [10.0, 12.0, 14.0, 16.0]);
        assert_eq!(ticks(0.0, 6.0), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(ticks(0.7, 21.0), [1.0, 2.0, 5.0, 10.0, 20.0]);
    }

    #[test]
    fn places_and_values_belong_together() {
        for axis in [Axis::of(&[1.0, 5.0], &[("p50", 4.0)]), Axis::of(&[1.0, 900.0], &[("p50", 400.0)])] {
            for place in [0.0, 0.3, 1.0] {
                assert!((axis.place(axis.value(place)) - place).abs() < 1e-12);
            }
            assert_eq!((axis.place(0.0), axis.place(1e9)), (0.0, 1.0));
        }
    }
}
