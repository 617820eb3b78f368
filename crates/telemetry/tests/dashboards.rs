//! The dashboards in `docs/dashboards` ask for declared metrics and labels only.

use std::collections::BTreeSet;
use std::path::Path;

use r3_telemetry::metric::{Kind, Metric};
use r3_telemetry::metrics::METRICS;
use serde_json::Value;

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/dashboards").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every `expr` in the dashboard, wherever it is.
fn queries(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::String(expr) if key == "expr" => found.push(expr.clone()),
                    value => queries(value, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| queries(item, found)),
        _ => {}
    }
}

fn dashboard_queries() -> Vec<String> {
    let mut found = Vec::new();
    queries(&serde_json::from_str(&read("r3.json")).unwrap(), &mut found);
    found
}

/// What is wrong with a query, if anything: an undeclared name or label, or a rate of something that is no counter.
fn fault(query: &str) -> Option<String> {
    let start = query.find("r3_")?;
    let rest = &query[start..];
    let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
    let (name, rest) = rest.split_at(end);
    let of_name: Vec<&Metric> = METRICS.iter().copied().filter(|metric| metric.name == name).collect();
    let Some(first) = of_name.first() else { return Some(format!("{name} is not declared")) };
    let is_rate = query[..start].ends_with("rate(") || query[..start].ends_with("increase(");
    if is_rate != (first.kind == Kind::Counter) {
        return Some(format!("{name} is a {}", first.kind));
    }
    let Some(matchers) = rest.strip_prefix('{') else { return fault(rest) };
    let (matchers, rest) = matchers.split_once('}')?;
    for matcher in matchers.split(',') {
        let (label, value) = matcher.split_once("!=").or_else(|| matcher.split_once('='))?;
        let declared = Some((label, value.trim_matches('"')));
        if !of_name.iter().any(|metric| metric.label == declared) {
            return Some(format!("{name} has no {matcher}"));
        }
    }
    fault(rest)
}

#[test]
fn every_query_names_declared_metrics_and_labels() {
    let queries = dashboard_queries();
    assert!(queries.len() >= 30, "only {} queries were found", queries.len());
    for query in queries {
        assert_eq!(fault(&query), None, "{query}");
        assert!(query.contains("r3_"), "{query}");
    }
}

#[test]
fn the_check_itself_finds_faults() {
    let faults = [
        "r3_reward_mean",
        "r3_reward{stat=\"median\"}",
        "rate(r3_step[1m])",
        "r3_num_preemptions_total",
        "r3_step + r3_stop",
    ];
    for query in faults {
        assert!(fault(query).is_some(), "{query}");
    }
    assert_eq!(fault("r3_phase_seconds{phase!=\"step\"} / rate(r3_num_preemptions_total[1m])"), None);
}

#[test]
fn the_dashboard_shows_every_family_a_reader_needs() {
    let queries = dashboard_queries().join("\n");
    let needed = [
        "r3_rollout_train_k3_kl",
        "r3_rollout_train_logprobs_abs_diff",
        "r3_rollout_train_extreme_frac",
        "r3_router_discrepancy",
        "r3_reward",
        "r3_val_core",
        "r3_response_length",
        "r3_rollout_tokens_per_second",
        "r3_train_tokens_per_second",
        "r3_phase_seconds",
        "r3_kv_cache_usage_perc",
        "r3_prefix_cache_hit_rate",
        "r3_num_preemptions_total",
        "r3_trajectory_staleness",
        "r3_actor_grad_norm",
        "r3_actor_pg_clipfrac",
    ];
    for name in needed {
        assert!(queries.contains(name), "no panel shows {name}");
    }
}

#[test]
fn panels_have_their_own_ids_and_do_not_overlap() {
    let dashboard: Value = serde_json::from_str(&read("r3.json")).unwrap();
    let mut ids = BTreeSet::new();
    let mut cells = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = &panel["title"];
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}");
        let side = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        for x in side("x")..side("x") + side("w") {
            for y in side("y")..side("y") + side("h") {
                assert!(x < 24 && cells.insert((x, y)), "{title} overlaps at {x}, {y}");
            }
        }
    }
}

#[test]
fn prometheus_scrapes_the_default_port() {
    assert!(read("prometheus.yml").contains("127.0.0.1:9464"));
}
