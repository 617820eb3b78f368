//! Any lines as arguments of --set.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::recipe::overrides);
