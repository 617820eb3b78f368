//! The one object the loop holds: it takes the record of a step everywhere it has to go.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::error::TelemetryError;
use crate::jsonl::Jsonl;
use crate::metric::{Counter, Kind};
use crate::metrics::METRICS;
use crate::progress::Progress;
use crate::prometheus::{Exporter, Server};
use crate::step_record::StepRecord;

/// Where the numbers go.
#[derive(Clone, Debug, Default)]
pub struct TelemetryConfig {
    /// Address of the Prometheus endpoint; none without.
    pub listen: Option<SocketAddr>,
    /// Path of `metrics.jsonl`; none without.
    pub jsonl: Option<PathBuf>,
    /// The step of the checkpoint the run continues from; 0 for a new run.
    pub resume_step: u64,
}

/// Metrics file, Prometheus endpoint and progress bars of one run.
pub struct Telemetry {
    exporter: Exporter,
    server: Option<Server>,
    jsonl: Option<Jsonl>,
    progress: Progress,
}

impl Telemetry {
    /// Opens the file and the port. Counters go on from the last step that is kept.
    ///
    /// # Errors
    /// If the port is taken or the file cannot be opened and read.
    pub fn start(config: &TelemetryConfig) -> Result<Self, TelemetryError> {
        let exporter = Exporter::new();
        let jsonl = config.jsonl.as_deref().map(|path| Jsonl::open(path, config.resume_step)).transpose()?;
        if let Some(last) = jsonl.as_ref().and_then(Jsonl::last) {
            for counter in counters() {
                exporter.add(counter, last.total(counter).unwrap_or_default());
            }
        }
        let server = config.listen.map(|addr| Server::start(addr, exporter.clone())).transpose()?;
        Ok(Self { exporter, server, jsonl, progress: Progress::stderr() })
    }

    /// Shows the readings of a step in Prometheus, and appends them and the totals of all counters to the file.
    ///
    /// # Errors
    /// If the line cannot be written; Prometheus has the values all the same.
    pub fn record(&mut self, record: &StepRecord) -> Result<(), TelemetryError> {
        let mut line = record.clone();
        for counter in counters() {
            line.set_total(counter.0, self.exporter.total(counter));
        }
        for value in record.values().filter(|value| value.metric.kind == Kind::Gauge) {
            self.exporter.set_value(value.metric, value.dataset.as_deref(), value.value);
        }
        self.jsonl.as_mut().map_or(Ok(()), |jsonl| jsonl.append(&line))
    }

    /// The current values: to count what happens, or to set a gauge between steps, from any thread.
    #[must_use]
    pub fn exporter(&self) -> &Exporter {
        &self.exporter
    }

    /// Bars and lines on the terminal.
    #[must_use]
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Where Prometheus can scrape, if anywhere; the actual port when the configured one was 0.
    #[must_use]
    pub fn addr(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::addr)
    }
}

fn counters() -> impl Iterator<Item = Counter> {
    METRICS.iter().filter(|metric| metric.kind == Kind::Counter).map(|metric| Counter(metric))
}
