//! The weights, and what of them is trained.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use candle_core::{Device, Tensor, Var};
use r3_kernels::experts::{ExpertDims, Experts};
use r3_kernels::gemm::{Dtype, PackedMatrix};

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

/// A place for packed copies of the weights, shared with who packs them.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies(Arc<Mutex<Held>>);

impl Copies {
    pub(super) fn held(&self) -> MutexGuard<'_, Held> {
        // What a thread that panicked has inserted is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What somebody else holds, by the name of a matrix or of a layer's down projections.
#[derive(Debug, Default)]
pub(super) struct Held {
    pub(super) matrices: HashMap<String, Weak<PackedMatrix>>,
    pub(super) experts: HashMap<String, Weak<Experts>>,
}

/// The weights in f32. Products pack them as they go, if nobody else holds a copy that is packed: one that was kept for them
/// would take as much memory again.
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
    /// Gate-up and down weights, by layer.
    experts: Vec<[ParamId; 2]>,
    /// What was packed of the weights of a version.
    copies: (u64, Copies),
}

impl Params {
    pub(super) fn new(dtype: Dtype) -> Self {
        Self {
            dtype,
            version: 0,
            weights: Vec::new(),
            learning: Vec::new(),
            trained: Vec::new(),
            experts: Vec::new(),
            copies: Default::default(),
        }
    }

    /// Products round their operands to `dtype` from now on.
    pub(super) fn set_dtype(&mut self, dtype: Dtype) {
        self.dtype = dtype;
    }

    pub(super) fn add(&mut self, tensor: Named<'_>) -> Result<ParamId, ModelError> {
        let var = Var::from_vec(tensor.read()?, tensor.shape, &Device::Cpu)?;
        self.learning.push(Learning::Whole(self.trained.len()));
        self.trained.push((tensor.name.to_owned(), var.clone()));
        self.weights.push((tensor.name.to_owned(), var));
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
        self.experts.push([gate_up, down]);
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

    /// Says that what is trained has changed, so weights with factors are others.
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

    /// A place for copies of the weights as they are: who packs them tells it, and they are computed with until the weights
    /// change or nobody holds them.
    pub(super) fn copies(&mut self) -> Copies {
        self.copies = (self.version, Copies::default());
        self.copies.1.clone()
    }

    /// The matrix as products take it, if somebody holds it so.
    pub(super) fn packed_matrix(&self, id: ParamId) -> Option<Arc<PackedMatrix>> {
        let copy = self.copy(|held| held.matrices.get(&self.weights[id.0].0)?.upgrade());
        copy.filter(|copy| copy.dtype() == self.dtype(id))
    }

    /// The experts as products take them, if somebody holds them so.
    pub(super) fn packed_experts(&self, id: ExpertsId) -> Option<Arc<Experts>> {
        let [_, down] = self.experts[id.0];
        let copy = self.copy(|held| held.experts.get(&self.weights[down.0].0)?.upgrade());
        copy.filter(|copy| copy.dtype() == self.dtype)
    }

    fn copy<C>(&self, find: impl FnOnce(&Held) -> Option<C>) -> Option<C> {
        let (version, copies) = &self.copies;
        (*version == self.version).then(|| find(&copies.held()))?
    }

    /// Memory that all weights take in what products round to.
    pub(super) fn bytes(&self) -> usize {
        let bytes = |id| match self.dtype(ParamId(id)) {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        };
        self.weights.iter().enumerate().map(|(id, (_, var))| var.elem_count() * bytes(id)).sum()
    }

    /// The experts of every layer.
    #[cfg(test)]
    pub(super) fn expert_layers(&self) -> impl Iterator<Item = ExpertsId> {
        (0..self.experts.len()).map(ExpertsId)
    }

    /// Gate-up and down weights.
    pub(super) fn expert_params(&self, id: ExpertsId) -> [ParamId; 2] {
        self.experts[id.0]
    }

    pub(super) fn expert_dims(&self, id: ExpertsId) -> Result<ExpertDims, ModelError> {
        let [_, down] = self.experts[id.0];
        let (n_experts, width, inter) = self.tensor(down).dims3()?;
        Ok(ExpertDims { n_experts, width, inter })
    }
}
