//! What a run shows: metrics, progress bars, the line a step prints, summaries and reports.
//!
//! Every number r3 shows is declared once, in [`metrics`], and reaches `metrics.jsonl`, Prometheus, the dashboards
//! and the docs from there. This crate must never know tensors, engines or recipes: it is handed numbers. Only
//! the orchestrator holds a [`telemetry::Telemetry`]; everyone else returns their numbers by value. Start with
//! [`telemetry`], then [`metrics`].

pub mod chart;
pub mod error;
pub mod format;
pub mod jsonl;
pub mod metric;
pub mod metrics;
pub mod progress;
pub mod prometheus;
pub mod report;
pub mod step_line;
pub mod step_record;
pub mod summary;
pub mod telemetry;
