//! Any arrays in the envelopes of other engines.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::wire::payloads);
