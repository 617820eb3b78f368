//! What one optimiser step measured, as a line of `metrics.jsonl`.

use std::borrow::Cow;
use std::fmt;

use r3_core::ids::PolicyVersion;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::metric::{Counter, DATASET, DatasetGauge, Gauge, Metric};
use crate::metrics::{METRICS, POLICY_VERSION, STEP};

/// The readings of one step: a value for some of the declared gauges.
///
/// Only declared metrics can be set, which the types see to. A record read back from `metrics.jsonl` also holds
/// the totals of the counters at that step; keys it does not know are left out, so that old files stay readable.
///
/// A run holds one of every step until its end, so a value takes 32 bytes and no more.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRecord {
    step: u64,
    /// By key, each once.
    values: Vec<Value>,
}

/// One value and the metric it is a value of.
#[derive(Clone, Debug)]
pub(crate) struct Value {
    pub(crate) metric: &'static Metric,
    pub(crate) dataset: Option<Box<str>>,
    pub(crate) value: f64,
}

impl Value {
    /// Its key in `metrics.jsonl`.
    fn key(&self) -> Cow<'static, str> {
        self.dataset.as_deref().map_or(Cow::Borrowed(self.metric.key), |dataset| {
            self.metric.key.replace(DATASET, dataset).into()
        })
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.metric.key == other.metric.key && self.dataset == other.dataset && self.value == other.value
    }
}

impl StepRecord {
    /// A record of `step`, after which the engine samples with `version`. Step 0 is before the first update.
    #[must_use]
    pub fn new(step: u64, version: PolicyVersion) -> Self {
        let mut record = Self { step, values: Vec::new() };
        record.set(STEP, step as f64);
        record.set(POLICY_VERSION, version.0 as f64);
        record
    }

    /// The step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Sets a gauge. A value that is not finite is kept, and written as `null`.
    pub fn set(&mut self, gauge: Gauge, value: f64) {
        self.insert(gauge.0, None, value);
    }

    /// Sets the gauge of one dataset.
    pub fn set_dataset(&mut self, gauge: DatasetGauge, dataset: &str, value: f64) {
        self.insert(gauge.0, Some(dataset), value);
    }

    /// The value of a gauge, if the step measured it.
    #[must_use]
    pub fn get(&self, gauge: Gauge) -> Option<f64> {
        self.find(gauge.0.key)
    }

    /// The value of a dataset's gauge, if the step measured it.
    #[must_use]
    pub fn get_dataset(&self, gauge: DatasetGauge, dataset: &str) -> Option<f64> {
        self.find(&gauge.key(dataset))
    }

    /// The total of a counter at this step; only a record read back from a file has one.
    #[must_use]
    pub fn total(&self, counter: Counter) -> Option<u64> {
        self.find(counter.0.key).map(|value| value as u64)
    }

    /// Mean of a gauge over the datasets the step evaluated.
    #[must_use]
    pub fn dataset_mean(&self, gauge: DatasetGauge) -> Option<f64> {
        let of_gauge = |value: &&Value| value.metric.key == gauge.0.key;
        let values: Vec<f64> = self.values.iter().filter(of_gauge).map(|value| value.value).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }

    pub(crate) fn set_total(&mut self, counter: &'static Metric, total: u64) {
        self.insert(counter, None, total as f64);
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &Value> {
        self.values.iter()
    }

    fn find(&self, key: &str) -> Option<f64> {
        let found = self.position(key).ok()?;
        Some(self.values[found].value)
    }

    /// Where the value of `key` is, or else belongs.
    fn position(&self, key: &str) -> Result<usize, usize> {
        self.values.binary_search_by(|held| held.key().as_ref().cmp(key))
    }

    fn insert(&mut self, metric: &'static Metric, dataset: Option<&str>, value: f64) {
        let value = Value { metric, dataset: dataset.map(Into::into), value };
        match self.position(&value.key()) {
            Ok(found) => self.values[found] = value,
            Err(place) => {
                self.values.reserve_exact(1);
                self.values.insert(place, value);
            }
        }
    }
}

/// The declared metric behind a key, and the dataset inside the key.
fn find(key: &str) -> Option<(&'static Metric, Option<&str>)> {
    METRICS.iter().find_map(|metric| match metric.key.split_once(DATASET) {
        None => (metric.key == key).then_some((*metric, None)),
        Some((before, after)) => {
            let dataset = key.strip_prefix(before)?.strip_suffix(after)?;
            Some((*metric, Some(dataset)))
        }
    })
}

impl Serialize for StepRecord {
    /// One flat object: `step` first, then the rest by key. Whole numbers are written without a fraction.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(STEP.0.key, &self.step)?;
        for held in self.values.iter().filter(|held| held.metric.key != STEP.0.key) {
            let (key, value) = (held.key(), held.value);
            if value.fract() == 0.0 && value.abs() < 1e15 {
                map.serialize_entry(&key, &(value as i64))?;
            } else {
                map.serialize_entry(&key, &value)?;
            }
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for StepRecord {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RecordVisitor)
    }
}

struct RecordVisitor;

impl<'de> Visitor<'de> for RecordVisitor {
    type Value = StepRecord;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of metrics with a `step`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StepRecord, A::Error> {
        let mut record = StepRecord { step: 0, values: Vec::new() };
        let mut step = None;
        while let Some(key) = map.next_key::<String>()? {
            let Some((metric, dataset)) = find(&key) else {
                map.next_value::<serde::de::IgnoredAny>()?;
                continue;
            };
            let value = if key == STEP.0.key {
                *step.insert(map.next_value::<u64>()?) as f64
            } else {
                map.next_value::<Option<f64>>()?.unwrap_or(f64::NAN)
            };
            record.insert(metric, dataset, value);
        }
        record.step = step.ok_or_else(|| A::Error::missing_field(STEP.0.key))?;
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{K3_KL, PREEMPTIONS, REWARD_MEAN, VAL_CORE_MEAN};

    fn record() -> StepRecord {
        let mut record = StepRecord::new(12, PolicyVersion(12));
        record.set(K3_KL, 1.25e-5);
        record.set_dataset(VAL_CORE_MEAN, "arithmetic", 0.5);
        record
    }

    #[test]
    fn a_record_is_one_flat_line_with_the_step_first() {
        let line = serde_json::to_string(&record()).unwrap();
        insta::assert_snapshot!(line, @r#"{"step":12,"policy_version":12,"rollout_train_k3_kl":0.0000125,"val-core/arithmetic/mean@1":0.5}"#);
    }

    #[test]
    fn a_line_reads_back_as_the_record_it_was() {
        let line = serde_json::to_string(&record()).unwrap();
        let read: StepRecord = serde_json::from_str(&line).unwrap();
        assert_eq!(read, record());
        assert_eq!(read.get_dataset(VAL_CORE_MEAN, "arithmetic"), Some(0.5));
        assert_eq!(
            (read.get(K3_KL), read.get(REWARD_MEAN), read.total(PREEMPTIONS)),
            (Some(1.25e-5), None, None)
        );
    }

    #[test]
    fn values_lie_by_key_each_once_and_close_together() {
        let mut record = record();
        for accuracy in [0.25, 0.75] {
            record.set_dataset(VAL_CORE_MEAN, "algebra", accuracy);
            record.set(REWARD_MEAN, accuracy);
        }
        let keys: Vec<_> = record.values().map(Value::key).collect();
        assert!(keys.is_sorted() && keys.len() == 6, "{keys:?}");
        assert_eq!(record.get_dataset(VAL_CORE_MEAN, "algebra"), Some(0.75));
        assert_eq!(record.get_dataset(VAL_CORE_MEAN, "arithmetic"), Some(0.5));
        assert_eq!((size_of::<Value>(), record.values.capacity()), (32, 6));
    }

    #[test]
    fn a_value_that_is_not_finite_is_null_and_comes_back_as_nan() {
        let mut record = StepRecord::new(1, PolicyVersion(1));
        record.set(K3_KL, f64::INFINITY);
        let line = serde_json::to_string(&record).unwrap();
        assert!(line.contains("\"rollout_train_k3_kl\":null"), "{line}");
        let read: StepRecord = serde_json::from_str(&line).unwrap();
        assert!(read.get(K3_KL).unwrap().is_nan());
    }

    #[test]
    fn unknown_keys_are_left_out_and_a_missing_step_is_an_error() {
        let read: StepRecord =
            serde_json::from_str(r#"{"step":3,"of_the_future":[1],"reward/mean":1}"#).unwrap();
        assert_eq!((read.step(), read.get(REWARD_MEAN), read.values().count()), (3, Some(1.0), 2));
        assert!(serde_json::from_str::<StepRecord>(r#"{"reward/mean":1}"#).is_err());
        assert!(serde_json::from_str::<StepRecord>(r#"{"step":-1}"#).is_err());
        assert!(serde_json::from_str::<StepRecord>(r#"{"step":1,"reward/mean":"high"}"#).is_err());
    }

    #[test]
    fn every_key_is_found_again() {
        for metric in METRICS {
            let key = metric.key.replace(DATASET, "a/b c");
            let (found, dataset) = find(&key).unwrap();
            assert_eq!((found.key, dataset.is_some()), (metric.key, metric.key.contains(DATASET)));
        }
    }
}
