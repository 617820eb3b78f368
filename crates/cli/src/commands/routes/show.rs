//! `r3 routes show`: what a file of routes holds.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::PathBuf;

use r3_core::count::counted;
use r3_wire::check::Sample;
use r3_wire::load::LayerLoad;
use r3_wire::record::{Record, RoutesView};
use serde_json::{Value, json};

use crate::commands::routes::InputArgs;
use crate::error::CliError;
use crate::output;

/// Show what a file of routes holds: samples, rows, and how the experts are loaded
///
/// Without a selection, one paragraph a sample and the load of every MoE layer: experts that were named, the busiest, how
/// far it lies above the mean (max_vio), and a line of bars over the experts. With --sample, --turn, --rows or --layer,
/// the rows, too: position, token, the policy version that sampled it, and the experts in router order.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A file of routes; - is stdin
    file: PathBuf,
    #[command(flatten)]
    input: InputArgs,
    /// This sample only, from 0
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Rows that this turn computed, from 0
    #[arg(long, value_name = "N")]
    turn: Option<usize>,
    /// Rows of these positions, the last one left out
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    rows: Option<Range<usize>>,
    /// This MoE layer only, by the model's own number
    #[arg(long, value_name = "ID")]
    layer: Option<u32>,
    /// End stdout with one line of JSON
    #[arg(long)]
    json: bool,
}

