//! The weights, what of them is trained, and packed copies of them that live as long as a version of the weights.

use std::ops::Deref;
use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use r3_kernels::experts::{ExpertDims, Experts};
use r3_kernels::gemm::{Dtype, PackedMatrix};

use super::SharedWeights;
use super::training::{Learning, Training};
use super::values::values;
use crate::error::ModelError;
use crate::executor::Named;
use crate::source::stays_f32;

/// A tensor among the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamId(pub(super) usize);

/// The experts of a layer among all.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsId(usize);

/// The weights in f32, and what products take.
#[derive(Debug)]
pub(super) struct Params {
    dtype: Dtype,
    /// Counts changes of the weights.
    version: u64,
    weights: Vec<(String, Var)>,
    /// How each of them learns.
    learning: Vec<Learning>,
    /// What gradients are of and the optimiser changes.
    trained: Vec<(String, Var)>,
    matrices: Vec<Packed<PackedMatrix>>,
    experts: Vec<LayerExperts>,
}

/// A packed copy, which an engine may share, and the version of the weights it is of.
#[derive(Debug)]
struct Packed<P> {
    copy: Option<Arc<P>>,
    version: u64,
}

impl<P> Default for Packed<P> {
    fn default() -> Self {
        Self { copy: None, version: 0 }
    }
}

impl<P> Packed<P> {
    /// The copy of `version`: one of another version is repacked into the same memory, unless it is shared. Then who
    /// computes with it keeps it, and there is a new one.
    fn get(&mut self, version: u64, pack: impl FnOnce() -> P, repack: impl FnOnce(&mut P)) -> &Arc<P> {
        if self.version != version {
            match self.copy.as_mut().map(Arc::get_mut) {
                Some(Some(own)) => repack(own),
                Some(None) | None => self.copy = None,
            }
        }
        self.version = version;
        self.copy.get_or_insert_with(|| Arc::new(pack()))
    }
}

#[derive(Debug)]
struct LayerExperts {
    gate_up: ParamId,
    down: ParamId,
    packed: Packed<Experts>,
}

impl Params {
    pub(super) fn new(dtype: Dtype) -> Self {
        Self {
            dtype,
            version: 0,
            weights: Vec::new(),
            learning: Vec::new(),
            trained: Vec::new(),
            matrices: Vec::new(),
            experts: Vec::new(),
        }
    }

    /// Packs everything anew, in `dtype`.
    pub(super) fn set_dtype(&mut self, dtype: Dtype) {
        self.dtype = dtype;
        self.matrices.iter_mut().for_each(|packed| *packed = Packed::default());
        self.experts.iter_mut().for_each(|layer| layer.packed = Packed::default());
    }

    pub(super) fn add(&mut self, tensor: Named<'_>) -> Result<ParamId, ModelError> {
        let var = Var::from_vec(tensor.read()?, tensor.shape, &Device::Cpu)?;
        self.learning.push(Learning::Whole(self.trained.len()));
        self.trained.push((tensor.name.to_owned(), var.clone()));
        self.weights.push((tensor.name.to_owned(), var));
        self.matrices.push(Packed::default());
        Ok(ParamId(self.weights.len() - 1))
    }

    /// Trains every weight as `how` says of its name; factors start from `seed`.
    pub(super) fn set_training(
        &mut self,
        how: impl Fn(&str) -> Training,
        seed: u64,
    ) -> Result<(), ModelError> {
        self.trained.clear();
        self.learning.clear();
        for (index, weight) in (0..).zip(&self.weights) {
            let learning = Learning::new(how(&weight.0), weight, (seed, index), &mut self.trained)?;
            self.learning.push(learning);
        }
        Ok(())
    }

    pub(super) fn add_experts(&mut self, gate_up: ParamId, down: ParamId) -> ExpertsId {
        self.experts.push(LayerExperts { gate_up, down, packed: Packed::default() });
        ExpertsId(self.experts.len() - 1)
    }

    pub(super) fn weights(&self) -> &[(String, Var)] {
        &self.weights
    }

    pub(super) fn trained(&self) -> &[(String, Var)] {
        &self.trained
    }

