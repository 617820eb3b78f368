//! What a person reads whose recipe is no YAML, no text or no file.

mod common;

use std::fs;
use std::path::Path;

use common::{GOOD, parse, report, with};
use insta::assert_snapshot;
use r3_recipe::error::RecipeError;
use r3_recipe::recipe::Recipe;

fn file(bytes: &[u8]) -> String {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("x.yaml");
    fs::write(&path, bytes).expect("a written recipe");
    let error = Recipe::load(&path, &[]).expect_err("the recipe is wrong");
    report(&error).replace(&*path.to_string_lossy(), "x.yaml")
}

#[test]
fn a_key_written_twice_is_refused() {
    assert_snapshot!(with("mini_steps: 2", "mini_steps: 2\n  lr: 1.0"), @"
    error: the key `lr` is written twice
     --> x.yaml:8:3
      |
    8 |   lr: 1.0
      |   ^^

    hint: keep one `lr`
    ");
}

#[test]
fn an_open_bracket_is_pointed_at() {
    assert_snapshot!(with("digits: 2 } }", "digits: 2"), @"
    error: not YAML: while parsing a flow mapping, did not find expected ',' or '}'
     --> x.yaml:3:8
      |
    3 | rollout: { groups: 16, group_size: 8, max_new_tokens: 16 }
      |        ^

    hint: check colons, quotes, brackets and indentation at and before this place
    ");
}

#[test]
fn a_tab_is_pointed_at() {
    assert_snapshot!(with("  mini_steps", "\tmini_steps"), @"
    error: not YAML: a tab in the indentation
     --> x.yaml:7:1
      |
    7 |  mini_steps: 2
      | ^

    hint: YAML indents with spaces
    ");
}

#[test]
fn a_second_document_is_refused() {
    assert_snapshot!(parse(&format!("{GOOD}---\nmodel: x\n")), @"
    error: a second YAML document begins here
      --> x.yaml:10:1
       |
    10 | model: x
       | ^

    hint: a recipe is one document: remove the `---` and what follows
    ");
}

#[test]
fn an_unknown_anchor_is_refused() {
    assert_snapshot!(with("3.0e-4", "*lr"), @"
    error: not YAML: alias references unknown anchor
     --> x.yaml:6:7
      |
    6 |   lr: *lr
      |       ^

    hint: check colons, quotes, brackets and indentation at and before this place
    ");
}

#[test]
fn an_alias_bomb_is_defused() {
    let mut bomb = String::from("a: &a [x, x, x, x, x, x, x, x, x, x]\n");
    for (last, next) in
        ["a", "b", "c", "d", "e", "f", "g", "h"].iter().zip(["b", "c", "d", "e", "f", "g", "h", "i"])
    {
        let aliases = vec![format!("*{last}"); 10].join(", ");
        bomb += &format!("{next}: &{next} [{aliases}]\n");
    }
    assert_snapshot!(parse(&bomb), @"
    error: too many values, levels or aliases for a recipe
     --> x.yaml:4:36
      |
    4 | d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]
      |                                    ^^

    hint: a recipe is a page of YAML; write values out instead of nesting aliases
    ");
}

#[test]
fn deep_nesting_is_refused() {
    assert_snapshot!(parse(&format!("model: {}", "[".repeat(100_000))), @"
    error: too many values, levels or aliases for a recipe
     --> x.yaml:1:263
      |
    1 | …[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[
      |                                                             ^

    hint: a recipe is a page of YAML; write values out instead of nesting aliases
    ");
}

#[test]
fn a_huge_file_is_refused() {
    assert_snapshot!(file(&vec![b'#'; 10_000_000]), @"
    error: the recipe x.yaml is longer than 262144 bytes

    hint: a recipe is a page of YAML; is this the right file?
    ");
}

#[test]
fn a_huge_file_that_is_cut_inside_a_character_is_still_too_large() {
    assert!(file("é".repeat(1 << 18).as_bytes()).contains("is longer than"));
}

#[test]
fn a_file_of_nothing_is_refused() {
    assert_snapshot!(file(b""), @"
    error: the recipe x.yaml is empty

    hint: start from a copy of `recipes/tiny.yaml`; `docs/recipe.md` lists every key
    ");
}

#[test]
fn a_file_of_comments_is_refused() {
    assert_snapshot!(file(b"# a recipe\n"), @"
    error: the recipe x.yaml is empty

    hint: start from a copy of `recipes/tiny.yaml`; `docs/recipe.md` lists every key
    ");
}

#[test]
fn a_file_in_another_encoding_is_refused() {
    assert_snapshot!(file(b"model: { path: caf\xe9 }\n"), @"
    error: the recipe x.yaml is not UTF-8: line 1 holds byte 0xe9

    hint: save the file as UTF-8; `iconv -t UTF-8` converts it
    ");
}

#[test]
fn a_missing_file_is_named_with_its_cause() {
    let error = Recipe::load(Path::new("no/such/recipe.yaml"), &[]).expect_err("no file");
    assert_snapshot!(report(&error), @"
    error: cannot read the recipe no/such/recipe.yaml

    hint: give the path of a recipe, such as `recipes/tiny.yaml`
    ");
    let cause = std::error::Error::source(&error).expect("a cause");
    assert_snapshot!(cause.to_string(), @"No such file or directory (os error 2)");
}

#[test]
fn a_directory_is_no_recipe() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let error = Recipe::load(directory.path(), &[]).expect_err("a directory");
    assert!(matches!(error, RecipeError::Read { .. }));
}

#[test]
fn windows_line_ends_do_not_move_columns() {
    let text = GOOD.replace("lr: 3.0e-4", "lr: fast").replace('\n', "\r\n");
    assert_snapshot!(parse(&text), @"
    error: `train.lr` must be a number, not the text `fast`
     --> x.yaml:6:7
      |
    6 |   lr: fast
      |       ^^^^

    hint: `train.lr`: Learning rate, reached after `warmup_steps`.
    ");
}

#[test]
fn a_byte_order_mark_does_not_move_columns() {
    let text = format!("\u{feff}{}", GOOD.replace("path", "paths"));
    assert_snapshot!(parse(&text), @"
    error: unknown key `model.paths`
     --> x.yaml:1:10
      |
    1 | model: { paths: assets/tiny-moe }
      |          ^^^^^

    hint: did you mean `path`? `model` takes `path`, `tokenizer`
    ");
}

#[test]
fn control_characters_are_spelled_out_wherever_they_stand() {
    let key = "a\u{2}\u{7f}\u{9b}b";
    let arguments = |arguments: &[String]| {
        let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/tiny.yaml");
        report(&Recipe::load(&recipe, arguments).expect_err("the recipe is wrong"))
    };
    for text in [
        arguments(&[format!("{key}=1"), format!("{key}.c=1")]),
        arguments(&[format!(
            "train={{\"{}\": 1}}",
            key.escape_unicode().to_string().replace(['{', '}'], "")
        )]),
        arguments(&["algorithm={\"\\u0002\": {}, \"\\x7f\": {}}".to_owned()]),
        arguments(&["train.lr=\"\\u0002\"".to_owned()]),
        arguments(&["train.lr=*\u{7f}".to_owned()]),
        parse("a: \u{2}"),
        parse("&\u{7f}a : *\u{7f}b"),
        parse("%\u{9b}2J\n---\na: 1"),
        parse("!\u{9b}2J\u{7f} a"),
    ] {
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    }
}
