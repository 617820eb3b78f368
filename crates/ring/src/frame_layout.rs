//! How a frame lies in its bytes: one fixed header, then nine sections, each starting on eight bytes.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use r3_core::routes::RouteDims;

/// `r3frame\0`, little-endian.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"r3frame\0");

/// Changes with every change of [`Header`] or [`Layout`]. A frame without supports is as it was before there were any.
pub(crate) const FORMAT_VERSION: u32 = 1;
/// Of frames with supports.
pub(crate) const SUPPORT_VERSION: u32 = 2;

pub(crate) const HEADER_BYTES: usize = size_of::<Header>();

/// Everything starts on a multiple of this, so that a section can be read in place as `u64`.
pub(crate) const SECTION_ALIGN: usize = 8;

const _: () = assert!(HEADER_BYTES.is_multiple_of(SECTION_ALIGN) && cfg!(target_endian = "little"));

/// The fixed part of a frame, little-endian. Without supports, `n_kept` is 0. Without routes, `rows`, `n_layers`, `top_k`, `n_experts` and
/// `id_bytes` are 0.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Header {
    /// XXH3 of all bytes after this field.
    pub(crate) checksum: u64,
    pub(crate) magic: u64,
    pub(crate) total_bytes: u64,
    pub(crate) weight_epoch: u64,
    pub(crate) model_hash: u64,
    /// XXH3 of the tokens as little-endian `u32`.
    pub(crate) token_digest: u64,
    pub(crate) group: u64,
    /// `T`.
    pub(crate) n_tokens: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) rows: u64,
    /// Position of the first route row.
    pub(crate) start: u64,
    pub(crate) format_version: u32,
    pub(crate) index: u32,
    pub(crate) n_layers: u32,
    pub(crate) top_k: u32,
    pub(crate) n_experts: u32,
    /// 0 if the reward failed.
    pub(crate) reward: f32,
    pub(crate) finish: u8,
    pub(crate) reward_failed: u8,
    pub(crate) has_routes: u8,
    pub(crate) id_bytes: u8,
    /// Tokens of all supports; every truncated draw has one or more.
    pub(crate) n_kept: u32,
}

/// How many of everything a frame holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    /// `T`.
    pub(crate) n_tokens: usize,
    /// `N`.
    pub(crate) n_sampled: usize,
    /// Rows and their shape; `None` if replay is off.
    pub(crate) routes: Option<(usize, RouteDims)>,
    /// Tokens of all supports; 0 if no draw was truncated.
    pub(crate) n_kept: usize,
}

/// Where the sections lie, padding excluded. Padding is zero.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// `u32 [L]`: which layers of the model the routes are of.
    pub(crate) layer_ids: Range<usize>,
    /// `u64 [N]`.
    pub(crate) versions: Range<usize>,
    /// `u32 [T]`.
    pub(crate) tokens: Range<usize>,
    /// `f32 [N]`.
    pub(crate) logprobs: Range<usize>,
    /// `u8 [N]`.
    pub(crate) mask: Range<usize>,
    /// `[rows, L, K]` ids.
    pub(crate) routes: Range<usize>,
    /// One bit per row, lowest first.
    pub(crate) validity: Range<usize>,
    /// `u32 [N]`, with supports.
    pub(crate) support_sizes: Range<usize>,
    /// `u32 [n_kept]`, with supports.
    pub(crate) support: Range<usize>,
    pub(crate) total_bytes: usize,
}

impl Layout {
    /// `None` if the frame would not fit the address space, or its supports are more than its header can count.
    pub(crate) fn new(counts: Counts) -> Option<Self> {
        let Counts { n_tokens, n_sampled, routes, n_kept } = counts;
        u32::try_from(n_kept).ok()?;
        let (rows, n_layers, row_bytes) = match routes {
            Some((rows, dims)) => (rows, dims.n_layers, row_bytes(dims)?),
            None => (0, 0, 0),
        };
        let mut end = HEADER_BYTES;
        let mut section = |n: usize, width: usize| {
            let start = end;
            let stop = start.checked_add(n.checked_mul(width)?)?;
            end = stop.checked_next_multiple_of(SECTION_ALIGN)?;
            Some(start..stop)
        };
        Some(Self {
            layer_ids: section(n_layers, size_of::<u32>())?,
            versions: section(n_sampled, size_of::<u64>())?,
            tokens: section(n_tokens, size_of::<u32>())?,
            logprobs: section(n_sampled, size_of::<f32>())?,
            mask: section(n_sampled, 1)?,
            routes: section(rows, row_bytes)?,
            validity: section(rows.div_ceil(8), 1)?,
            support_sizes: section(if n_kept > 0 { n_sampled } else { 0 }, size_of::<u32>())?,
            support: section(n_kept, size_of::<u32>())?,
            total_bytes: end,
        })
    }

    /// The sections in the order in which they lie.
    pub(crate) fn sections(&self) -> [Range<usize>; 9] {
        let Self { layer_ids, versions, tokens, logprobs, mask, routes, validity, .. } = self;
        let Self { support_sizes, support, .. } = self;
        [layer_ids, versions, tokens, logprobs, mask, routes, validity, support_sizes, support]
            .map(Range::clone)
    }

    /// The bytes behind each section that belong to nothing.
    pub(crate) fn padding(&self) -> [Range<usize>; 9] {
        self.sections().map(|section| section.end..section.end.next_multiple_of(SECTION_ALIGN))
    }
}

fn row_bytes(dims: RouteDims) -> Option<usize> {
    dims.n_layers.checked_mul(dims.top_k)?.checked_mul(dims.width().bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_aligned_and_do_not_overlap() {
        let dims = RouteDims { n_layers: 3, top_k: 3, n_experts: 300 };
        for (n_sampled, n_kept) in (0..20).flat_map(|n| [(n, 0), (n, 3 * n)]) {
            let routes = Some((n_sampled + 4, dims));
            let counts = Counts { n_tokens: n_sampled + 5, n_sampled, routes, n_kept };
            let layout = Layout::new(counts).unwrap();
            let mut end = HEADER_BYTES;
            for (section, padding) in layout.sections().into_iter().zip(layout.padding()) {
                assert!(section.start == end && section.start.is_multiple_of(SECTION_ALIGN));
                assert!(padding.start == section.end && padding.len() < SECTION_ALIGN);
                end = padding.end;
            }
            assert_eq!(layout.total_bytes, end);
            assert_eq!(layout.routes.len(), (n_sampled + 4) * 18);
            let supports = (layout.support_sizes.len(), layout.support.len());
            assert_eq!(supports, if n_kept > 0 { (4 * n_sampled, 4 * n_kept) } else { (0, 0) });
        }
    }

    #[test]
    fn a_frame_beyond_the_address_space_has_no_layout() {
        let dims = RouteDims { n_layers: usize::MAX / 2, top_k: 3, n_experts: 4 };
        let small = Counts { n_tokens: 1, n_sampled: 1, routes: None, n_kept: 0 };
        assert!(Layout::new(small).is_some());
        assert!(Layout::new(Counts { routes: Some((1, dims)), ..small }).is_none());
        assert!(Layout::new(Counts { n_tokens: usize::MAX / 3, ..small }).is_none());
        assert!(Layout::new(Counts { n_sampled: usize::MAX - 200, ..small }).is_none());
        assert!(Layout::new(Counts { n_kept: 1 << 32, ..small }).is_none());
    }
}