fn parse_range(text: &str) -> Result<Range<usize>, String> {
    let ends = text.split_once("..").and_then(|(start, end)| Some(start.parse().ok()?..end.parse().ok()?));
    ends.filter(|range| range.start <= range.end)
        .ok_or_else(|| format!("`{text}` is not a range of positions, such as 0..8"))
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        let file = self.input.load(&self.file)?;
        let selected = file.selected(self.sample)?;
        if let Some(layer) = self.layer
            && !selected.iter().any(|(_, record)| has_layer(record, layer))
        {
            return Err(CliError::NoLayer { input: file.input.clone(), layer });
        }
        let mut summary = Summary::default();
        let (mut text, mut samples) = (String::new(), Vec::new());
        for (number, record) in selected {
            summary.add(record);
            let sample = record.sample(file.layout, number);
            if self.json {
                samples.push(self.sample_json(record, &sample));
            } else {
                self.paragraph(record, &sample, &mut text);
            }
        }
        if self.json {
            return output::print_json(&json!({ "samples": samples, "summary": summary.json() }));
        }
        summary.paragraph(self.layer, &mut text);
        output::print(&text)
    }

    fn shows_rows(&self) -> bool {
        self.sample.is_some() || self.turn.is_some() || self.rows.is_some() || self.layer.is_some()
    }

    /// Positions of the rows that were asked for.
    fn positions(&self, routes: &RoutesView<'_>, sample: &Sample) -> Vec<usize> {
        let start = routes.header.start;
        let all = start..start + routes.rows.rows();
        all.filter(|position| self.rows.as_ref().is_none_or(|rows| rows.contains(position)))
            .filter(|position| self.turn.is_none_or(|turn| sample.turn_of(*position) == turn))
            .collect()
    }

    /// The layers that were asked for: place in a row, and the model's number.
    fn layers(&self, routes: &RoutesView<'_>) -> Vec<(usize, u32)> {
        let layers = routes.header.layer_ids.iter().copied().enumerate();
        layers.filter(|(_, layer)| self.layer.is_none_or(|asked| asked == *layer)).collect()
    }

    fn paragraph(&self, record: &Record, sample: &Sample, text: &mut String) {
        let _ = write!(text, "sample {}: group {}, rollout {}", sample.number, record.group, record.index);
        if let Some(finish) = record.finish {
            let _ = write!(text, ", {finish}");
        }
        if let Some(tokens) = &record.tokens {
            let _ = write!(text, ", {}", counted(tokens.len(), "token"));
        }
        if let Some(prompt) = record.prompt_tokens {
            let _ = write!(text, ", prompt of {prompt}");
        }
        if !record.turns.is_empty() {
            let turns: Vec<String> = record.turns.iter().map(|turn| format!("{turn:?}")).collect();
            let _ = write!(text, ", sampled {}", turns.join(" "));
        }
        let Some(routes) = record.routes.as_ref().map(|routes| routes.view()) else {
            text.push_str("\n  no routes\n");
            return;
        };
        let (dims, header) = (routes.rows.dims(), routes.header);
        let end = header.start + routes.rows.rows();
        let _ = write!(
            text,
            "\n  rows {}..{end}, coverage {}, {}, {} of {}",
            header.start,
            percent(record.coverage()),
            counted(dims.n_layers, "MoE layer"),
            dims.top_k,
            counted(dims.n_experts, "expert")
        );
        if let Some(epoch) = header.weight_epoch {
            let _ = write!(text, ", weight epoch {epoch}");
        }
        if let Some(hash) = header.model_hash {
            let _ = write!(text, ", weights {hash:016x}");
        }
        text.push('\n');
        if self.shows_rows() {
            self.table(record, (&routes, sample), text);
        }
    }

    fn table(&self, record: &Record, (routes, sample): (&RoutesView<'_>, &Sample), text: &mut String) {
        let layers = self.layers(routes);
        // Room for the widest id of every expert, and for the name of the layer.
        let id_width = (routes.rows.dims().n_experts - 1).to_string().len();
        let width = (routes.rows.dims().top_k * (id_width + 1)).saturating_sub(1).max("layer 00".len());
        let _ = write!(text, "{:>10} {:>8} {:>8} {:>5}", "position", "token", "version", "turn");
        for (_, layer) in &layers {
            let _ = write!(text, "  {:<width$}", format!("layer {layer}"));
        }
        trim_end(text);
        for position in self.positions(routes, sample) {
            let token = token(record, position).map(|token| token.to_string());
            let version = version(record, position).map(|version| version.to_string());
            let dash = || "-".to_owned();
            let _ = write!(
                text,
                "{position:>10} {:>8} {:>8} {:>5}",
                token.unwrap_or_else(dash),
                version.unwrap_or_else(dash),
                sample.turn_of(position)
            );
            for (at, _) in &layers {
                let experts = experts(routes, position, *at);
                let experts: Vec<String> = experts.iter().map(|id| format!("{id:>id_width$}")).collect();
                let _ = write!(text, "  {:<width$}", experts.join(" "));
            }
            trim_end(text);
        }
    }

    fn sample_json(&self, record: &Record, sample: &Sample) -> Value {
        let mut json = json!({
            "sample": sample.number,
            "group": record.group.0,
            "index": record.index,
            "finish": record.finish.map(|finish| finish.to_string()),
            "n_tokens": record.n_tokens(),
            "prompt_tokens": record.prompt_tokens,
            "turns": record.turns.iter().map(|turn| [turn.start, turn.end]).collect::<Vec<_>>(),
            "routes": null,
        });
        let Some(routes) = record.routes.as_ref().map(|routes| routes.view()) else { return json };
        let (dims, header) = (routes.rows.dims(), routes.header);
        json["routes"] = json!({
            "start": header.start,
            "n_rows": routes.rows.rows(),
            "coverage": record.coverage(),
            "layer_ids": header.layer_ids,
            "top_k": dims.top_k,
            "n_experts": dims.n_experts,
            "weight_epoch": header.weight_epoch,
            "model_hash": header.model_hash.map(|hash| format!("{hash:016x}")),
        });
        if self.shows_rows() {
            let layers = self.layers(&routes);
            json["routes"]["shown_layer_ids"] = layers.iter().map(|(_, layer)| *layer).collect();
            let row = |position| {
                json!({
                    "position": position,
                    "token": token(record, position),
                    "version": version(record, position),
                    "turn": sample.turn_of(position),
                    "experts": layers.iter().map(|(at, _)| experts(&routes, position, *at)).collect::<Vec<_>>(),
                })
            };
            json["routes"]["rows"] = self.positions(&routes, sample).into_iter().map(row).collect();
        }
        json
    }
}

