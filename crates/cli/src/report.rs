//! How errors and bugs look on the terminal.

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::panic::PanicHookInfo;

use crate::error::CliError;
use crate::output;

/// Whether stderr shows colours: on a terminal, unless `NO_COLOR` is set (no-color.org).
pub(crate) fn wants_colour() -> bool {
    io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Prints an error with its causes, an empty line, and what can be done.
pub(crate) fn report(error: &CliError) {
    output::message(&paragraphs(error, &error.hint(), wants_colour()));
}

/// The panic hook: every panic is a bug of ours.
pub(crate) fn panicked(panic: &PanicHookInfo<'_>) {
    let place = panic.location().map(ToString::to_string);
    let message = panic.payload_as_str().unwrap_or("no message");
    output::message(&paragraphs(&Bug { message, place: place.as_deref() }, BUG_HINT, wants_colour()));
}

/// A panic, as an error.
#[derive(Debug, thiserror::Error)]
#[error("this is a bug in r3 {}: {message} (at {})", env!("CARGO_PKG_VERSION"), place.unwrap_or("an unknown place"))]
struct Bug<'a> {
    message: &'a str,
    place: Option<&'a str>,
}

const BUG_HINT: &str = "please report this message with the command and the recipe; checkpoints on disk are whole, and \
                        `r3 run --resume` continues from them";

fn paragraphs(error: &dyn Error, hint: &str, colour: bool) -> String {
    let (red, cyan, plain) = if colour { ("\x1b[1;31m", "\x1b[1;36m", "\x1b[0m") } else { ("", "", "") };
    let mut message = error.to_string();
    let mut text = format!("{red}error:{plain} {message}\n");
    let mut cause = error.source();
    while let Some(error) = cause {
        let inner = error.to_string();
        // Some libraries repeat their cause in their own message.
        if !message.contains(&inner) {
            let _ = writeln!(text, "  caused by: {inner}");
        }
        message = inner;
        cause = error.source();
    }
    let _ = writeln!(text, "\n{cyan}hint:{plain} {hint}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{message}")]
    struct Link {
        message: &'static str,
        source: Option<Box<Link>>,
    }

    fn chain(messages: &[&'static str]) -> Option<Box<Link>> {
        let (message, rest) = messages.split_first()?;
        Some(Box::new(Link { message, source: chain(rest) }))
    }

    #[test]
    fn causes_follow_the_error_and_the_hint_stands_apart() {
        let error = chain(&["cannot save the run", "cannot write /full", "no space left"]).unwrap();
        insta::assert_snapshot!(paragraphs(&*error, "free some space", false), @r"
        error: cannot save the run
          caused by: cannot write /full
          caused by: no space left

        hint: free some space
        ");
    }

    #[test]
    fn a_cause_is_not_said_twice() {
        let error = chain(&["cannot read x: not found", "not found"]).unwrap();
        assert_eq!(paragraphs(&*error, "look", false).matches("not found").count(), 1);
    }

    #[test]
    fn colours_are_for_the_two_words_only() {
        let error = chain(&["it broke"]).unwrap();
        assert_eq!(
            paragraphs(&*error, "mend it", true),
            "\x1b[1;31merror:\x1b[0m it broke\n\n\x1b[1;36mhint:\x1b[0m mend it\n"
        );
    }

    #[test]
    fn a_bug_shows_its_message_and_place() {
        let bug = Bug { message: "index out of bounds", place: Some("crates/x/src/y.rs:7:5") };
        assert_eq!(
            paragraphs(&bug, "report it", false),
            format!(
                "error: this is a bug in r3 {}: index out of bounds (at crates/x/src/y.rs:7:5)\n\nhint: report it\n",
                env!("CARGO_PKG_VERSION")
            )
        );
    }
}
