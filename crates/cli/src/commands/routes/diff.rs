//! `r3 routes diff`: how far the routes of two files differ.

use std::fmt::Write as _;
use std::path::PathBuf;

use r3_wire::diff::{Difference, Discrepancy, Incomparable, compare};
use serde_json::{Value, json};

use crate::commands::routes::{InputArgs, Loaded};
use crate::error::CliError;
use crate::output;

/// Compare the routes of two files, sample by sample
///
/// Experts are compared as sets; the same experts in another order are counted apart. The names are those of the metrics:
/// router_discrepancy_token_layer_frac is the share of pairs of token and MoE layer with other experts,
/// router_discrepancy_token_any_frac the share of tokens with other experts in at least one layer, and
/// router_discrepancy_layers_per_token how many layers that is, on average. Files that differ are no error.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A file of routes; - is stdin
    a: PathBuf,
    /// Another, of the same samples in the same order
    b: PathBuf,
    #[command(flatten)]
    input: InputArgs,
    /// End stdout with one line of JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(crate) fn execute(&self) -> Result<(), CliError> {
        let (a, b) = (self.input.load(&self.a)?, self.input.load(&self.b)?);
        let comparison = Comparison::new(&a, &b).map_err(|source| CliError::Incomparable {
            a: a.input.clone(),
            b: b.input.clone(),
            source,
        })?;
        if self.json { output::print_json(&comparison.json()) } else { output::print(&comparison.table()) }
    }
}

struct Comparison {
    samples: Vec<Discrepancy>,
    total: Discrepancy,
    /// The first place with other experts, or else with another order.
    first: Option<Difference>,
}

impl Comparison {
    fn new(a: &Loaded, b: &Loaded) -> Result<Self, Incomparable> {
        if a.records.len() != b.records.len() {
            return Err(Incomparable::Samples { a: a.records.len(), b: b.records.len() });
        }
        let mut comparison = Self { samples: Vec::new(), total: Discrepancy::default(), first: None };
        let mut first_reordered = None;
        for (sample, (a, b)) in a.records.iter().zip(&b.records).enumerate() {
            let (counts, first) = compare(a, b, sample)?;
            let kept =
                if counts.choices_differing > 0 { &mut comparison.first } else { &mut first_reordered };
            *kept = kept.take().or(first);
            comparison.total += counts;
            comparison.samples.push(counts);
        }
        comparison.first = comparison.first.or(first_reordered);
        Ok(comparison)
    }

    fn json(&self) -> Value {
        let mut json = shares(&self.total);
        json["samples"] = self.samples.len().into();
        json["first"] = self.first.as_ref().map_or(Value::Null, |first| {
            json!({
                "sample": first.sample, "turn": first.turn, "layer": first.layer, "position": first.position,
                "a": first.a, "b": first.b,
            })
        });
        json["per_sample"] = self.samples.iter().map(shares).collect();
        json
    }

    fn table(&self) -> String {
        let mut table = String::new();
        let _ = writeln!(
            table,
            "{:>6} {:>8} {:>17} {:>15} {:>17} {:>15}",
            "sample", "tokens", "token_layer_frac", "token_any_frac", "layers_per_token", "reordered_frac"
        );
        let numbered = self.samples.iter().enumerate().map(|(number, counts)| (number.to_string(), counts));
        for (name, counts) in numbered.chain([("all".to_owned(), &self.total)]) {
            let number = |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{share:.4}"));
            let _ = writeln!(
                table,
                "{name:>6} {:>8} {:>17} {:>15} {:>17} {:>15}",
                counts.tokens,
                number(counts.token_layer_frac()),
                number(counts.token_any_frac()),
                number(counts.layers_per_token()),
                number(counts.reordered_frac()),
            );
        }
        let _ = match &self.first {
            None => writeln!(table, "\nno difference"),
            Some(Difference { sample, turn, layer, position, a, b }) => writeln!(
                table,
                "\nfirst difference: sample {sample}, turn {turn}, layer {layer}, position {position}: {a:?} and {b:?}"
            ),
        };
        table
    }
}

fn shares(counts: &Discrepancy) -> Value {
    json!({
        "tokens": counts.tokens,
        "router_discrepancy_token_layer_frac": counts.token_layer_frac(),
        "router_discrepancy_token_any_frac": counts.token_any_frac(),
        "router_discrepancy_layers_per_token": counts.layers_per_token(),
        "reordered_frac": counts.reordered_frac(),
    })
}
