//! What can go wrong between a number and its reader.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why telemetry could not start, or could not write what it was handed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum TelemetryError {
    #[error("cannot serve metrics at {addr}")]
    Listen { addr: SocketAddr, source: io::Error },
    #[error("cannot start the metrics server at {addr}")]
    Serve { addr: SocketAddr, source: io::Error },
    #[error("cannot open {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} line {line} is not the record of a step", path.display())]
    Corrupt { path: PathBuf, line: usize, source: serde_json::Error },
}

impl TelemetryError {
    /// What the user can change, printed as `hint: ...`.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Listen { addr, source } if source.kind() == io::ErrorKind::AddrInUse => format!(
                "port {} is taken, perhaps by another run: set `metrics.listen` to another port, or to {}:0 for any free one",
                addr.port(),
                addr.ip()
            ),
            Self::Listen { .. } => {
                "set `metrics.listen` to an address of this machine, such as 127.0.0.1:9464".into()
            }
            Self::Serve { .. } => {
                "the machine is out of threads or file descriptors: raise `ulimit -n` and `ulimit -u`".into()
            }
            Self::Open { path, .. } | Self::Read { path, .. } => {
                format!("check that {} exists and that you may read and write it", path.display())
            }
            Self::Write { .. } => "free space on the disk of `run.out`, then continue with `--resume`".into(),
            Self::Corrupt { line, .. } => {
                format!("delete line {line} and those after it to resume from the last whole step")
            }
        }
    }
}
