//! The pages about the command line say what it does.

use std::fs;
use std::path::Path;

use crate::directory::Directory;
use crate::results::RUN_KEYS;
use crate::rollout::ROLLOUT_KEYS;

pub(crate) fn page(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name)).unwrap()
}

/// Keys of the tables in the section `title`: what stands in backticks in a first column.
pub(crate) fn table_keys<'a>(page: &'a str, title: &str) -> Vec<&'a str> {
    let section = page.split("\n## ").find(|section| section.starts_with(title)).expect(title);
    section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect()
}

/// The commands that a help text lists.
fn commands(help: &str) -> Vec<&str> {
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    commands
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !name.is_empty() && *name != "help")
        .collect()
}

#[test]
fn every_command_and_option_is_on_the_page() {
    let page = page("cli.md");
    let directory = Directory::empty();
    let help = directory.done(&["--help"]);
    let commands = commands(&help);
    assert!(commands.len() >= 9, "{commands:?}");
    let help_of = |parent: &str| directory.done(&[parent, "--help"]);
    let nested = ["routes", "bench"].map(|parent| (parent, help_of(parent)));
    let nested = nested.iter().flat_map(|(parent, help)| {
        self::commands(help).into_iter().map(move |command| vec![*parent, command])
    });
    for command in commands.into_iter().map(|command| vec![command]).chain(nested) {
        let title = command.join(" ");
        assert!(page.contains(&format!("# `r3 {title}")), "{title}");
        let help = directory.done(&[&command[..], &["--help"]].concat());
        let options = help
            .split_whitespace()
            .filter(|word| word.starts_with("--"))
            .map(|word| word.trim_end_matches(","));
        for option in options.filter(|option| *option != "--help" && *option != "--version") {
            let option = option.trim_end_matches(|c: char| !c.is_alphanumeric());
            assert!(page.contains(option), "{title} {option}");
        }
    }
}

#[test]
fn the_json_page_lists_the_keys_that_are_printed() {
    let page = page("json.md");
    assert_eq!(table_keys(&page, "`r3 run --json`"), RUN_KEYS);
    assert_eq!(table_keys(&page, "`r3 eval --json`"), ["accuracy", "problems", "seconds"]);
    assert_eq!(table_keys(&page, "`r3 sft --json`"), ["steps", "seconds", "loss", "eval_after"]);
    assert_eq!(table_keys(&page, "`r3 rollout --json`"), ROLLOUT_KEYS);
    let line = String::from_utf8(crate::routes::rollout(0, &crate::routes::ROWS, 4)).unwrap();
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    let file = page.split("\n## ").find(|section| section.starts_with("r3's own file")).unwrap();
    for key in [&line, &line["routed_experts"]].iter().flat_map(|object| object.as_object().unwrap().keys()) {
        assert!(file.contains(&format!("`{key}`")), "{key}");
    }
    let score = table_keys(&page, "`r3 score`");
    for key in ["tokens", "logprobs", "routed_experts", "layer_ids", "live_differs"] {
        assert!(score.contains(&key), "{key}");
    }
}
