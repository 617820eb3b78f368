//! The rules, each a pure function over a path, relative to the repository, and the text of its file.

use std::fmt;
use std::path::{Component, Path, PathBuf};

use crate::source::{Source, find_all, find_words, line_of};

/// A place where a rule is broken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    path: String,
    /// From 1; 0 is the file as a whole.
    line: usize,
    what: String,
}

impl Violation {
    pub(crate) fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// Lines of a Rust file at most, tests included.
const MAX_LINES: usize = 600;

pub(crate) fn is_short(path: &str, text: &str) -> Vec<Violation> {
    let n_lines = text.lines().count();
    let too_long = (n_lines > MAX_LINES).then(|| format!("{n_lines} lines, at most {MAX_LINES}"));
    too_long.map(|what| Violation::new(path, 0, what)).into_iter().collect()
}

/// `unsafe` lives in two crates.
pub(crate) fn keeps_unsafe_in_its_place(path: &str, text: &str) -> Vec<Violation> {
    if path.starts_with("crates/ring/") || path.starts_with("kernels/") {
        return Vec::new();
    }
    let code = Source::parse(text).code;
    find_words(&code, "unsafe")
        .map(|at| Violation::new(path, line_of(&code, at), "unsafe outside ring and kernels"))
        .collect()
}

/// Only the kernels know that there is a GPU.
pub(crate) fn keeps_cuda_in_its_place(path: &str, text: &str) -> Vec<Violation> {
    if path.starts_with("kernels/") {
        return Vec::new();
    }
    let text = Source::parse(text).uncommented;
    let is_asked = |line: &str| {
        let line: String = line.split_whitespace().collect();
        line.contains("feature=\"cuda\"")
    };
    let lines = text.lines().zip(1..).filter(|(line, _)| is_asked(line));
    lines.map(|(_, line)| Violation::new(path, line, "the cuda feature outside kernels")).collect()
}

/// What no Rust file may say, with the reason.
const FORBIDDEN: [(&str, &str); 7] = [
    ("#[ignore", "a test that does not run proves nothing"),
    ("should_panic", "catch the panic and look at its message"),
    ("todo!(", "unfinished"),
    ("unimplemented!(", "unfinished"),
    ("dbg!(", "left over from debugging"),
    ("static mut", "a global"),
    ("pub use", "a re-export: name a thing where it is defined"),
];

pub(crate) fn says_nothing_forbidden(path: &str, text: &str) -> Vec<Violation> {
    let code = Source::parse(text).code;
    let found = |(pattern, why): (&'static str, &'static str)| {
        let code = &code;
        find_all(code, pattern)
            .map(move |at| Violation::new(path, line_of(code, at), format!("`{pattern}`: {why}")))
    };
    FORBIDDEN.into_iter().flat_map(found).collect()
}

/// No globs, but for `use super::*` at the top of a test module.
pub(crate) fn imports_by_name(path: &str, text: &str) -> Vec<Violation> {
    let source = Source::parse(text);
    let in_test = source.test_lines(is_test_file(path));
    let lines = source.code.lines().zip(&in_test).zip(1..);
    let globs = lines.filter(|((line, in_test), _)| {
        let line = line.trim();
        line.contains("::*") && !(**in_test && line == "use super::*;")
    });
    globs.map(|(_, line)| Violation::new(path, line, "a glob import")).collect()
}

/// The recipe is the whole experiment; only the terminal's `NO_COLOR` comes from elsewhere.
pub(crate) fn reads_no_environment(path: &str, text: &str) -> Vec<Violation> {
    let source = Source::parse(text);
    let in_test = source.test_lines(is_test_file(path));
    let code = &source.code;
    let reads = ["env::var(", "env::var_os(", "env::vars("].into_iter().flat_map(|read| find_all(code, read));
    let lines: Vec<&str> = source.uncommented.lines().collect();
    let is_wrong = |line: &usize| !in_test[line - 1] && !lines[line - 1].contains("(\"NO_COLOR\")");
    let outside = reads.map(|at| line_of(code, at)).filter(is_wrong);
    outside.map(|line| Violation::new(path, line, "reads the environment")).collect()
}

/// A test that sleeps is slow on a good day and wrong on a bad one.
pub(crate) fn never_sleeps_in_a_test(path: &str, text: &str) -> Vec<Violation> {
    let source = Source::parse(text);
    let in_test = source.test_lines(is_test_file(path));
    let sleeps = find_words(&source.code, "sleep").map(|at| line_of(&source.code, at));
    let in_tests = sleeps.filter(|line| in_test[line - 1]);
    in_tests.map(|line| Violation::new(path, line, "a test that sleeps")).collect()
}

fn is_test_file(path: &str) -> bool {
    let mut folders = path.split('/').rev().skip(1);
    folders.any(|folder| folder == "tests" || folder == "benches") || path.ends_with("/tests.rs")
}

/// Directories of somebody's machine, cut in two so that this file may name them.
const MACHINE_PATHS: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/tm", "p/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];