    /// How a weight learns.
    pub(super) fn learning(&self, id: ParamId) -> &Learning {
        &self.learning[id.0]
    }

    /// Says that what is trained has changed, so weights with factors are others, and no packed copy is of any.
    pub(super) fn changed(&mut self) {
        self.version += 1;
        for (learning, (_, weight)) in self.learning.iter_mut().zip(&self.weights) {
            learning.merge(&self.trained, weight);
        }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// What products with a tensor round their operands to.
    pub(super) fn dtype(&self, id: ParamId) -> Dtype {
        if stays_f32(&self.weights[id.0].0) { Dtype::F32 } else { self.dtype }
    }

    fn tensor(&self, id: ParamId) -> &Tensor {
        self.weights[id.0].1.as_tensor()
    }

    pub(super) fn values(&self, id: ParamId) -> Result<impl Deref<Target = [f32]>, ModelError> {
        Ok(values(self.tensor(id))?)
    }

    /// Rows and columns of a matrix.
    pub(super) fn shape(&self, id: ParamId) -> Result<(usize, usize), ModelError> {
        Ok(self.tensor(id).dims2()?)
    }

    /// The matrix as products take it.
    pub(super) fn matrix(&mut self, id: ParamId) -> Result<&Arc<PackedMatrix>, ModelError> {
        Ok(self.both(id)?.1)
    }

    /// A matrix as it is and as products take it.
    pub(super) fn both(
        &mut self,
        id: ParamId,
    ) -> Result<(impl Deref<Target = [f32]>, &Arc<PackedMatrix>), ModelError> {
        let ((n, k), dtype) = (self.shape(id)?, self.dtype(id));
        let w = values(self.weights[id.0].1.as_tensor())?;
        let pack = || PackedMatrix::pack(&w, n, k, dtype);
        let packed = self.matrices[id.0].get(self.version, pack, |copy| copy.repack(&w));
        Ok((w, packed))
    }

    /// The experts as products take them.
    pub(super) fn experts(&mut self, id: ExpertsId) -> Result<&Arc<Experts>, ModelError> {
        let (dims, version, dtype) = (self.expert_dims(id)?, self.version, self.dtype);
        let LayerExperts { gate_up, down, packed } = &mut self.experts[id.0];
        let [gate_up, down] = [*gate_up, *down].map(|id| values(self.weights[id.0].1.as_tensor()));
        let (gate_up, down) = (gate_up?, down?);
        let repack = |experts: &mut Experts| {
            experts.repack_gate_up(&gate_up);
            experts.repack_down(&down);
        };
        Ok(packed.get(version, || Experts::pack(&gate_up, &down, dims, dtype), repack))
    }

    /// Memory that all weights take as products take them, about.
    pub(super) fn packed_bytes(&self) -> usize {
        let bytes = |id| match self.dtype(ParamId(id)) {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        };
        self.weights.iter().enumerate().map(|(id, (_, var))| var.elem_count() * bytes(id)).sum()
    }

    /// Handles to everything as it is and as products take it.
    pub(super) fn share(&mut self) -> Result<SharedWeights, ModelError> {
        let mut shared = SharedWeights { weights: self.weights.clone(), ..SharedWeights::default() };
        for id in 0..self.weights.len() {
            if self.weights[id].1.rank() == 2 {
                let matrix = self.matrix(ParamId(id))?.clone();
                shared.matrices.insert(self.weights[id].0.clone(), matrix);
            }
        }
        for id in 0..self.experts.len() {
            let down = self.weights[self.experts[id].down.0].0.clone();
            shared.experts.insert(down, self.experts(ExpertsId(id))?.clone());
        }
        Ok(shared)
    }

    /// Gate-up and down weights.
    pub(super) fn expert_params(&self, id: ExpertsId) -> [ParamId; 2] {
        [self.experts[id.0].gate_up, self.experts[id.0].down]
    }

    pub(super) fn expert_dims(&self, id: ExpertsId) -> Result<ExpertDims, ModelError> {
        let (n_experts, width, inter) = self.tensor(self.experts[id.0].down).dims3()?;
        Ok(ExpertDims { n_experts, width, inter })
    }
}
