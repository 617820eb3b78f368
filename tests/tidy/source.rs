//! Just enough of Rust's syntax to tell code from comments and strings, and tests from the rest.

/// A Rust file in two readings, both with the line breaks of the text.
pub(crate) struct Source {
    /// Comments, strings and character literals are blank.
    pub(crate) code: String,
    /// Only comments are blank.
    pub(crate) uncommented: String,
}

impl Source {
    pub(crate) fn parse(text: &str) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let mut source = Self { code: String::new(), uncommented: String::new() };
        let mut at = 0;
        while at < chars.len() {
            let (kind, end) = token(&chars, at);
            for &c in &chars[at..end] {
                let blank = if c == '\n' { '\n' } else { ' ' };
                source.code.push(if kind == Kind::Code { c } else { blank });
                source.uncommented.push(if kind == Kind::Comment { blank } else { c });
            }
            at = end;
        }
        source
    }

    /// For every line, whether it belongs to an item under `#[cfg(test)]`, or `is_test_file`.
    pub(crate) fn test_lines(&self, is_test_file: bool) -> Vec<bool> {
        let mut marks = vec![is_test_file; self.code.lines().count()];
        for start in find_all(&self.code, "#[cfg(test)]").chain(find_all(&self.code, "#[cfg(all(test,")) {
            let end = item_end(&self.code, start);
            let (first, last) = (line_of(&self.code, start), line_of(&self.code, end).min(marks.len()));
            marks[first - 1..last].fill(true);
        }
        marks
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

/// What starts at `at`, and where it ends.
fn token(chars: &[char], at: usize) -> (Kind, usize) {
    let follows = |text: &str| chars[at..].iter().copied().take(text.len()).eq(text.chars());
    if follows("//") {
        let end = chars[at..].iter().position(|&c| c == '\n').map_or(chars.len(), |n| at + n);
        return (Kind::Comment, end);
    }
    if follows("/*") {
        return (Kind::Comment, block_comment_end(chars, at));
    }
    if chars[at] == '"' {
        return (Kind::Literal, quoted_end(chars, at + 1, '"'));
    }
    if chars[at] == '\'' && is_character(chars, at) {
        return (Kind::Literal, quoted_end(chars, at + 1, '\''));
    }
    if chars[at].is_alphanumeric() || chars[at] == '_' {
        let end = at + chars[at..].iter().take_while(|c| c.is_alphanumeric() || **c == '_').count();
        let word: String = chars[at..end].iter().collect();
        return match (word.as_str(), raw_string_end(chars, end)) {
            ("r" | "br" | "cr", Some(end)) => (Kind::Literal, end),
            _ => (Kind::Code, end),
        };
    }
    (Kind::Code, at + 1)
}

/// Comments nest.
fn block_comment_end(chars: &[char], start: usize) -> usize {
    let (mut depth, mut at) = (0, start);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    chars.len()
}

/// The end of a literal whose contents begin at `at`.
fn quoted_end(chars: &[char], mut at: usize, quote: char) -> usize {
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            c if c == quote => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// The end of a raw string whose hashes, if any, begin at `at`; `None` if there is no such string.
fn raw_string_end(chars: &[char], at: usize) -> Option<usize> {
    let n_hashes = chars[at..].iter().take_while(|c| **c == '#').count();
    let start = at + n_hashes;
    (chars.get(start) == Some(&'"')).then_some(())?;
    let is_end = |&quote: &usize| {
        chars[quote] == '"' && chars[quote + 1..].iter().take_while(|c| **c == '#').count() >= n_hashes
    };
    Some((start + 1..chars.len()).find(is_end).map_or(chars.len(), |quote| quote + 1 + n_hashes))
}

/// Whether the apostrophe at `at` starts a character, not a lifetime.
fn is_character(chars: &[char], at: usize) -> bool {
    matches!((chars.get(at + 1), chars.get(at + 2)), (Some('\\'), _) | (Some(_), Some('\'')))
}

/// Where the item that starts at `start` ends: at its semicolon or its closing brace.
fn item_end(code: &str, start: usize) -> usize {
    let mut depth = 0;
    for (offset, c) in code[start..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return start + offset,
            '}' => depth -= 1,
            ';' if depth == 0 => return start + offset,
            _ => {}
        }
    }
    code.len()
}

/// Offsets of `pattern` in `text`.
pub(crate) fn find_all<'a>(text: &'a str, pattern: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.match_indices(pattern).map(|(offset, _)| offset)
}

/// Offsets of `word` in `text` where it is not part of a longer identifier.
pub(crate) fn find_words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    find_all(text, word).filter(move |&offset| {
        let (before, after) =
            (text[..offset].chars().next_back(), text[offset + word.len()..].chars().next());
        !is_part(before) && !is_part(after)
    })
}

/// The line of an offset, from 1.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_strings_and_characters_are_not_code() {
        let text = "a /* b /* c */ d */ e // f\n\"g \\\" h\" i r#\"j \" k\"# b'l' '\\'' m 'n o";
        let Source { code, uncommented } = Source::parse(text);
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&code), ["a", "e", "i", "b", "m", "'n", "o"]);
        assert!(uncommented.contains("\"g \\\" h\" i r#\"j \" k\"#") && !uncommented.contains('f'));
        assert_eq!((code.lines().count(), code.chars().count()), (2, text.chars().count()));
    }

    #[test]
    fn a_string_that_never_ends_reaches_the_end() {
        for text in ["\"a", "r#\"a\"", "'\\", "/* a", "// a", "\"a\\"] {
            assert_eq!(Source::parse(text).code.trim(), "", "{text}");
        }
    }

    #[test]
    fn test_items_are_found_with_all_their_lines() {
        let text = "fn a() {}\n#[cfg(test)]\nmod b {\n    fn c() { '}'; }\n}\nfn d() {}\n#[cfg(test)]\nmod e;\nfn f() {}";
        let marks = Source::parse(text).test_lines(false);
        assert_eq!(marks, [false, true, true, true, true, false, true, true, false]);
        assert!(Source::parse(text).test_lines(true).iter().all(|&mark| mark));
    }

    #[test]
    fn a_word_is_not_part_of_a_longer_one() {
        assert_eq!(find_words("unsafe_code unsafe(unsafe) not_unsafe", "unsafe").count(), 2);
        assert_eq!(line_of("a\nb\nc", 4), 3);
    }
}