/// Of any text file: it names no path of one machine.
pub(crate) fn names_no_machine(path: &str, text: &str) -> Vec<Violation> {
    let starts_path =
        |&at: &usize| !text[..at].ends_with(|c: char| c.is_alphanumeric() || "_.-}".contains(c));
    let found = |machine: &'static str| {
        let places = find_all(text, machine).filter(starts_path);
        places.map(move |at| Violation::new(path, line_of(text, at), format!("the path {machine}")))
    };
    MACHINE_PATHS.into_iter().flat_map(found).collect()
}

/// Of any text file: what is left to do has an issue, `(#12)`.
pub(crate) fn numbers_what_is_left_to_do(path: &str, text: &str) -> Vec<Violation> {
    let mark = concat!("TO", "DO");
    let has_issue = |at: usize| {
        let issue = text[at + mark.len()..].strip_prefix("(#");
        issue.and_then(|issue| issue.split_once(')')).is_some_and(|(number, _)| number.parse::<u32>().is_ok())
    };
    let unnumbered = find_words(text, mark).filter(|&at| !has_issue(at));
    unnumbered
        .map(|at| Violation::new(path, line_of(text, at), format!("a {mark} without its issue")))
        .collect()
}

/// A crate's library starts with what it is for.
pub(crate) fn says_what_it_is_for(path: &str, text: &str) -> Vec<Violation> {
    let is_library = path.ends_with("/src/lib.rs") && !text.starts_with("//!");
    is_library.then(|| Violation::new(path, 1, "no `//!` at the top")).into_iter().collect()
}

/// Of a `Cargo.toml`: the workspace's lints hold.
pub(crate) fn takes_the_lints(path: &str, text: &str) -> Vec<Violation> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let takes = lines.windows(2).any(|pair| pair == ["[lints]", "workspace = true"]);
    (!takes).then(|| Violation::new(path, 0, "no `[lints] workspace = true`")).into_iter().collect()
}

/// Names in the dependency tables of a `Cargo.toml`, with their lines; those of tests are not among them.
pub(crate) fn dependencies(manifest: &str) -> Vec<(usize, String)> {
    let (mut found, mut in_table) = (Vec::new(), false);
    for (line, number) in manifest.lines().zip(1..) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(table) = line.strip_prefix('[') {
            let table = table.trim_matches(['[', ']']);
            in_table = table.ends_with("dependencies") && !table.ends_with("dev-dependencies");
            let named = table.rsplit_once("dependencies.");
            let named =
                named.filter(|(parent, _)| !parent.ends_with("dev-") && !parent.starts_with("workspace"));
            found.extend(named.map(|(_, name)| (number, name.to_owned())));
        } else if let (true, Some((name, _))) = (in_table, line.split_once(['.', '=', ' '])) {
            found.push((number, name.trim_matches('"').to_owned()));
        }
    }
    found
}