fn has_layer(record: &Record, layer: u32) -> bool {
    record.routes.as_ref().is_some_and(|routes| routes.layer_ids.contains(&layer))
}

/// Experts of the row of `position` in the layer at place `at`.
fn experts(routes: &RoutesView<'_>, position: usize, at: usize) -> Vec<u16> {
    let mut experts = vec![0; routes.rows.dims().top_k];
    routes.rows.copy_layer(position - routes.header.start, at, &mut experts);
    experts
}

fn token(record: &Record, position: usize) -> Option<u32> {
    record.tokens.as_ref().map(|tokens| tokens[position].0)
}

/// The policy version that sampled the token of `position`; `None` for tokens of the prompt.
fn version(record: &Record, position: usize) -> Option<u64> {
    let sampled = position.checked_sub(record.prompt_tokens?)?;
    let is_given = !record.turns.is_empty() && !record.turns.iter().any(|turn| turn.contains(&position));
    record.versions.as_ref()?.get(sampled).filter(|_| !is_given).map(|version| version.0)
}

fn trim_end(text: &mut String) {
    text.truncate(text.trim_end_matches(' ').len());
    text.push('\n');
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.1} %", 100.0 * share))
}

/// What was added up over the samples shown.
#[derive(Default)]
struct Summary {
    samples: usize,
    tokens: usize,
    rows: usize,
    without_routes: usize,
    /// Loads of each set of layers and experts; one model has one.
    loads: Vec<Vec<LayerLoad>>,
}

impl Summary {
    fn add(&mut self, record: &Record) {
        self.samples += 1;
        self.tokens += record.n_tokens().unwrap_or_default();
        let Some(routes) = record.routes.as_ref().map(|routes| routes.view()) else {
            self.without_routes += 1;
            return;
        };
        self.rows += routes.rows.rows();
        let fresh = LayerLoad::of(&routes);
        let shape = |loads: &[LayerLoad]| -> Vec<(u32, usize)> {
            loads.iter().map(|load| (load.layer, load.counts.len())).collect()
        };
        let known = self.loads.iter().position(|loads| shape(loads) == shape(&fresh));
        let at = known.unwrap_or_else(|| {
            self.loads.push(fresh);
            self.loads.len() - 1
        });
        LayerLoad::add(&mut self.loads[at], &routes);
    }

    fn json(&self) -> Value {
        let load = |load: &LayerLoad| {
            json!({
                "layer": load.layer,
                "experts_used": load.n_used(),
                "busiest": load.busiest(),
                "max_vio": load.max_vio(),
                "counts": load.counts,
            })
        };
        json!({
            "samples": self.samples,
            "tokens": self.tokens,
            "rows": self.rows,
            "without_routes": self.without_routes,
            "layers": self.loads.iter().flatten().map(load).collect::<Vec<_>>(),
        })
    }

    fn paragraph(&self, layer: Option<u32>, text: &mut String) {
        let _ = writeln!(
            text,
            "\n{}, {}, {}",
            counted(self.samples, "sample"),
            counted(self.tokens, "token"),
            counted(self.rows, "row")
        );
        if self.without_routes > 0 {
            let _ = writeln!(text, "{} without routes", counted(self.without_routes, "sample"));
        }
        for load in self.loads.iter().flatten().filter(|load| layer.is_none_or(|asked| asked == load.layer)) {
            let busiest = load.busiest();
            let share = (load.total() > 0).then(|| load.counts[busiest] as f64 / load.total() as f64);
            let max_vio = load.max_vio().map_or("-".into(), |max_vio| format!("{max_vio:.2}"));
            let _ = writeln!(
                text,
                "  layer {:<3} {:>3} of {}, busiest {busiest} with {} of choices, max_vio {max_vio} |{}|",
                load.layer,
                load.n_used(),
                counted(load.counts.len(), "expert"),
                percent(share),
                load.histogram()
            );
        }
    }
}
