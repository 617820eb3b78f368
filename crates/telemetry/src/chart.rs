//! Line charts as SVG text. Colours and fonts come from the page's style sheet, so a chart reads well in light and dark.

use crate::format::short;

/// How values map to height.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From 0, or from the lowest value if it is negative.
    Linear,
    /// By powers of ten. A value that is not positive has no place on it: it sits on the lower edge, hollow.
    Log,
}

/// One line of a chart.
#[derive(Clone, Debug)]
pub struct Series {
    /// What the legend calls it.
    pub name: &'static str,
    /// Style-sheet class of the line.
    pub class: &'static str,
    /// `(step, value)` in order of steps. The line breaks where a value is not finite.
    pub points: Vec<(f64, f64)>,
}

/// A chart with steps, or something else that is counted, along x.
#[derive(Clone, Debug)]
pub struct Chart {
    /// What is drawn.
    pub title: &'static str,
    /// Label of the y axis, with its unit.
    pub unit: &'static str,
    /// Label of the x axis.
    pub along: &'static str,
    /// How values map to height.
    pub scale: Scale,
    /// The lines, first one on top.
    pub series: Vec<Series>,
}

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = WIDTH - 16.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = HEIGHT - 44.0;
/// The style of a chart that is a file: no page lends it one.
const FILE_STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#555}.title{font-size:16px;font-weight:600;fill:#111}\
    .grid{stroke:#e4e4e4}.axis,.notch{stroke:#888}.line{fill:none;stroke-width:2}.line.a{stroke:#1f6fb4}\
    .line.b{stroke:#b4541f;stroke-dasharray:5 4;stroke-width:1.5}.dot.a{fill:#1f6fb4}.dot.b{fill:none}";
/// More points than this are drawn as a line alone.
const MAX_DOTS: usize = 80;

impl Chart {
    /// The chart as one `<svg>` element.
    #[must_use]
    pub fn svg(&self) -> String {
        let x = Axis::steps(&self.series);
        let y = Axis::values(&self.series, self.scale);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{0}\">\n\
             <text class=\"title\" x=\"16\" y=\"26\">{0}</text>\n\
             <text class=\"unit\" x=\"16\" y=\"46\">{1}</text>\n",
            self.title, self.unit
        );
        for &tick in &y.ticks {
            let at = y.place(tick, BOTTOM, TOP);
            svg += &format!(
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
                LEFT - 8.0,
                at + 4.0,
                y.label(tick)
            );
        }
        for &tick in &x.ticks {
            let at = x.place(tick, LEFT, RIGHT);
            svg += &format!(
                "<line class=\"notch\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{BOTTOM}\" y2=\"{:.1}\"/>\
                 <text class=\"tick\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>\n",
                BOTTOM + 4.0,
                BOTTOM + 18.0
            );
        }
        svg += &format!(
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{BOTTOM}\" y2=\"{BOTTOM}\"/>\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n",
            f64::midpoint(LEFT, RIGHT),
            BOTTOM + 36.0,
            self.along
        );
        svg += &self.legend();
        for series in self.series.iter().rev() {
            svg += &line(series, self.along, &x, &y);
        }
        svg + "</svg>\n"
    }

    /// The chart as a file of its own, which brings the colours of its classes `a` and `b`.
    #[must_use]
    pub fn svg_file(&self) -> String {
        let namespace = "<svg xmlns=\"http://www.w3.org/2000/svg\" ";
        let (element, rest) = self.svg().split_once('\n').map_or_else(Default::default, |(element, rest)| {
            (element.replacen("<svg ", namespace, 1), rest.to_owned())
        });
        format!(
            "{element}\n<style>{FILE_STYLE}</style>\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n{rest}"
        )
    }

    /// Names and samples of the lines, right-aligned beside the title.
    fn legend(&self) -> String {
        const LETTER: f64 = 6.2; // Width of a 12 px letter, on the wide side: a gap too many beats an overlap.
        let mut right = RIGHT;
        let mut svg = String::new();
        for series in self.series.iter().rev() {
            let left = right - LETTER * series.name.chars().count() as f64;
            svg += &format!(
                "<line class=\"line {}\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"42\" y2=\"42\"/>\
                 <text class=\"name\" x=\"{right:.1}\" y=\"46\" text-anchor=\"end\">{}</text>\n",
                series.class,
                left - 26.0,
                left - 8.0,
                series.name
            );
            right = left - 40.0;
        }
        svg
    }
}

/// Path and dots of one series; each dot tells its values when hovered over.
fn line(series: &Series, along: &str, x: &Axis, y: &Axis) -> String {
    let mut path = String::new();
    let mut dots = String::new();
    let mut pen_down = false;
    let show_all = series.points.len() <= MAX_DOTS;
    for (i, &(step, value)) in series.points.iter().enumerate() {
        if !value.is_finite() {
            pen_down = false;
            continue;
        }
        let (px, py) = (x.place(step, LEFT, RIGHT), y.place(value, BOTTOM, TOP));
        path += &format!("{}{px:.1} {py:.1}", if pen_down { "L" } else { "M" });
        // A point between two gaps has no line to be seen by.
        let alone = !pen_down && series.points.get(i + 1).is_none_or(|next| !next.1.is_finite());
        pen_down = true;
        if show_all || alone {
            let hollow = if y.holds(value) { "" } else { " hollow" };
            dots += &format!(
                "<circle class=\"dot {}{hollow}\" cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"2.6\"><title>{along} {step}, {}: {}</title></circle>",
                series.class,
                series.name,
                short(value)
            );
        }
    }
    format!("<path class=\"line {}\" d=\"{path}\"/>{dots}\n", series.class)
}

/// One axis: its range, in its own scale, and where its ticks are.
#[derive(Debug, PartialEq)]
struct Axis {
    low: f64,
    high: f64,
    log: bool,
    ticks: Vec<f64>,
}

impl Axis {
    fn steps(series: &[Series]) -> Self {
        let steps = || series.iter().flat_map(|series| series.points.iter().map(|point| point.0));
        let (low, high) = (steps().fold(f64::INFINITY, f64::min), steps().fold(f64::NEG_INFINITY, f64::max));
        if low > high {
            return Self { low: 0.0, high: 1.0, log: false, ticks: vec![0.0, 1.0] };
        }
        let high = high.max(low + 1.0);
        let step = nice_step(high - low, 8.0).max(1.0);
        let ticks = ticks(low, high, step);
        Self { low, high, log: false, ticks }
    }

    fn values(series: &[Series], scale: Scale) -> Self {
        let values = || series.iter().flat_map(|series| series.points.iter().map(|point| point.1));
        let finite = || values().filter(|value| value.is_finite());
        let positive = || finite().filter(|value| *value > 0.0);
        let high = finite().fold(f64::NEG_INFINITY, f64::max);
        if scale == Scale::Log && positive().next().is_some() {
            return Self::decades(positive().fold(f64::INFINITY, f64::min), high);
        }
        let low = finite().fold(0.0, f64::min);
        let high = if high > low { high } else { low + 1.0 };
        let step = nice_step(high - low, 5.0);
        let (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        Self { low, high, log: false, ticks: ticks(low, high, step) }
    }

    /// Whole decades around `low..=high`, or steps of 1, 2, 5 where they span less than two.
    fn decades(low: f64, high: f64) -> Self {
        let candidates = |mantissas: &[f64]| -> Vec<f64> {
            let decades = low.log10().floor() as i32 - 1..=high.log10().ceil() as i32 + 1;
            decades.flat_map(|decade| mantissas.iter().map(move |m| m * 10_f64.powi(decade))).collect()
        };
        let narrow = high / low < 100.0;
        let candidates = candidates(if narrow { &[1.0, 2.0, 5.0] } else { &[1.0] });
        let slack = 1.0 + 1e-9; // Powers of ten are not exact.
        let first = candidates.iter().rposition(|tick| *tick <= low * slack).unwrap_or_default();
        let last = candidates.iter().position(|tick| *tick * slack >= high).unwrap_or(candidates.len() - 1);
        let last = last.max(first + 1);
        let ticks = &candidates[first..=last];
        let every = ticks.len().div_ceil(7);
        Self {
            low: ticks[0].log10(),
            high: ticks[ticks.len() - 1].log10(),
            log: true,
            ticks: ticks.iter().copied().step_by(every).collect(),
        }
    }

    /// Whether the scale has a place for `value`.
    fn holds(&self, value: f64) -> bool {
        !self.log || value > 0.0
    }

    fn place(&self, value: f64, from: f64, to: f64) -> f64 {
        let value = if !self.log {
            value
        } else if value > 0.0 {
            value.log10()
        } else {
            self.low
        };
        from + (to - from) * (value - self.low) / (self.high - self.low)
    }

    fn label(&self, tick: f64) -> String {
        if self.log && (self.low < -2.0 || self.high > 3.0) {
            format!("{tick:.0e}")
        } else {
            round(tick).to_string()
        }
    }
}

/// The step of 1, 2 or 5 times a power of ten that cuts `span` into at most `n` parts.
fn nice_step(span: f64, n: f64) -> f64 {
    let raw = span / n;
    let decade = 10_f64.powf(raw.log10().floor());
    let mantissa = [1.0, 2.0, 5.0, 10.0].into_iter().find(|mantissa| mantissa * decade >= raw * (1.0 - 1e-9));
    mantissa.unwrap_or(10.0) * decade
}

/// The multiples of `step` within `low..=high`.
fn ticks(low: f64, high: f64, step: f64) -> Vec<f64> {
    let first = (low / step - 1e-9).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last).map(|i| round(i as f64 * step)).collect()
}

/// Without the digits that only binary arithmetic put there: 0.30000000000000004 is 0.3.
fn round(value: f64) -> f64 {
    format!("{value:.9e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(values: &[f64]) -> Vec<Series> {
        let points = values.iter().enumerate().map(|(i, value)| (i as f64 + 1.0, *value)).collect();
        vec![Series { name: "replay on", class: "on", points }]
    }

    #[test]
    fn a_linear_axis_starts_at_zero_and_ends_above_the_highest_value() {
        let axis = Axis::values(&series(&[0.1, 0.83]), Scale::Linear);
        assert_eq!((axis.low, axis.high, axis.ticks), (0.0, 1.0, vec![0.0, 0.2, 0.4, 0.6, 0.8, 1.0]));
        assert_eq!(
            Axis::values(&series(&[-0.3, 0.2]), Scale::Linear).ticks,
            [-0.3, -0.2, -0.1, 0.0, 0.1, 0.2]
        );
    }

    #[test]
    fn a_log_axis_holds_whole_decades_or_their_parts() {
        let ticks = |values: &[f64]| {
            Axis::values(&series(values), Scale::Log).ticks.iter().map(|t| short(*t)).collect::<Vec<_>>()
        };
        assert_eq!(ticks(&[3e-6, 2e-3]), ["1.0e-6", "1.0e-5", "1.0e-4", "1.0e-3", "0.010"]);
        assert_eq!(ticks(&[3e-5, 9e-5]), ["2.0e-5", "5.0e-5", "1.0e-4"]);
        assert_eq!(ticks(&[1e-5]), ["1.0e-5", "2.0e-5"]);
    }

    #[test]
    fn zeros_alone_fall_back_to_a_linear_axis_and_nothing_still_draws_axes() {
        assert!(!Axis::values(&series(&[0.0, 0.0]), Scale::Log).log);
        let chart =
            Chart { title: "KL", unit: "nats", along: "step", scale: Scale::Log, series: series(&[]) };
        assert!(!chart.svg().contains("NaN") && chart.svg().contains(">step<"));
    }

    #[test]
    fn a_zero_on_a_log_axis_is_hollow_on_the_lower_edge() {
        let chart = Chart {
            title: "KL",
            unit: "nats",
            along: "step",
            scale: Scale::Log,
            series: series(&[1e-5, 0.0]),
        };
        assert!(
            chart.svg().contains(&format!("class=\"dot on hollow\" cx=\"{RIGHT:.1}\" cy=\"{BOTTOM:.1}\""))
        );
    }

    #[test]
    fn a_line_breaks_where_a_value_is_missing() {
        let chart = Chart {
            along: "step",
            title: "KL",
            unit: "nats",
            scale: Scale::Linear,
            series: series(&[1.0, f64::NAN, 2.0, 3.0]),
        };
        let svg = chart.svg();
        let path =
            svg.split("class=\"line on\" d=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        assert_eq!((path.matches('M').count(), path.matches('L').count()), (2, 1), "{path}");
    }

    #[test]
    fn a_file_is_whole_and_names_what_is_along_x() {
        let unit = "us";
        let chart =
            Chart { title: "cost", unit, along: "tokens", scale: Scale::Linear, series: series(&[1.0, 2.0]) };
        let svg = chart.svg_file();
        assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox="), "{svg}");
        assert!(svg.contains("<style>") && svg.ends_with("</svg>\n") && svg.contains(">tokens</text>"));
        assert_eq!(svg.matches("<svg ").count(), 1);
    }

    #[test]
    fn steps_are_whole_numbers() {
        let axis = Axis::steps(&series(&[0.0; 3]));
        assert_eq!(axis.ticks, [1.0, 2.0, 3.0]);
        assert_eq!(Axis::steps(&series(&[0.0; 40])).ticks, [5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]);
    }
}
