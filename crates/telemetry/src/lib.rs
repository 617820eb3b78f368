//! Metrics, progress, reports.
