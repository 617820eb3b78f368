//! Frames with a checksum that fits.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::frame::resealed);
