//! Frames one after another, each with a checksum that fits.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::frame::file);
