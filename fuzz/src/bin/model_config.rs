//! Any text as a config.json.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::config::text);
