//! A good recipe with any values.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::recipe::values);
