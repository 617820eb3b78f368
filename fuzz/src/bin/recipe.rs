//! Any text as a recipe.
#![cfg_attr(fuzzing, no_main)]

r3_fuzz::target!(r3_fuzz::recipe::text);
