//! Stdout, for results only, and stderr, for the rest.

use std::io::{self, Write};

use serde::Serialize;

use crate::error::CliError;

/// Writes text as it is, and flushes it.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.map_err(|source| CliError::Stdout { source })
}

/// Writes a value as one line of JSON, and flushes it.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), CliError> {
    let mut line = serde_json::to_string(value).expect("plain data always serialises");
    line.push('\n');
    print(&line)
}

/// Writes text to stderr; a closed stderr is no reason to fail.
pub(crate) fn message(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}
