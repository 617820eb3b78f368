//! Where in a text a fault lies, and how that is shown.

use std::fmt;

/// Characters of a line shown at most; a longer one is cut around the fault.
const SHOWN_CHARS: usize = 120;

/// A text that recipes are read from: the file, or one argument of `--set`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    /// Name shown in errors: a path, or `--set`.
    pub(crate) name: &'a str,
    /// The whole text.
    pub(crate) text: &'a str,
}

/// Position of a value or key, within one of the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    /// Index of the source.
    pub(crate) source: usize,
    /// Line, from 1.
    pub(crate) line: usize,
    /// Column in characters, from 1.
    pub(crate) column: usize,
    /// Characters, at least 1.
    pub(crate) width: usize,
}

/// Where in a recipe, or in an argument of `--set`, a fault lies. Displays as the line with the fault underlined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name of the recipe, usually its path, or `--set`.
    pub name: String,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Characters at fault, at least 1.
    pub width: usize,
    /// The whole line.
    pub text: String,
}

/// The lines of `text` as YAML 1.2 ends them: with a line feed, a carriage return, or both.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let end = text.find(['\n', '\r']);
        rest = end.map(|end| text[end..].strip_prefix("\r\n").unwrap_or(&text[end + 1..]));
        Some(&text[..end.unwrap_or(text.len())])
    })
}

impl Place {
    /// Cuts the line of `spot` out of its source.
    ///
    /// # Panics
    /// If the spot's source is none of `sources`: the spot was made from them, so that is a bug.
    pub(crate) fn new(sources: &[Source<'_>], spot: Spot) -> Self {
        let source = sources[spot.source];
        let text = lines(source.text).nth(spot.line.saturating_sub(1)).unwrap_or("");
        Self {
            name: source.name.into(),
            line: spot.line,
            column: spot.column,
            width: spot.width,
            text: text.into(),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, line, column, .. } = self;
        let fits = self.text.chars().count().max(*column) <= SHOWN_CHARS;
        let skipped = if fits { 0 } else { column.saturating_sub(SHOWN_CHARS / 2) };
        let (skipped, mark) = if skipped > 0 { (skipped, "…") } else { (0, "") };
        // A control character would move the cursor, or worse.
        let shown = self.text.chars().map(|c| if c.is_control() { ' ' } else { c });
        let shown: String = shown.skip(skipped).take(SHOWN_CHARS).collect();
        let before = column - 1 - skipped + mark.chars().count();
        let width = self.width.clamp(1, (SHOWN_CHARS + 1).saturating_sub(before).max(1));
        let margin = " ".repeat(line.to_string().len());
        writeln!(f, "{margin}--> {name}:{line}:{column}")?;
        writeln!(f, "{margin} |")?;
        writeln!(f, "{line} | {mark}{shown}")?;
        write!(f, "{margin} | {}{}", " ".repeat(before), "^".repeat(width))
    }
}

#[cfg(test)]
mod tests {
    use super::{Place, Source, Spot};

    fn place(text: &str, column: usize, width: usize) -> String {
        Place::new(&[Source { name: "x.yaml", text }], Spot { source: 0, line: 2, column, width }).to_string()
    }

    #[test]
    fn the_fault_is_underlined() {
        insta::assert_snapshot!(place("a: 1\r\nlr: fast\r\n", 5, 4), @r"
         --> x.yaml:2:5
          |
        2 | lr: fast
          |     ^^^^
        ");
    }

    #[test]
    fn lines_end_where_yaml_ends_them() {
        let line = |text, line| {
            let spot = Spot { source: 0, line, column: 1, width: 1 };
            Place::new(&[Source { name: "x.yaml", text }], spot).text
        };
        let text = "a\rb\r\nc\n\rd";
        assert_eq!([1, 2, 3, 4, 5].map(|at| line(text, at)), ["a", "b", "c", "", "d"]);
    }

    #[test]
    fn a_long_line_is_cut_around_the_fault() {
        let shown = place(&format!("\n{}!{}", "a".repeat(300), "b".repeat(300)), 301, 1);
        let lines: Vec<&str> = shown.lines().collect();
        let (code, caret) = (lines[2], lines[3]);
        assert!(code.chars().count() < 130);
        assert_eq!(code.chars().position(|c| c == '!'), caret.chars().position(|c| c == '^'));
    }

    #[test]
    fn control_characters_never_reach_a_terminal() {
        assert!(!place("\n\x1b[2Ja: \tx", 1, 1).contains(['\x1b', '\t']));
    }

    #[test]
    fn a_place_past_the_text_is_shown_empty() {
        insta::assert_snapshot!(place("a", 1, 1), @"
         --> x.yaml:2:1
          |
        2 | 
          | ^
        ");
    }
}
