//! NumPy's array file, as far as routes need it: integers, little-endian, rows outermost.
//!
//! Written is format version 1.0, byte by byte as `numpy.save` does: with three sizes the header is short enough that no
//! version of NumPy pads it otherwise. Read are versions 1 to 3.
//! Source: the description of the format in NumPy's documentation (`numpy.lib.format`).

use crate::array::{Array, Element};
use crate::check::Sample;
use crate::error::{Fault, WireError, quoted};

/// What every such file starts with.
pub const MAGIC: &[u8] = b"\x93NUMPY";

/// What NumPy calls an element type in a header.
fn description(element: Element) -> &'static str {
    match element {
        Element::Int8 => "|i1",
        Element::Uint8 => "|u1",
        Element::Int16 => "<i2",
        Element::Uint16 => "<u2",
        Element::Int32 => "<i4",
        Element::Uint32 => "<u4",
        Element::Int64 => "<i8",
    }
}

/// Bytes that header and what precedes it fill a multiple of.
const ALIGN: usize = 64;

/// The file of an array.
#[must_use]
pub(crate) fn write(shape: [usize; 3], element: Element, bytes: &[u8]) -> Vec<u8> {
    let [rows, layers, top_k] = shape;
    let mut header = format!(
        "{{'descr': '{}', 'fortran_order': False, 'shape': ({rows}, {layers}, {top_k}), }}",
        description(element)
    );
    let before = MAGIC.len() + 4;
    let unpadded = before + header.len() + 1;
    header.push_str(&" ".repeat(unpadded.next_multiple_of(ALIGN) - unpadded));
    header.push('\n');
    let mut out = Vec::with_capacity(before + header.len() + bytes.len());
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&[1, 0]);
    let header_bytes = u16::try_from(header.len()).expect("three numbers make a short header");
    out.extend_from_slice(&header_bytes.to_le_bytes());
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(bytes);
    out
}

/// Reads an array of three dimensions.
///
/// # Errors
/// If `file` is no such file, is cut short or longer than its array, or holds something else than little-endian
/// integers in C order.
pub(crate) fn read<'a>(file: &'a [u8], sample: &Sample) -> Result<Array<'a>, WireError> {
    let refuse = |reason| sample.refuse(Fault::Npy { reason });
    let rest = file.strip_prefix(MAGIC).ok_or_else(|| refuse("it does not start with NumPy's magic"))?;
    let (header_bytes, rest) = match rest {
        [1, _, low, high, rest @ ..] => (usize::from(u16::from_le_bytes([*low, *high])), rest),
        [2 | 3, _, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, rest),
        [0..=3] | [0..=3, ..] => return Err(refuse("it ends inside its header, or has version 0")),
        [] => return Err(refuse("it ends after the magic")),
        _ => return Err(refuse("its format version is newer than 3")),
    };
    let (header, bytes) =
        rest.split_at_checked(header_bytes).ok_or_else(|| refuse("it ends inside its header"))?;
    let header = str::from_utf8(header).map_err(|_| refuse("its header is not text"))?;
    let entries = dictionary(header).ok_or_else(|| refuse("its header is not a dictionary"))?;
    let entry = |key: &str| entries.iter().find(|(known, _)| *known == key).map(|(_, value)| *value);

    let found = entry("descr").ok_or_else(|| refuse("its header has no `descr`"))?.trim_matches(['\'', '"']);
    let Some(element) = Element::ALL.into_iter().find(|element| description(*element) == found) else {
        let allowed = "|i1, |u1, <i2, <u2, <i4, <u4, <i8";
        return Err(sample.refuse(Fault::Dtype { found: quoted(found), allowed }));
    };
    if entry("fortran_order") != Some("False") {
        return Err(refuse("it is not in C order"));
    }
    let shape = entry("shape").and_then(tuple).ok_or_else(|| refuse("its header has no `shape`"))?;
    let shape: [usize; 3] = shape.try_into().map_err(|found| sample.refuse(Fault::Shape { found }))?;
    Array::new(shape, element, bytes, sample)
}

/// The entries of a flat Python dictionary with keys in quotes: each key, and the text of its value.
fn dictionary(text: &str) -> Option<Vec<(&str, &str)>> {
    let mut rest = text.trim().strip_prefix('{')?.strip_suffix('}')?.trim_start();
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let quote = rest.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        let (key, after) = rest[1..].split_once(quote)?;
        let value = after.trim_start().strip_prefix(':')?.trim_start();
        let end = match value.strip_prefix('(') {
            Some(inside) => inside.find(')')? + 2,
            None => value.find(',').unwrap_or(value.len()),
        };
        entries.push((key, value[..end].trim_end()));
        rest = value[end..].trim_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
    }
    Some(entries)
}

