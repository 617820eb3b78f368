//! `r3 compare`: one run with replay on and one with it off, side by side.

use serde::Serialize;

use crate::chart::{Chart, Scale, Series};
use crate::format::{MISSING, duration, or_missing, percent, short};
use crate::metric::Gauge;
use crate::metrics::{
    ABS_DIFF_MEAN, DISCREPANCY_TOKEN_LAYER, EXTREME_FRAC_TAU2, K3_KL, REWARD_MEAN, VAL_CORE_MEAN,
};
use crate::step_record::StepRecord;
use crate::summary::RunSummary;

/// The records of two runs that differ in replay only.
#[derive(Clone, Copy, Debug)]
pub struct Runs<'a> {
    /// What was run: the recipe's name.
    pub title: &'a str,
    /// Replay on.
    pub on: &'a [StepRecord],
    /// Replay off.
    pub off: &'a [StepRecord],
}

/// Both summaries: what `r3 compare --json` prints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Replay on.
    pub on: RunSummary,
    /// Replay off.
    pub off: RunSummary,
}

impl Comparison {
    /// One row a number: name, on, off, and on over off where a ratio says something.
    fn rows(&self) -> Vec<[String; 4]> {
        let row = |name: &str, read: fn(&RunSummary) -> Option<f64>, format: fn(f64) -> String| {
            let (on, off) = (read(&self.on), read(&self.off));
            [name.into(), or_missing(on, format), or_missing(off, format), ratio(on, off)]
        };
        let plain = |mut row: [String; 4]| {
            row[3] = String::new();
            row
        };
        vec![
            plain(row("steps", |run| Some(run.steps as f64), |steps| steps.to_string())),
            plain(row("time", |run| Some(run.seconds), duration)),
            plain(row("held-out accuracy, before", |run| run.eval_before, percent)),
            plain(row("held-out accuracy, after", |run| run.eval_after, percent)),
            row("KL, rollout to trainer (nats)", |run| run.rollout_train_k3_kl, short),
            row("mean |Δ logprob| (nats)", |run| run.rollout_train_logprobs_abs_diff_mean, short),
            row("extreme tokens, F(2) (share)", |run| run.rollout_train_extreme_frac_tau2, short),
            row(
                "routes that differ, of token-layers",
                |run| run.router_discrepancy_token_layer_frac,
                percent,
            ),
            row("routes that differ, of tokens", |run| run.router_discrepancy_token_any_frac, percent),
            row("rollout (tokens/s)", |run| run.rollout_tokens_per_second, short),
            row("training (tokens/s)", |run| run.train_tokens_per_second, short),
        ]
    }

    /// The table for the terminal.
    #[must_use]
    pub fn table(&self) -> String {
        let head = ["", "replay on", "replay off", "on / off"].map(String::from);
        let line = |[name, on, off, ratio]: &[String; 4]| {
            format!("  {name:<35}{on:>11}{off:>12}{ratio:>10}").trim_end().to_owned() + "\n"
        };
        std::iter::once(&head).chain(&self.rows()).map(line).collect()
    }

    fn html_table(&self) -> String {
        let mut html = String::from(
            "<table>\n<thead><tr><th></th><th>replay on</th><th>replay off</th><th>on / off</th></tr></thead>\n<tbody>\n",
        );
        for [name, on, off, ratio] in self.rows() {
            html += &format!(
                "<tr><th scope=\"row\">{name}</th><td>{}</td><td>{}</td><td>{ratio}</td></tr>\n",
                escape(&on),
                escape(&off)
            );
        }
        html + "</tbody>\n</table>\n"
    }
}

fn ratio(on: Option<f64>, off: Option<f64>) -> String {
    match on.zip(off) {
        Some((on, off)) if off != 0.0 => format!("{:.2}", on / off),
        _ => MISSING.into(),
    }
}

/// The report: one HTML file that needs nothing else, readable in light and dark.
#[must_use]
pub fn html(runs: Runs<'_>, comparison: &Comparison) -> String {
    let title = escape(runs.title);
    let charts: String =
        charts(runs).iter().map(|chart| format!("<figure>{}</figure>\n", chart.svg())).collect();
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}: routing replay on and off</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>{title}: routing replay on and off</h1>\n\
         <p>The same seed and data, trained twice. <b class=\"on\">Replay on</b> trains through the experts that the rollout \
         chose; <b class=\"off\">replay off</b> lets the trainer's router choose again. Mismatch is measured at equal weights, \
         before the first update of each step. With replay on, “routes that differ” counts where the trainer's router would have \
         chosen otherwise.</p>\n{}<div class=\"charts\">\n{charts}</div>\n\
         <p class=\"note\">Hollow dots on a logarithmic axis are exact zeros. The table holds means over the steps.</p>\n\
         </main>\n</body>\n</html>\n",
        comparison.html_table()
    )
}

fn charts(runs: Runs<'_>) -> Vec<Chart> {
    let chart = |title, unit, scale, gauge| Chart {
        title,
        unit,
        along: "step",
        scale,
        series: on_off(runs, |record| record.get(gauge)),
    };
    let percent = |title, unit, gauge: Gauge| Chart {
        title,
        unit,
        along: "step",
        scale: Scale::Linear,
        series: on_off(runs, |record| record.get(gauge).map(|share| 100.0 * share)),
    };
    let mut charts = vec![
        chart("KL, rollout to trainer", "nats per token, log scale", Scale::Log, K3_KL),
        chart("Mean |Δ logprob|", "nats, log scale", Scale::Log, ABS_DIFF_MEAN),
        percent("Extreme tokens, F(2)", "% of tokens", EXTREME_FRAC_TAU2),
        percent("Routes that differ", "% of token-layers", DISCREPANCY_TOKEN_LAYER),
        chart("Reward", "mean of the step", Scale::Linear, REWARD_MEAN),
    ];
    let accuracy = |record: &StepRecord| record.dataset_mean(VAL_CORE_MEAN).map(|share| 100.0 * share);
    let held_out = on_off(runs, accuracy);
    if held_out.iter().any(|series| !series.points.is_empty()) {
        charts.push(Chart {
            title: "Held-out accuracy",
            unit: "% solved",
            along: "step",
            scale: Scale::Linear,
            series: held_out,
        });
    }
    charts
}