/// Of a `Cargo.toml`: it depends on no other crate of ours than `allowed`.
pub(crate) fn points_down(path: &str, manifest: &str, allowed: &[&str]) -> Vec<Violation> {
    let ours = dependencies(manifest).into_iter().filter(|(_, name)| name == "r3" || name.starts_with("r3-"));
    let wrong = ours.filter(|(_, name)| !allowed.contains(&name.as_str()));
    wrong.map(|(line, name)| Violation::new(path, line, format!("may not depend on {name}"))).collect()
}

/// Of a Markdown file: links that stay in the repository lead to something. `exists` answers for a path.
pub(crate) fn links_lead_somewhere(path: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (line, number) in prose(text) {
        let marks = ["](", "src=\"", "srcset=\"", "href=\""];
        for (mark, close) in marks.into_iter().zip([')', '"', '"', '"']) {
            for at in find_all(&line, mark) {
                let target = line[at + mark.len()..].split(close).next().unwrap_or_default();
                let file = target.split('#').next().unwrap_or_default();
                if file.is_empty() || file.contains("://") || file.starts_with("mailto:") {
                    continue;
                }
                if !resolve(path, file).is_some_and(|file| exists(&file)) {
                    violations.push(Violation::new(
                        path,
                        number,
                        format!("a link to {file}, which is not there"),
                    ));
                }
            }
        }
    }
    violations
}

/// Of a Markdown file: identifiers and source files in back-ticks exist. An identifier counts from two underscores on.
pub(crate) fn names_what_exists(path: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<Violation> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let mut violations = Vec::new();
    let lines = unfenced(text)
        .flat_map(|(line, number)| line.split('`').skip(1).step_by(2).map(move |c| (c, number)));
    for (code, number) in lines {
        let is_identifier = code.matches('_').count() >= 2 && code.chars().all(is_name);
        let is_file = code.contains('/') && code.ends_with(".rs") && !code.contains([' ', '*', '<']);
        if (is_identifier || is_file) && !exists(code) {
            violations.push(Violation::new(path, number, format!("`{code}` does not exist")));
        }
    }
    violations
}

/// Lines outside fenced blocks, with their numbers.
fn unfenced(text: &str) -> impl Iterator<Item = (&str, usize)> {
    let mut in_fence = false;
    text.lines().zip(1..).filter(move |(line, _)| {
        let is_fence = line.trim_start().starts_with("```");
        in_fence ^= is_fence;
        !in_fence && !is_fence
    })
}

/// [`unfenced`] lines without what is in back-ticks.
fn prose(text: &str) -> impl Iterator<Item = (String, usize)> {
    unfenced(text).map(|(line, number)| (line.split('`').step_by(2).collect(), number))
}

