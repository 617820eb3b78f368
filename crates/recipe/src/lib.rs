//! YAML recipes as checked structs.
