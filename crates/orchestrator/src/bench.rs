//! `r3 bench`: how fast each part is, by itself and as a whole, beside what the machine can do.
//!
//! Every measurement runs what a run runs, checks its own result where it can, warms up once, and is told as a median
//! with the lowest and the highest round.

use serde::Serialize;
use serde_json::{Map, Value};

pub mod capture;
mod cost;
pub mod engine;
pub mod kernels;
pub mod machine;
pub mod ring;
pub mod routes;
mod serving;
pub mod step;
pub mod subject;
pub mod train;

/// Repeated measurements of one thing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    /// The lowest.
    pub min: f64,
    /// The highest.
    pub max: f64,
}

impl Spread {
    /// Of at least one measurement.
    ///
    /// # Panics
    /// Without one.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let n = values.len();
        assert!(n > 0, "a spread of nothing");
        Self { median: f64::midpoint(values[(n - 1) / 2], values[n / 2]), min: values[0], max: values[n - 1] }
    }

    /// The same in another unit.
    fn scaled(&self, factor: f64) -> Self {
        Self { median: self.median * factor, min: self.min * factor, max: self.max * factor }
    }

    /// What stands over rows of a table.
    fn heading() -> String {
        format!("{:<28}{:>12}{:>12}{:>12}\n", "", "median", "min", "max")
    }

    /// Its row of a table.
    fn row(&self, name: &str) -> String {
        format!("{name:<28}{:>12.2}{:>12.2}{:>12.2}\n", self.median, self.min, self.max)
    }
}

/// `measured` as JSON in which a spread is three keys: `key` for the median, `key_min` and `key_max`.
///
/// # Panics
/// If it is not a struct of plain values.
#[must_use]
pub fn flat(measured: &impl Serialize) -> Value {
    let value = serde_json::to_value(measured).expect("plain values always serialise");
    let Value::Object(fields) = value else { panic!("a measurement is a struct") };
    Value::Object(fields.into_iter().flat_map(|(key, value)| flat_field(key, value)).collect::<Map<_, _>>())
}

fn flat_field(key: String, value: Value) -> Vec<(String, Value)> {
    match value {
        Value::Object(mut fields) if fields.keys().eq(["median", "min", "max"]) => {
            let mut taken = |name: &str| fields.remove(name).expect("the key was seen");
            let (median, min, max) = (taken("median"), taken("min"), taken("max"));
            let (lowest, highest) = (format!("{key}_min"), format!("{key}_max"));
            vec![(key, median), (lowest, min), (highest, max)]
        }
        Value::Array(items) => {
            let items = items.into_iter().map(|item| if item.is_object() { flat(&item) } else { item });
            vec![(key, Value::Array(items.collect()))]
        }
        value => vec![(key, value)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle_of_odd_and_even_counts() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0, 3.0, 2.0]).median, 2.5);
        assert_eq!(Spread::of(vec![7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
    }
    #[test]
    fn a_spread_is_three_keys_beside_each_other_at_every_depth() {
        let spread = Spread { median: 2.0, min: 1.0, max: 3.0 };
        let value = flat(&serde_json::json!({ "a": spread, "n": 4, "cases": [{ "b": spread }, 5] }));
        let expected =
            r#"{"a":2.0,"a_min":1.0,"a_max":3.0,"n":4,"cases":[{"b":2.0,"b_min":1.0,"b_max":3.0},5]}"#;
        assert_eq!(value.to_string(), expected);
    }
}
