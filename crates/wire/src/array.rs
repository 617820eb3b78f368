//! Integer arrays `[rows, layers, K]`, as all foreign layouts carry routes, over all layers or the MoE layers only.

use std::fmt;

use r3_core::routes::{RouteRows, RouteView, write_ids};

use crate::check::Sample;
use crate::error::{Fault, WireError};
use crate::model::ModelShape;

/// Type of one number in an array; little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Element {
    Int8,
    Uint8,
    Int16,
    Uint16,
    Int32,
    Uint32,
    Int64,
}

impl Element {
    /// Every element type.
    pub const ALL: [Self; 7] =
        [Self::Int8, Self::Uint8, Self::Int16, Self::Uint16, Self::Int32, Self::Uint32, Self::Int64];

    /// Bytes of one number.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 => 1,
            Self::Int16 | Self::Uint16 => 2,
            Self::Int32 | Self::Uint32 => 4,
            Self::Int64 => 8,
        }
    }

    /// The name that NumPy and PyTorch give it, as in `int16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Uint8 => "uint8",
            Self::Int16 => "int16",
            Self::Uint16 => "uint16",
            Self::Int32 => "int32",
            Self::Uint32 => "uint32",
            Self::Int64 => "int64",
        }
    }

    /// The type of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.name() == name)
    }

    /// Numbers it can say, as a range of both ends.
    fn range(self) -> (i64, i64) {
        match self {
            Self::Int8 => (i8::MIN.into(), i8::MAX.into()),
            Self::Uint8 => (0, u8::MAX.into()),
            Self::Int16 => (i16::MIN.into(), i16::MAX.into()),
            Self::Uint16 => (0, u16::MAX.into()),
            Self::Int32 => (i32::MIN.into(), i32::MAX.into()),
            Self::Uint32 => (0, u32::MAX.into()),
            Self::Int64 => (i64::MIN, i64::MAX),
        }
    }

    /// Whether it can say `value`.
    #[must_use]
    pub fn holds(self, value: i64) -> bool {
        let (low, high) = self.range();
        (low..=high).contains(&value)
    }

    /// Number `at` of `bytes`.
    fn read(self, bytes: &[u8], at: usize) -> i64 {
        match self {
            Self::Int8 => i64::from(bytes[at].cast_signed()),
            Self::Uint8 => i64::from(bytes[at]),
            Self::Int16 => i64::from(i16::from_le_bytes(bytes.as_chunks().0[at])),
            Self::Uint16 => i64::from(u16::from_le_bytes(bytes.as_chunks().0[at])),
            Self::Int32 => i64::from(i32::from_le_bytes(bytes.as_chunks().0[at])),
            Self::Uint32 => i64::from(u32::from_le_bytes(bytes.as_chunks().0[at])),
            Self::Int64 => i64::from_le_bytes(bytes.as_chunks().0[at]),
        }
    }

    /// Appends `value`, of which [`Self::holds`] is true.
    fn write(self, value: i64, out: &mut Vec<u8>) {
        // Two's complement: the low bytes of the wide number are the narrow number.
        out.extend_from_slice(&value.to_le_bytes()[..self.bytes()]);
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which layers an array may have rows of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerAxis {
    /// All decoder layers, dense ones included.
    All,
    /// All of them, or the MoE layers only; whoever reads the layout tells them apart by their number.
    AllOrMoe,
}

/// A borrowed array, little-endian, rows outermost.
pub(crate) struct Array<'a> {
    pub(crate) shape: [usize; 3],
    pub(crate) element: Element,
    pub(crate) bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// # Errors
    /// If `bytes` is not exactly what shape and element need.
    pub(crate) fn new(
        shape: [usize; 3],
        element: Element,
        bytes: &'a [u8],
        sample: &Sample,
    ) -> Result<Self, WireError> {
        let sizes = shape.map(|size| size as u128);
        // Three 64-bit sizes may overflow even this; what saturates equals no length in memory.
        let n_numbers = sizes.iter().fold(1u128, |product, size| product.saturating_mul(*size));
        let needed_bytes = n_numbers.saturating_mul(element.bytes() as u128);
        if needed_bytes != bytes.len() as u128 {
            return Err(sample.refuse(Fault::Length { bytes: bytes.len(), shape, element, needed_bytes }));
        }
        Ok(Self { shape, element, bytes })
    }

    /// The rows of the MoE layers, once the array keeps the contract of `sample` and `model`.
    ///
    /// Dense layers hold 0 (vLLM) or -1 (ATOM). A MoE layer's -1 is a row that was never written.
    pub(crate) fn rows(
        &self,
        model: &ModelShape,
        axis: LayerAxis,
        sample: &Sample,
    ) -> Result<RouteRows, WireError> {
        let [rows, found_layers, top_k] = self.shape;
        let dims = model.dims();
        if top_k != dims.top_k {
            return Err(sample.refuse(Fault::TopK { found: top_k, expected: dims.top_k }));
        }
        let is_moe = match axis {
            _ if found_layers == model.n_layers() => model.is_moe(),
            LayerAxis::AllOrMoe if found_layers == dims.n_layers => vec![true; dims.n_layers],
            LayerAxis::All | LayerAxis::AllOrMoe => {
                let (n_layers, moe_layers) = (model.n_layers(), dims.n_layers);
                return Err(sample.refuse(Fault::Layers { found: found_layers, n_layers, moe_layers }));
            }
        };
        sample.check_rows(rows)?;
        let mut packed = RouteRows::with_capacity(dims, rows);
        let (mut ids, mut bytes) = (Vec::with_capacity(dims.row_ids()), vec![0; dims.row_bytes()]);
        for row in 0..rows {
            ids.clear();
            self.read_row(row, (model, &is_moe), sample, &mut ids)?;
            write_ids(&ids, dims.width(), &mut bytes);
            packed.append(&bytes);
        }
        sample.check(packed.view(), model.layer_ids())?;
        Ok(packed)
    }

    fn read_row(
        &self,
        row: usize,
        (model, is_moe): (&ModelShape, &[bool]),
        sample: &Sample,
        ids: &mut Vec<u16>,
    ) -> Result<(), WireError> {
        let [_, layers, top_k] = self.shape;
        let n_experts = model.dims().n_experts;
        let position = sample.start.saturating_add(row);
        let mut moe_ids = model.layer_ids().iter();
        for (at, &is_moe) in is_moe.iter().enumerate() {
            let choice = (row * layers + at) * top_k;
            let numbers = (choice..choice + top_k).map(|number| self.element.read(self.bytes, number));
            if !is_moe {
                if let Some(expert) = numbers.clone().find(|number| !matches!(number, -1 | 0)) {
                    let turn = sample.turn_of(position);
                    return Err(sample.refuse(Fault::Dense { turn, layer: at, position, expert }));
                }
                continue;
            }
            let layer = *moe_ids.next().expect("an id for each MoE layer");
            for expert in numbers {
                match u16::try_from(expert) {
                    Ok(id) if usize::from(id) < n_experts => ids.push(id),
                    _ => {
                        let turn = sample.turn_of(position);
                        return Err(sample.refuse(match expert {
                            -1 => Fault::Unwritten { turn, layer, position },
                            _ => Fault::OutOfRange { turn, layer, position, expert, n_experts },
                        }));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Bytes of `routes` over all layers of `model`, dense ones filled with `dense`.
///
/// # Errors
/// If an id does not fit `element`, or `routes` are not of `model`.
pub(crate) fn write_all_layers(
    routes: RouteView<'_>,
    model: &ModelShape,
    (element, dense): (Element, i64),
    sample: &Sample,
) -> Result<Vec<u8>, WireError> {
    let dims = model.dims();
    check_dims(routes, model, sample)?;
    let is_moe = model.is_moe();
    if !element.holds(dense) && is_moe.contains(&false) {
        return Err(sample.refuse(Fault::Unsigned { element }));
    }
    let mut out = Vec::with_capacity(routes.rows() * is_moe.len() * dims.top_k * element.bytes());
    for row in 0..routes.rows() {
        let mut moe = 0;
        for &is_moe in &is_moe {
            for k in 0..dims.top_k {
                if !is_moe {
                    element.write(dense, &mut out);
                    continue;
                }
                let expert = routes.expert(row, moe, k);
                if !element.holds(expert.into()) {
                    let position = sample.start.saturating_add(row);
                    let (turn, layer) = (sample.turn_of(position), model.layer_ids()[moe]);
                    return Err(sample.refuse(Fault::TooWide { turn, layer, position, expert, element }));
                }
                element.write(expert.into(), &mut out);
            }
            moe += usize::from(is_moe);
        }
    }
    Ok(out)
}

/// Refuses rows of another shape than the model's.
pub(crate) fn check_dims(
    routes: RouteView<'_>,
    model: &ModelShape,
    sample: &Sample,
) -> Result<(), WireError> {
    let (found, expected) = (routes.dims(), model.dims());
    let fault = if found.n_layers != expected.n_layers {
        let (n_layers, moe_layers) = (model.n_layers(), expected.n_layers);
        Fault::Layers { found: found.n_layers, n_layers, moe_layers }
    } else if found.top_k != expected.top_k {
        Fault::TopK { found: found.top_k, expected: expected.top_k }
    } else if found.n_experts != expected.n_experts {
        Fault::Experts { found: found.n_experts, expected: expected.n_experts }
    } else {
        return Ok(());
    };
    Err(sample.refuse(fault))
}

/// Appends `[0, 1, .., K - 1]` for each of `n_layers` layers: what NeMo-RL puts where the last token has no row.
pub(crate) fn write_padding_row(n_layers: usize, top_k: usize, element: Element, out: &mut Vec<u8>) {
    for _ in 0..n_layers {
        for k in 0..top_k {
            element.write(k as i64, out);
        }
    }
}

/// The first number of the last row of `array` that is not what [`write_padding_row`] writes: its layer and value.
pub(crate) fn padding_fault(array: &Array<'_>) -> Option<(usize, i64)> {
    let [rows, layers, top_k] = array.shape;
    let last = rows.checked_sub(1)?;
    (0..layers * top_k).find_map(|at| {
        let number = array.element.read(array.bytes, last * layers * top_k + at);
        (number != (at % top_k) as i64).then_some((at / top_k, number))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;

    #[test]
    fn a_number_reads_back_in_every_type_that_holds_it() {
        for element in Element::ALL {
            for value in [-1, 0, 1, 127, 128, 255, 256, 32_767, 32_768, 65_535] {
                if element.holds(value) {
                    let mut bytes = Vec::new();
                    element.write(7, &mut bytes);
                    element.write(value, &mut bytes);
                    assert_eq!(bytes.len(), 2 * element.bytes());
                    assert_eq!((element.read(&bytes, 0), element.read(&bytes, 1)), (7, value), "{element}");
                }
            }
            assert_eq!(Element::from_name(element.name()), Some(element));
        }
        assert!(!Element::Int16.holds(32_768) && !Element::Uint8.holds(-1) && !Element::Int8.holds(128));
    }

    #[test]
    fn a_shape_beyond_all_memory_is_a_wrong_length() {
        let sample = Sample::new(Layout::Vllm, 0);
        let huge = [usize::MAX; 3];
        assert!(Array::new(huge, Element::Int64, &[], &sample).is_err());
        assert!(
            Array::new([usize::MAX, 0, 2], Element::Int64, &[], &sample).is_ok(),
            "nothing, of that many"
        );
    }
}
