//! Datasets, tokenizer, chat template and rewards: the only crate that sees text.
//!
//! Everything below works on token ids and numbers; text becomes a [`dataset::Prompt`] here and a completion
//! becomes text again only to be scored. This crate must never know about tensors, engines or rings.
//!
//! Start with [`dataset`] (problems and the order they are visited in), then [`tokenizer`] and [`reward`].

pub mod arithmetic;
pub mod chat;
pub mod conversation;
pub mod dataset;
pub mod error;
pub mod jsonl;
pub mod number;
pub mod retries;
pub mod reward;
pub mod script;
pub mod tokenizer;

mod special;
mod strftime;
