//! Prometheus: the current value of every metric, and the server that shows them.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use metrics::{Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use tokio::sync::oneshot;

use crate::error::TelemetryError;
use crate::metric::{Counter, Gauge, Kind, Metric};
use crate::metrics::{METRICS, help_of};

/// The current value of every metric; clones share them, so any thread can hold one.
///
/// The recorder is not installed as the process-wide one of the `metrics` crate: r3 has no globals, two runs in one
/// process (as in `r3 compare`, or in tests) must not mix, and only declared metrics may be recorded.
#[derive(Clone)]
pub struct Exporter {
    shared: Arc<Shared>,
}

struct Shared {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    totals: Mutex<BTreeMap<&'static str, u64>>,
}

impl Exporter {
    /// No gauge has a value yet, so none is shown: a KL that was never measured must not read as 0. Counters start
    /// at 0, so that their first increase is seen as one.
    #[must_use]
    pub fn new() -> Self {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        let exporter = Self { shared: Arc::new(Shared { recorder, handle, totals: Mutex::default() }) };
        for metric in METRICS {
            let help = help_of(metric.name).into();
            match metric.kind {
                Kind::Gauge => exporter.shared.recorder.describe_gauge(metric.name.into(), None, help),
                Kind::Counter => exporter.shared.recorder.describe_counter(metric.name.into(), None, help),
            }
        }
        for metric in METRICS.iter().filter(|metric| metric.kind == Kind::Counter) {
            exporter.add(Counter(metric), 0);
        }
        exporter
    }

    /// Sets a gauge between steps, such as the number of running sequences.
    pub fn set(&self, gauge: Gauge, value: f64) {
        self.set_value(gauge.0, None, value);
    }

    /// Counts `n` more.
    pub fn add(&self, counter: Counter, n: u64) {
        let mut totals = self.shared.totals.lock().unwrap_or_else(PoisonError::into_inner);
        let total = totals.entry(counter.0.key).or_default();
        *total += n;
        self.shared.recorder.register_counter(&key(counter.0, None), &METADATA).absolute(*total);
    }

    /// The total of a counter.
    #[must_use]
    pub fn total(&self, counter: Counter) -> u64 {
        let totals = self.shared.totals.lock().unwrap_or_else(PoisonError::into_inner);
        totals.get(counter.0.key).copied().unwrap_or_default()
    }

    /// Everything in Prometheus' text format, with `HELP` and `TYPE`.
    #[must_use]
    pub fn render(&self) -> String {
        self.shared.handle.render()
    }

    pub(crate) fn set_value(&self, metric: &'static Metric, dataset: Option<&str>, value: f64) {
        self.shared.recorder.register_gauge(&key(metric, dataset), &METADATA).set(value);
    }
}

impl Default for Exporter {
    fn default() -> Self {
        Self::new()
    }
}

const METADATA: Metadata<'static> = Metadata::new(env!("CARGO_PKG_NAME"), Level::INFO, None);

fn key(metric: &'static Metric, dataset: Option<&str>) -> Key {
    let dataset = dataset.map(|dataset| Label::new("dataset", dataset.to_owned()));
    let label = metric.label.map(|(label, value)| Label::new(label, value));
    Key::from_parts(metric.name, dataset.into_iter().chain(label).collect::<Vec<_>>())
}

