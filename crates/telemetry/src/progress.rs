//! Progress bars, on a terminal only, and lines above them.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{
    MultiProgress, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressState, ProgressStyle,
};
use r3_core::count::counted;

use crate::format::short;

/// What a bar counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// Bytes of a file.
    Load,
    /// Rollouts of a step, and the tokens in them.
    Rollout,
    /// Micro-batches of a step, and the tokens in them.
    Train,
    /// Problems of an evaluation, and the tokens of their answers.
    Eval,
}

impl BarKind {
    fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Rollout => "rollout",
            Self::Train => "train",
            Self::Eval => "eval",
        }
    }

    fn template(self, total: u64) -> String {
        let counts = |noun| format!("{{pos}}/{}  {{token_rate}}", counted(total, noun));
        let counts = match self {
            Self::Load => "{bytes}/{total_bytes}  {bytes_per_sec}".into(),
            Self::Rollout => counts("rollout"),
            Self::Train => counts("micro-batch"),
            Self::Eval => counts("problem"),
        };
        format!("{{prefix:>7}} {{bar:30.cyan/dim}} {counts}  eta {{eta}}")
    }
}

/// Where bars and lines go: stderr. Bars appear on a terminal only; their colours follow `NO_COLOR`.
#[derive(Clone, Debug)]
pub struct Progress {
    bars: MultiProgress,
}

impl Progress {
    /// Bars if stderr is a terminal; lines in any case.
    #[must_use]
    pub fn stderr() -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self::on(if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() })
    }

    fn on(target: ProgressDrawTarget) -> Self {
        Self { bars: MultiProgress::with_draw_target(target) }
    }

    /// A bar that is full at `total`. It goes away when finished or dropped.
    ///
    /// # Panics
    /// Never: the templates are constants, and tested.
    #[must_use]
    pub fn bar(&self, kind: BarKind, total: u64) -> Bar {
        let tokens = Arc::new(AtomicU64::new(0));
        let so_far = Arc::clone(&tokens);
        let token_rate = move |state: &ProgressState, out: &mut dyn fmt::Write| {
            let rate = so_far.load(Ordering::Relaxed) as f64 / state.elapsed().as_secs_f64().max(1e-3);
            let _ = write!(out, "{} tok/s", short(rate)); // A bar that cannot be drawn is no reason to stop.
        };
        let style =
            ProgressStyle::with_template(&kind.template(total)).expect("the templates are well-formed");
        let style = style.with_key("token_rate", token_rate).progress_chars("━━─");
        let bar = ProgressBar::new(total).with_finish(ProgressFinish::AndClear).with_prefix(kind.name());
        let inner = self.bars.add(bar.with_style(style));
        Bar { inner, tokens }
    }

    /// Prints a line, above the bars if there are any.
    pub fn line(&self, text: &str) {
        if self.bars.is_hidden() {
            let _ = writeln!(std::io::stderr(), "{text}"); // A closed stderr is no reason to stop a run.
        } else {
            let _ = self.bars.println(text);
        }
    }
}

/// One bar. Threads may share it.
#[derive(Debug)]
pub struct Bar {
    inner: ProgressBar,
    tokens: Arc<AtomicU64>,
}

impl Bar {
    /// `n` more are done.
    pub fn inc(&self, n: u64) {
        self.inner.inc(n);
    }

    /// `n` more tokens went through.
    pub fn tokens(&self, n: u64) {
        self.tokens.fetch_add(n, Ordering::Relaxed); // A count to look at; it orders nothing.
        self.inner.tick();
    }

    /// `tokens` more went through and `n` more are done.
    pub fn add(&self, tokens: u64, n: u64) {
        self.tokens(tokens);
        self.inc(n);
    }

    /// Takes the bar off the screen.
    pub fn finish(self) {
        self.inner.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Mutex;

    use indicatif::TermLike;

    use super::*;

    /// A terminal that keeps what was written to it, in order.
    #[derive(Clone, Debug, Default)]
    struct Paper(Arc<Mutex<String>>);

    impl TermLike for Paper {
        fn width(&self) -> u16 {
            120
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(&format!("{text}\n"))
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn drawn(kind: BarKind, total: u64, done: u64) -> String {
        let paper = Paper::default();
        let progress = Progress::on(ProgressDrawTarget::term_like(Box::new(paper.clone())));
        let bar = progress.bar(kind, total);
        bar.tokens(5000);
        bar.inc(done);
        progress.line("above"); // Drawing a line redraws the bars below it at once.
        bar.finish();
        paper.0.lock().unwrap().clone()
    }

    #[test]
    fn each_kind_counts_in_its_own_unit() {
        let load = drawn(BarKind::Load, 2 << 20, 1 << 20);
        assert!(load.contains("1.00 MiB/2.00 MiB"), "{load}");
        let rollout = drawn(BarKind::Rollout, 8, 3);
        assert!(
            rollout.contains("3/8 rollouts") && rollout.contains("tok/s") && rollout.contains("eta"),
            "{rollout}"
        );
        assert!(drawn(BarKind::Train, 4, 1).contains("1/4 micro-batches"));
        assert!(drawn(BarKind::Train, 1, 0).contains("0/1 micro-batch "));
        assert!(drawn(BarKind::Eval, 512, 2).contains("2/512 problems"));
    }

    #[test]
    fn a_line_is_printed_above_the_bars() {
        let text = drawn(BarKind::Train, 4, 1);
        assert!(text.contains("above"), "{text}");
        assert!(text.rfind("above") < text.rfind("1/4 micro-batches"), "{text}");
    }

    #[test]
    fn without_a_terminal_nothing_is_drawn() {
        let progress = Progress::on(ProgressDrawTarget::hidden());
        let bar = progress.bar(BarKind::Load, 10);
        assert!(bar.inner.is_hidden());
        bar.inc(1);
    }
}