/// `(6, 4, 2)`, in digits.
fn tuple(text: &str) -> Option<Vec<usize>> {
    let inside = text.strip_prefix('(')?.strip_suffix(')')?;
    let numbers = inside.trim_end().trim_end_matches(',').split(',').map(str::trim);
    // A shape has no sign, and NumPy has at most 64 dimensions.
    let number = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?;
    numbers.take(65).map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;

    fn sample() -> Sample {
        Sample::new(Layout::Vllm, 0)
    }

    fn fault(file: &[u8]) -> Fault {
        match read(file, &sample()) {
            Err(WireError::Sample { fault, .. }) => fault,
            Err(other) => panic!("{other}"),
            Ok(array) => panic!("read {:?}", array.shape),
        }
    }

    fn with_header(header: &str, bytes: &[u8]) -> Vec<u8> {
        let mut file = [MAGIC, &[1, 0], &u16::try_from(header.len()).unwrap().to_le_bytes()].concat();
        file.extend_from_slice(header.as_bytes());
        file.extend_from_slice(bytes);
        file
    }

    /// `numpy.save` of NumPy 2.4 of `np.arange(6, dtype=np.int16).reshape(3, 1, 2)`, byte by byte.
    #[test]
    fn an_array_is_written_as_numpy_writes_it() {
        let bytes: Vec<u8> = (0i16..6).flat_map(i16::to_le_bytes).collect();
        let file = write([3, 1, 2], Element::Int16, &bytes);
        let header = "{'descr': '<i2', 'fortran_order': False, 'shape': (3, 1, 2), }";
        let expected =
            [b"\x93NUMPY\x01\x00\x76\x00".as_slice(), header.as_bytes(), &[b' '; 55], b"\n"].concat();
        assert_eq!(file[..128], expected);
        assert_eq!(file[128..], bytes);
        let array = read(&file, &sample()).unwrap();
        assert_eq!((array.shape, array.element, array.bytes), ([3, 1, 2], Element::Int16, &bytes[..]));
    }

    #[test]
    fn every_element_type_reads_back() {
        for element in Element::ALL {
            let bytes = vec![1; 4 * element.bytes()];
            let file = write([2, 2, 1], element, &bytes);
            assert_eq!(read(&file, &sample()).unwrap().element, element);
        }
    }

    #[test]
    fn keys_come_in_any_order_and_version_2_has_a_wider_length() {
        let header = "{\"shape\":(1, 2, 1,),'fortran_order' : False, 'descr': '|u1'}\n";
        let file = with_header(header, &[5, 6]);
        assert_eq!(read(&file, &sample()).unwrap().shape, [1, 2, 1]);
        let mut wide = [MAGIC, &[2, 0], &(header.len() as u32).to_le_bytes()].concat();
        wide.extend_from_slice(header.as_bytes());
        wide.extend_from_slice(&[5, 6]);
        assert_eq!(read(&wide, &sample()).unwrap().bytes, [5, 6]);
    }

    #[test]
    fn every_cut_and_every_excess_is_refused() {
        let file = write([3, 1, 2], Element::Int16, &[0; 12]);
        for end in 0..file.len() {
            fault(&file[..end]);
        }
        let longer = [&file[..], &[0]].concat();
        let expected =
            Fault::Length { bytes: 13, shape: [3, 1, 2], element: Element::Int16, needed_bytes: 12 };
        assert_eq!(fault(&longer), expected);
    }

    #[test]
    fn what_routes_cannot_be_is_refused_by_name() {
        let of = |descr: &str, order: &str, shape: &str| {
            fault(&with_header(
                &format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n"),
                &[0; 2],
            ))
        };
        assert!(matches!(of("<f2", "False", "(1, 1, 1)"), Fault::Dtype { found, .. } if found == "<f2"));
        assert!(matches!(of(">i2", "False", "(1, 1, 1)"), Fault::Dtype { found, .. } if found == ">i2"));
        assert_eq!(of("<i2", "True", "(1, 1, 1)"), Fault::Npy { reason: "it is not in C order" });
        assert_eq!(of("<i2", "False", "(1, 1)"), Fault::Shape { found: vec![1, 1] });
        assert_eq!(of("<i2", "False", "(1, -1, 1)"), Fault::Npy { reason: "its header has no `shape`" });
        assert_eq!(of("<i2", "False", "()"), Fault::Npy { reason: "its header has no `shape`" });
        let huge = "(99999999999999999999, 1, 1)";
        assert_eq!(of("<i2", "False", huge), Fault::Npy { reason: "its header has no `shape`" });
    }
}
