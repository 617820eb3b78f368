//! What a metric is. The declarations themselves are in [`crate::metrics`].

use std::fmt;
use std::ops::RangeInclusive;

/// Whether a metric is read as it stands or as a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A reading: each value replaces the one before.
    Gauge,
    /// A total since the run began: it never falls.
    Counter,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
        })
    }
}

/// One number r3 shows, under all its names.
#[derive(Debug)]
pub struct Metric {
    /// Name in `metrics.jsonl`. `<dataset>` stands for the name of a dataset.
    pub key: &'static str,
    /// Name in Prometheus; metrics that differ in one label only share it.
    pub name: &'static str,
    /// Label and value that tell this metric from the others of its name.
    pub label: Option<(&'static str, &'static str)>,
    /// Reading or total.
    pub kind: Kind,
    /// Unit of the value; `share` is a number from 0 to 1.
    pub unit: &'static str,
    /// Where the value lies in a run without trouble.
    pub healthy: RangeInclusive<f64>,
    /// What the value means, as one sentence.
    pub help: &'static str,
}

impl Metric {
    /// The healthy range as a reader would say it: `at most 0.001`, `1 to 1.05`, `any`.
    #[must_use]
    pub fn healthy_range(&self) -> String {
        let (low, high) = (*self.healthy.start(), *self.healthy.end());
        match (low.is_finite(), high.is_finite()) {
            (false, false) => "any".into(),
            (true, false) => format!("at least {low}"),
            (false, true) => format!("at most {high}"),
            (true, true) if low == high => format!("{low}"),
            (true, true) if low == 0.0 => format!("at most {high}"),
            (true, true) => format!("{low} to {high}"),
        }
    }
}

/// A declared gauge: the only thing a step record can set.
#[derive(Clone, Copy, Debug)]
pub struct Gauge(pub(crate) &'static Metric);

/// A declared gauge with one value per dataset.
#[derive(Clone, Copy, Debug)]
pub struct DatasetGauge(pub(crate) &'static Metric);

/// A declared counter.
#[derive(Clone, Copy, Debug)]
pub struct Counter(pub(crate) &'static Metric);

impl DatasetGauge {
    /// The key of one dataset in `metrics.jsonl`.
    pub(crate) fn key(self, dataset: &str) -> String {
        self.0.key.replace(DATASET, dataset)
    }
}

/// What stands for the name of a dataset in a key.
pub(crate) const DATASET: &str = "<dataset>";
