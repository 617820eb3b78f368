//! Any bytes as another engine's routes.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::wire::foreign);
