//! Any bytes as r3's own file of rollouts.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::wire::r3_lines);
