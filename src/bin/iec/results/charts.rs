//! Charts as SVG: bars, a histogram, stacked bars. Colors and fonts come from the style sheet of the page, which knows light
//! and dark; numbers show when the mouse rests on a shape.

use std::fmt::Write;

/// Width of every chart in its own units; the page scales it.
const WIDTH: f64 = 640.0;
/// Where the bars begin: labels stand left of it.
const LEFT: f64 = 170.0;
/// Room for the numbers right of the bars.
const RIGHT: f64 = 70.0;

/// One horizontal bar.
pub struct Bar {
    /// Left of it.
    pub label: String,
    /// Its length.
    pub value: f64,
    /// When the mouse rests on it.
    pub note: String,
}

/// Horizontal bars from zero.
pub fn bars(bars: &[Bar]) -> String {
    let top = bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    let mut svg = Svg::new(24.0 * bars.len() as f64 + 4.0);
    for (i, bar) in bars.iter().enumerate() {
        let (y, width) = (24.0 * i as f64 + 2.0, (WIDTH - LEFT - RIGHT) * bar.value / top);
        svg.text(LEFT - 10.0, y + 14.0, "label", &shorten(&bar.label, 24));
        svg.rect([LEFT, y, width, 20.0], "bar", &bar.note);
        svg.text(LEFT + width + 6.0, y + 14.0, "value", &number(bar.value));
    }
    svg.end()
}

/// How often values occur, with named places marked. What lies far beyond the last mark is counted in the last bin.
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
        svg.rect([left + width * from, BASE - height, width / BINS as f64 - 1.0, height], "bar", &note);
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

/// The range of a histogram, logarithmic where it is wide.
struct Axis {
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Axis {
    /// From the least value to somewhat beyond the last mark.
    fn of(values: &[f64], marks: &[(&str, f64)]) -> Axis {
        let from = values.iter().copied().fold(f64::INFINITY, f64::min);
        let from = if from.is_finite() { from } else { 0.0 };
        let most = values.iter().copied().fold(from, f64::max);
        let to = marks.iter().map(|(_, at)| from + (at - from) * 1.25).fold(from, f64::max).min(most);
        let to = if to > from { to } else { from + from.abs().max(1e-9) };
        Axis { from, to, logarithmic: from > 0.0 && to > 10.0 * from }
    }

    /// Where a value lies, 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let place = if self.logarithmic {
            (value / self.from).ln() / (self.to / self.from).ln()
        } else {
            (value - self.from) / (self.to - self.from)
        };
        place.clamp(0.0, 1.0)
    }

    /// What lies at a place.
    fn value(&self, place: f64) -> f64 {
        if self.logarithmic {
            self.from * (self.to / self.from).powf(place)
        } else {
            self.from + (self.to - self.from) * place
        }
    }

    /// A few round numbers of the range.
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

/// Bars of full width, each divided by the shares of its parts. Part `i` has the color of class `c{i}`.
pub fn stacked(rows: &[(String, Vec<(String, f64)>)], unit: &str) -> String {
    const STEP: f64 = 46.0;
    let mut svg = Svg::new(STEP * rows.len() as f64);
    for (row, (label, parts)) in rows.iter().enumerate() {
        let total: f64 = parts.iter().map(|(_, value)| value).sum::<f64>().max(f64::MIN_POSITIVE);
        let (y, width) = (STEP * row as f64, WIDTH - 110.0);
        svg.text(90.0, y + 25.0, "label", label);
        let mut x = 100.0;
        for (i, (name, value)) in parts.iter().enumerate().filter(|(_, (_, value))| *value > 0.0) {
            let share = value / total;
            let note = format!("{name}: {} {unit}, {:.1} %", number(*value), share * 100.0);
            svg.rect([x, y + 4.0, width * share, 34.0], &format!("c{i}"), &note);
            if share > 0.07 {
                svg.text(x + width * share / 2.0, y + 25.0, "inside", &format!("{:.0} %", share * 100.0));
            }
            x += width * share;
        }
    }
    svg.end()
}

/// A drawing in the making.
struct Svg(String);

impl Svg {
    fn new(height: f64) -> Svg {
        Svg(format!("<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\">\n"))
    }

    fn rect(&mut self, [x, y, width, height]: [f64; 4], class: &str, note: &str) {
        let shape = format!("x=\"{x:.2}\" y=\"{y:.2}\" width=\"{:.2}\" height=\"{height:.2}\"", width.max(0.0));
        self.add(format_args!("<rect class=\"{class}\" {shape}><title>{}</title></rect>", escape(note)));
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

/// Three digits, more before the point.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// The beginning of a text, on one line.
pub fn shorten(text: &str, most: usize) -> String {
    let mut chars = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut short: String = chars.by_ref().take(most).collect();
    if chars.next().is_some() {
        short.push('…');
    }
    short
}

/// Text as a page shows it; what XML cannot hold becomes a replacement character.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && !"\n\t".contains(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
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
    fn shares_fill_the_bar() {
        let parts = vec![("a".to_string(), 1.0), ("b".to_string(), 0.0), ("c".to_string(), 3.0)];
        let svg = stacked(&[("decode".into(), parts)], "ms");
        assert!(svg.contains("class=\"c0\" x=\"100.00\" y=\"4.00\" width=\"132.50\""), "{svg}");
        assert!(svg.contains("class=\"c2\" x=\"232.50\" y=\"4.00\" width=\"397.50\"") && !svg.contains("c1"), "{svg}");
    }

    #[test]
    fn texts_of_strangers_stay_text() {
        let hostile = "<script>alert('x')</script>\u{1b}[2J";
        let svg = bars(&[Bar { label: hostile.into(), value: 1.0, note: hostile.into() }]);
        assert!(!svg.contains("<script") && !svg.contains('\u{1b}'));
        assert_eq!(escape("a & \"b\""), "a &amp; &quot;b&quot;");
        assert_eq!(shorten("ab\ncd", 3), "ab …");
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
