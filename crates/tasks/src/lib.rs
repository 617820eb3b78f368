//! Datasets, tokenizer, chat template and rewards.