/// `target` as seen from the file `from`, relative to the repository; `None` if it leaves it.
fn resolve(from: &str, target: &str) -> Option<String> {
    let mut resolved = PathBuf::from(from).parent().map(Path::to_path_buf).unwrap_or_default();
    for component in Path::new(target).components() {
        match component {
            Component::Normal(name) => resolved.push(name),
            Component::ParentDir => resolved.pop().then_some(())?,
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(resolved.to_string_lossy().into_owned())
}

/// Of the README: two commands to paste, one in each `sh` block, both with cargo alone.
pub(crate) fn has_two_commands(path: &str, text: &str) -> Vec<Violation> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut violations = Vec::new();
    let starts: Vec<usize> = (0..lines.len()).filter(|&line| lines[line] == "```sh").collect();
    if starts.len() != 2 {
        violations.push(Violation::new(path, 0, format!("{} blocks of commands, not 2", starts.len())));
    }
    for start in starts {
        let block: Vec<_> = lines[start + 1..].iter().take_while(|line| **line != "```").collect();
        if block.len() != 1 || !block[0].starts_with("cargo ") {
            violations.push(Violation::new(path, start + 1, "not one command of cargo"));
        }
    }
    violations
}

/// Every rule lets what is right pass and catches what is planted.
#[cfg(test)]
mod tests {
    use super::*;

    /// The lines at which a rule is broken.
    fn lines(violations: &[Violation]) -> Vec<usize> {
        violations.iter().map(|violation| violation.line).collect()
    }

    #[test]
    fn a_file_one_line_too_long_is_caught() {
        assert_eq!(is_short("a.rs", &"\n".repeat(600)), []);
        assert_eq!(is_short("a.rs", &"\n".repeat(601)).len(), 1);
    }

    #[test]
    fn unsafe_code_elsewhere_is_caught_and_the_word_is_not() {
        let text = "// unsafe\n#![expect(unsafe_code)]\nlet a = \"unsafe\";\nunsafe { b() }";
        assert_eq!(lines(&keeps_unsafe_in_its_place("crates/model/src/a.rs", text)), [4]);
        assert_eq!(lines(&keeps_unsafe_in_its_place("crates/ringing/src/a.rs", text)), [4]);
        assert_eq!(keeps_unsafe_in_its_place("crates/ring/src/a.rs", text), []);
        assert_eq!(keeps_unsafe_in_its_place("kernels/src/a.rs", text), []);
    }

    #[test]
    fn a_switch_on_cuda_elsewhere_is_caught() {
        let text =
            "// cfg(feature = \"cuda\")\n#[cfg(feature = \"cuda\")]\nfn a() { cfg!(any(feature=\"cuda\")) }";
        assert_eq!(lines(&keeps_cuda_in_its_place("crates/model/src/a.rs", text)), [2, 3]);
        assert_eq!(keeps_cuda_in_its_place("kernels/src/a.rs", text), []);
    }

    #[test]
    fn each_forbidden_phrase_is_caught_in_code_alone() {
        for (pattern, _) in FORBIDDEN {
            let text = format!("// {pattern}\nlet a = \"{pattern}\";\n{pattern}");
            assert_eq!(lines(&says_nothing_forbidden("a.rs", &text)), [3], "{pattern}");
        }
        assert_eq!(says_nothing_forbidden("a.rs", "pub(crate) use a;\nstatic A: u8 = 0;"), []);
    }

    #[test]
    fn a_glob_is_caught_but_for_super_in_tests() {
        let text = "use a::*;\nuse super::*;\n#[cfg(test)]\nmod tests {\n    use super::*;\n    use b::{c, d::*};\n}";
        assert_eq!(lines(&imports_by_name("crates/a/src/a.rs", text)), [1, 2, 6]);
        assert_eq!(lines(&imports_by_name("crates/a/tests/a.rs", text)), [1, 6]);
    }

    #[test]
    fn reading_the_environment_outside_tests_is_caught() {
        let text = "std::env::var(\"A\"); // (\"NO_COLOR\")\nenv!(\"B\"); env::var_os(\"NO_COLOR\");\n#[cfg(test)]\nfn a() { env::var(\"C\"); }";
        assert_eq!(lines(&reads_no_environment("crates/a/src/a.rs", text)), [1]);
        assert_eq!(reads_no_environment("tests/a.rs", text), []);
    }

    #[test]
    fn a_sleeping_test_is_caught() {
        let text = "thread::sleep(a);\n#[cfg(test)]\nmod tests {\n    fn b() { sleep(a); } // sleep\n}";
        assert_eq!(lines(&never_sleeps_in_a_test("crates/a/src/a.rs", text)), [4]);
        assert_eq!(lines(&never_sleeps_in_a_test("crates/a/src/b/tests.rs", text)), [1, 4]);
    }

    #[test]
    fn a_path_of_one_machine_is_caught() {
        for machine in MACHINE_PATHS {
            assert_eq!(
                lines(&names_no_machine("a.md", &format!("a\n\"{machine}b\" c{machine}"))),
                [2],
                "{machine}"
            );
        }
    }

    #[test]
    fn what_is_left_without_an_issue_is_caught() {
        let mark = concat!("TO", "DO");
        let text = format!("{mark}(#12): a\n{mark}: b\n{mark}(#b): c\nMAS{mark}N");
        assert_eq!(lines(&numbers_what_is_left_to_do("a.rs", &text)), [2, 3]);
    }

    #[test]
    fn a_library_that_does_not_introduce_itself_is_caught() {
        assert_eq!(says_what_it_is_for("crates/a/src/lib.rs", "//! A.\n"), []);
        assert_eq!(says_what_it_is_for("crates/a/src/lib.rs", "// A.\n").len(), 1);
        assert_eq!(says_what_it_is_for("crates/a/src/main.rs", "fn main() {}"), []);
    }

    #[test]
    fn a_crate_without_the_lints_is_caught() {
        assert_eq!(takes_the_lints("Cargo.toml", "[package]\n\n[lints]\nworkspace = true\n"), []);
        assert_eq!(takes_the_lints("Cargo.toml", "[lints.rust]\nunsafe_code = \"allow\"\n").len(), 1);
    }

    #[test]
    fn an_arrow_that_points_up_is_caught_in_every_table_but_that_of_tests() {
        let manifest = "[dependencies]\nr3-core.workspace = true\nr3-train = { path = \"a\" } # r3-cli\n[dependencies.r3-ring]\n\
                        workspace = true\n[target.\"cfg(b)\".dependencies]\nr3-tasks.workspace = true\n[build-dependencies]\n\
                        r3 = \"1\"\n[dev-dependencies]\nr3-recipe.workspace = true\n[dev-dependencies.r3-model]\n[package]\n\
                        r3-engine = 1\n";
        let violations = points_down("crates/a/Cargo.toml", manifest, &["r3-core"]);
        assert_eq!(lines(&violations), [3, 4, 7, 9]);
        assert_eq!(violations[0].to_string(), "crates/a/Cargo.toml:3: may not depend on r3-train");
    }

    #[test]
    fn a_link_to_nothing_is_caught() {
        let exists = |path: &str| ["docs/a.md", "b.svg"].contains(&path);
        let text = "[a](a.md#part) [b](../b.svg) [c](https://c.org) [d](#d) `[e](e.md)`\n```\n[f](f.md)\n```\n\
                    [g](g.md)\n[h](../../b.svg)\n<img src=\"../b.svg\"><img src=\"i.png\">";
        assert_eq!(lines(&links_lead_somewhere("docs/x.md", text, exists)), [5, 6, 7]);
    }

    #[test]
    fn a_name_of_nothing_is_caught() {
        let exists = |name: &str| ["a_test_of_mine", "crates/a.rs"].contains(&name);
        let text = "`a_test_of_mine` `crates/a.rs` `other_name` `Type::a_b_c`\n```\n`not_there_now`\n```\n`not_there_now`\n\
                    `crates/b.rs`";
        assert_eq!(lines(&names_what_exists("a.md", text, exists)), [5, 6]);
    }

    #[test]
    fn a_third_command_is_caught() {
        let block = "```sh\ncargo a\n```\n";
        assert_eq!(has_two_commands("README.md", &format!("{block}\n{block}```yaml\nb: c\n```\n")), []);
        assert_eq!(has_two_commands("README.md", block).len(), 1);
        assert_eq!(has_two_commands("README.md", &block.repeat(3)).len(), 1);
        assert_eq!(has_two_commands("README.md", &format!("{block}```sh\ncargo a\ncargo b\n```\n")).len(), 1);
        assert_eq!(has_two_commands("README.md", &format!("{block}```sh\npip install a\n```\n")).len(), 1);
    }
}