fn on_off(runs: Runs<'_>, read: impl Fn(&StepRecord) -> Option<f64>) -> Vec<Series> {
    let points = |records: &[StepRecord]| {
        records.iter().filter_map(|record| Some((record.step() as f64, read(record)?))).collect()
    };
    vec![
        Series { name: "replay on", class: "on", points: points(runs.on) },
        Series { name: "replay off", class: "off", points: points(runs.off) },
    ]
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const STYLE: &str = "\
:root { color-scheme: light dark; --page: #fbfbfa; --card: #ffffff; --edge: #e4e4e0; --text: #1c1d1f; --faint: #6b6e73; \
--on: #1f6feb; --off: #d9730d; }
@media (prefers-color-scheme: dark) { :root { --page: #131416; --card: #1b1d20; --edge: #303338; --text: #e8e8e6; \
--faint: #9a9da3; --on: #6cb0ff; --off: #ffa657; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.55 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 8px; }
p { max-width: 76ch; margin: 0 0 20px; }
b.on { color: var(--on); } b.off { color: var(--off); }
.note { color: var(--faint); font-size: 13px; }
table { border-collapse: collapse; margin: 0 0 28px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 16px; text-align: right; border-bottom: 1px solid var(--edge); }
th[scope=row] { text-align: left; font-weight: 400; padding-left: 0; }
thead th { font-weight: 600; color: var(--faint); font-size: 13px; }
thead th:nth-child(2) { color: var(--on); } thead th:nth-child(3) { color: var(--off); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 16px; margin-bottom: 20px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--text); }
.title { font-size: 15px; font-weight: 600; }
.unit, .tick { fill: var(--faint); }
.grid { stroke: var(--edge); } .axis, .notch { stroke: var(--faint); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.on.line { stroke: var(--on); } .off.line { stroke: var(--off); }
.on.dot { fill: var(--on); stroke: var(--on); } .off.dot { fill: var(--off); stroke: var(--off); }
.dot { stroke-width: 1.5; } .hollow.dot { fill: var(--card); }
";

#[cfg(test)]
mod tests {
    use r3_core::ids::PolicyVersion;

    use super::*;

    /// A run whose mismatch is `size` times a fixed curve.
    fn run(size: f64) -> Vec<StepRecord> {
        let record = |step: u32| {
            let at = f64::from(step);
            let mut record = StepRecord::new(u64::from(step), PolicyVersion(u64::from(step)));
            record.set(K3_KL, size * 1e-5 * (1.0 + at));
            record.set(ABS_DIFF_MEAN, size * 1e-3);
            record.set(EXTREME_FRAC_TAU2, size * 1e-4);
            record.set(DISCREPANCY_TOKEN_LAYER, 0.03);
            record.set(REWARD_MEAN, 0.1 * at);
            record
        };
        (1..=6).map(record).collect()
    }

    fn comparison(on: &[StepRecord], off: &[StepRecord]) -> Comparison {
        Comparison { on: RunSummary::new(on, 20.0), off: RunSummary::new(off, 19.0) }
    }

    #[test]
    fn the_table_puts_both_runs_side_by_side() {
        insta::assert_snapshot!(comparison(&run(1.0), &run(3.0)).table(), @r"
                                               replay on  replay off  on / off
          steps                                        6           6
          time                                    20.0 s      19.0 s
          held-out accuracy, before                    -           -
          held-out accuracy, after                     -           -
          KL, rollout to trainer (nats)           4.5e-5      1.4e-4      0.33
          mean |Δ logprob| (nats)                 1.0e-3      3.0e-3      0.33
          extreme tokens, F(2) (share)            1.0e-4      3.0e-4      0.33
          routes that differ, of token-layers       3.0%        3.0%      1.00
          routes that differ, of tokens                -           -         -
          rollout (tokens/s)                           -           -         -
          training (tokens/s)                          -           -         -
        ");
    }

    #[test]
    fn the_report_stands_alone_and_draws_what_it_promises() {
        let (on, off) = (run(1.0), run(3.0));
        let html = html(Runs { title: "a <b> & c", on: &on, off: &off }, &comparison(&on, &off));
        assert_eq!(html.matches("<svg").count(), 5, "no evaluation was recorded, so there is no sixth chart");
        assert!(!html.contains("http") && !html.contains("<script"), "nothing is fetched or run");
        assert!(html.contains("<h1>a &lt;b&gt; &amp; c: routing"));
        for title in [
            "KL, rollout to trainer",
            "Mean |Δ logprob|",
            "Extreme tokens, F(2)",
            "Routes that differ",
            "Reward",
        ] {
            assert!(
                html.contains(&format!("<text class=\"title\" x=\"16\" y=\"26\">{title}</text>")),
                "{title}"
            );
        }
    }

    #[test]
    fn json_has_both_runs() {
        let json = serde_json::to_value(comparison(&run(1.0), &run(3.0))).unwrap();
        assert_eq!(json["on"]["steps"], 6);
        assert_eq!(json["off"]["seconds"], 19.0);
    }
}
