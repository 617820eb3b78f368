//! Any bytes as route rows.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::routes::rows);
