//! Any bytes as a frame.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::frame::any_bytes);