/// Serves `/metrics` and `/healthz` from a thread of its own until dropped.
#[derive(Debug)]
pub struct Server {
    addr: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Binds `addr` before it returns; port 0 takes any free one, see [`Self::addr`].
    ///
    /// # Errors
    /// If the address cannot be bound, or the machine refuses another thread.
    pub fn start(addr: SocketAddr, exporter: Exporter) -> Result<Self, TelemetryError> {
        let listen = |source| TelemetryError::Listen { addr, source };
        let listener = TcpListener::bind(addr).map_err(listen)?;
        listener.set_nonblocking(true).map_err(listen)?;
        let addr = listener.local_addr().map_err(listen)?;
        let (stop, stopped) = oneshot::channel();
        let serve = |source| TelemetryError::Serve { addr, source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(serve)?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(serve)?
        };
        let run = move || runtime.block_on(serve_until(stopped, listener, exporter));
        let thread = std::thread::Builder::new().name("r3-metrics".into()).spawn(run).map_err(serve)?;
        Ok(Self { addr, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Server {
    /// Stops at once, open connections included, and waits for the thread: the port is free afterwards.
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // A panic in there has already been printed; the run must not end on it.
        }
    }
}

/// Prometheus keeps its connection open, so waiting for connections to close by themselves could take forever:
/// returning drops the listener, and the runtime's end drops the connections.
async fn serve_until(stopped: oneshot::Receiver<()>, listener: tokio::net::TcpListener, exporter: Exporter) {
    let metrics = move || async move { ([(CONTENT_TYPE, "text/plain; version=0.0.4")], exporter.render()) };
    let routes = Router::new().route("/metrics", get(metrics)).route("/healthz", get(|| async { "ok\n" }));
    let served: io::Result<()> = tokio::select! {
        served = axum::serve(listener, routes) => served,
        _ = stopped => Ok(()),
    };
    debug_assert!(served.is_ok(), "axum's accept loop retries, it does not return");
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpStream};

    use super::*;
    use crate::metric::DATASET;
    use crate::metrics::{K3_KL, PREEMPTIONS};

    const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

    fn request(path: &str, connection: &str) -> String {
        format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\n\r\n")
    }

    fn fetch(addr: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(request(path, "close").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn what_is_set_is_served() {
        let exporter = Exporter::new();
        let server = Server::start(ANY_PORT, exporter.clone()).unwrap();
        exporter.set(K3_KL, 1.5e-5);
        exporter.add(PREEMPTIONS, 2);
        exporter.add(PREEMPTIONS, 3);
        let answer = fetch(server.addr(), "/metrics");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains("text/plain; version=0.0.4"), "{answer}");
        assert!(answer.contains("\nr3_rollout_train_k3_kl 0.000015\n"), "{answer}");
        assert!(answer.contains("\nr3_num_preemptions_total 5\n"), "{answer}");
        assert!(fetch(server.addr(), "/healthz").ends_with("\r\n\r\nok\n"));
        assert!(fetch(server.addr(), "/elsewhere").starts_with("HTTP/1.1 404"));
    }

    #[test]
    fn a_gauge_that_was_never_measured_is_not_zero_but_absent() {
        let text = Exporter::new().render();
        assert!(!text.contains("k3_kl"), "{text}");
        assert!(text.contains("\nr3_route_rows_total{state=\"unset\"} 0\n"), "{text}");
    }

    #[test]
    fn every_metric_has_help_and_type() {
        let exporter = Exporter::new();
        for metric in METRICS.iter().filter(|metric| metric.kind == Kind::Gauge) {
            exporter.set_value(metric, metric.key.contains(DATASET).then_some("arithmetic"), 0.5);
        }
        let text = exporter.render();
        for metric in METRICS {
            assert!(
                text.contains(&format!("# HELP {} {}\n", metric.name, help_of(metric.name))),
                "{}",
                metric.name
            );
            assert!(text.contains(&format!("# TYPE {} {}\n", metric.name, metric.kind)), "{}", metric.name);
        }
        assert!(text.contains("\nr3_val_core{dataset=\"arithmetic\",stat=\"mean@1\"} 0.5\n"), "{text}");
    }

    #[test]
    fn a_port_in_use_is_refused_with_its_address_and_a_hint() {
        let first = Server::start(ANY_PORT, Exporter::new()).unwrap();
        let error = Server::start(first.addr(), Exporter::new()).unwrap_err();
        assert_eq!(error.to_string(), format!("cannot serve metrics at {}", first.addr()));
        let hint = error.hint();
        assert!(
            hint.contains("`metrics.listen`") && hint.contains(&first.addr().port().to_string()),
            "{hint}"
        );
    }

    #[test]
    fn dropping_the_server_frees_the_port_while_a_connection_is_open() {
        let server = Server::start(ANY_PORT, Exporter::new()).unwrap();
        let addr = server.addr();
        let mut open = TcpStream::connect(addr).unwrap();
        open.write_all(request("/healthz", "keep-alive").as_bytes()).unwrap();
        let mut answer = [0; 12];
        open.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200");
        drop(server);
        let again = Server::start(addr, Exporter::new()).unwrap();
        assert!(fetch(again.addr(), "/healthz").starts_with("HTTP/1.1 200"));
    }

    #[test]
    fn two_exporters_in_one_process_do_not_mix() {
        let (one, other) = (Exporter::new(), Exporter::new());
        one.set(K3_KL, 1.0);
        assert!(one.render().contains("r3_rollout_train_k3_kl 1\n"));
        assert!(!other.render().contains("r3_rollout_train_k3_kl"));
    }
}
