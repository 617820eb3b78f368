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
        // The port comes first: a second run that finds it taken must not have cut the first one's file.
        let server = config.listen.map(|addr| Server::start(addr, exporter.clone())).transpose()?;
        let jsonl = config.jsonl.as_deref().map(|path| Jsonl::open(path, config.resume_step)).transpose()?;
        if let Some(last) = jsonl.as_ref().and_then(Jsonl::last) {
            for counter in counters() {
                exporter.add(counter, last.total(counter).unwrap_or_default());
            }
        }
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use r3_core::ids::PolicyVersion;

    use super::*;
    use crate::jsonl;
    use crate::metrics::{K3_KL, PREEMPTIONS, VAL_CORE_MEAN};

    fn start(path: &Path, resume_step: u64) -> Telemetry {
        Telemetry::start(&TelemetryConfig { listen: None, jsonl: Some(path.into()), resume_step }).unwrap()
    }

    fn record(step: u64) -> StepRecord {
        let mut record = StepRecord::new(step, PolicyVersion(step));
        record.set(K3_KL, 0.5);
        record.set_dataset(VAL_CORE_MEAN, "arithmetic", 0.25);
        record
    }

    #[test]
    fn the_file_and_prometheus_tell_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut telemetry = start(&path, 0);
        telemetry.exporter().add(PREEMPTIONS, 7);
        telemetry.record(&record(3)).unwrap();
        let text = telemetry.exporter().render();
        let lines = jsonl::read(&path).unwrap();
        assert_eq!(lines.len(), 1);
        for value in lines[0].values() {
            let dataset = value.dataset.iter().map(|dataset| format!("dataset=\"{dataset}\""));
            let label = value.metric.label.iter().map(|(label, value)| format!("{label}=\"{value}\""));
            let labels = dataset.chain(label).collect::<Vec<_>>().join(",");
            let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
            let sample = format!("\n{}{labels} {}\n", value.metric.name, value.value);
            assert!(text.contains(&sample), "{sample} is not in {text}");
        }
        assert_eq!((lines[0].get(K3_KL), lines[0].total(PREEMPTIONS)), (Some(0.5), Some(7)));
    }

    #[test]
    fn totals_go_on_where_the_checkpoint_left_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut killed = start(&path, 0);
        for step in 1..=5 {
            killed.exporter().add(PREEMPTIONS, 10);
            killed.record(&record(step)).unwrap();
        }
        drop(killed);
        let mut resumed = start(&path, 3);
        resumed.exporter().add(PREEMPTIONS, 1);
        resumed.record(&record(4)).unwrap();
        let totals: Vec<_> = jsonl::read(&path).unwrap().iter().map(|line| line.total(PREEMPTIONS)).collect();
        assert_eq!(totals, [10, 20, 30, 31].map(Some));
    }

    #[test]
    fn a_port_that_is_taken_leaves_the_file_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        start(&path, 0).record(&record(1)).unwrap();
        let before = std::fs::read(&path).unwrap();
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let listen = Some(taken.local_addr().unwrap());
        assert!(
            Telemetry::start(&TelemetryConfig { listen, jsonl: Some(path.clone()), resume_step: 0 }).is_err()
        );
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }

    #[test]
    fn without_file_and_port_records_still_reach_the_exporter() {
        let mut telemetry = Telemetry::start(&TelemetryConfig::default()).unwrap();
        telemetry.record(&record(1)).unwrap();
        assert!(telemetry.exporter().render().contains("r3_rollout_train_k3_kl 0.5"));
        assert_eq!(telemetry.addr(), None);
    }
}
