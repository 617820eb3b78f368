//! Gradients, running back over the tape.

use std::sync::Arc;

use r3_kernels::experts::trained::{ExpertGrads, ExpertTrace};
use r3_kernels::gemm::linear::Linear;
use r3_kernels::residual;
use r3_kernels::rms_norm::RmsNorm;
use r3_kernels::rope::rope_backward;
use r3_kernels::router::{Choice, Gated, Routing};
use r3_kernels::swiglu::silu_mul_backward;

use super::PackedSequences;
use super::gradients::Gradients;
use super::params::{ExpertsId, ParamId};
use super::tape::{Node, NodeId, Op, Projection, Tape};
use crate::error::ModelError;
use crate::executor::{Executor, Weights};
use crate::forward::decoder_layer;
use crate::rows::Rows;

/// What a backward pass reads beside the tape, and where it adds up.
pub(super) struct Backward<'a> {
    pub(super) weights: &'a Weights<Tape>,
    pub(super) attend: &'a mut PackedSequences,
    /// Per MoE layer, the gradient `[T, E]` that the loss has with respect to the router's logits.
    pub(super) score_grads: &'a [Option<Vec<f32>>],
    /// By trained tensor.
    pub(super) gradients: &'a mut Gradients,
}

impl Backward<'_> {
    /// Takes nodes off `tape` until `len` are left, handing each one's gradient on.
    pub(super) fn run(&mut self, tape: &mut Tape, len: usize) -> Result<(), ModelError> {
        while tape.nodes.len() > len {
            let Node { op, rows, grad, .. } = tape.nodes.pop().expect("more than `len`");
            if let Op::Layer { index } = op {
                tape.pool.release(rows);
                self.run_again(tape, index, grad)?;
                continue;
            }
            if let Some(grad) = grad {
                self.step(tape, &op, &rows, &grad)?;
                tape.recycle(grad);
            }
            if let Op::Experts { trace, .. } = op {
                tape.traces.push(trace);
            }
            tape.pool.release(rows);
        }
        Ok(())
    }

    /// Runs layer `index` a second time on the experts of the first, and back.
    fn run_again(
        &mut self,
        tape: &mut Tape,
        index: usize,
        grad: Option<Arc<Rows>>,
    ) -> Result<(), ModelError> {
        let (weights, len) = (self.weights, tape.nodes.len());
        let moe_layer = weights.config.is_moe[..index].iter().filter(|&&is_moe| is_moe).count();
        let routes = std::mem::take(&mut tape.routes);
        let gates = std::mem::take(&mut tape.replayed_gates);
        let mut routing = match gates.is_empty() {
            true => Routing::Replay { ids: &routes, native: None },
            false => Routing::ReplayGates { ids: &routes, gates: &gates },
        };
        let layer = (index, &weights.layers[index]);
        let input = [NodeId(len - 2), NodeId(len - 1)];
        let [x, y] = decoder_layer(tape, layer, input, self.attend, (moe_layer, &mut routing))?;
        let y = tape.add(x, y)?;
        (tape.routes, tape.replayed_gates) = (routes, gates);
        tape.nodes[y.0].grad = grad;
        self.run(tape, len)
    }

    fn step(&mut self, tape: &mut Tape, op: &Op, rows: &Rows, grad: &Arc<Rows>) -> Result<(), ModelError> {
        match op {
            Op::Embed { table, tokens } => {
                if let Some(at) = tape.params.learning(*table).first() {
                    self.gradients.look_up(at, tokens, grad.values());
                }
            }
            Op::RmsNorm { x, weight } => self.rms_norm(tape, (*x, *weight), grad.values())?,
            Op::Linear { x, projection } => self.linear(tape, (*x, *projection), grad)?,
            Op::NormRope { x, weight } => {
                let mut turned = tape.pool.take(grad.rows(), grad.width());
                turned.values_mut().copy_from_slice(grad.values());
                rope_backward(turned.values_mut(), &self.attend.positions, &tape.rope);
                self.rms_norm(tape, (*x, *weight), turned.values())?;
                tape.pool.release(turned);
            }
            Op::Attend { qkv } => self.attend(tape, *qkv, grad),
            Op::Route { scores, layer, choice, is_live } => {
                let gated = is_live.then(|| (choice, rows.values()));
                self.route(tape, (*scores, *layer), gated, grad.values());
            }
            Op::Experts { x, gates, experts, trace } => {
                self.experts(tape, (*x, *gates), (*experts, trace), grad)?;
            }
            Op::SiluMul { x } => {
                let mut x_grad = tape.fresh_grad(*x);
                silu_mul_backward(tape.values(*x), grad.values(), grad.width(), x_grad.values_mut());
                tape.set_grad(*x, x_grad);
            }
            Op::Add { x, y } => {
                tape.share_grad(*x, grad);
                tape.share_grad(*y, grad);
            }
            Op::Layer { .. } | Op::Given => {
                unreachable!("a layer runs again, and what is given has no gradient")
            }
        }
        Ok(())
    }

    /// Of every row of `grad.len() / width`, which need not be a token's.
    fn rms_norm(
        &mut self,
        tape: &mut Tape,
        (x, weight): (NodeId, ParamId),
        grad: &[f32],
    ) -> Result<(), ModelError> {
        let (mut x_grad, onto) = tape.take_grad(x);
        let values = tape.params.values(weight)?;
        let norm = RmsNorm { x: tape.values(x), weight: &values, eps: tape.constants.eps };
        // A frozen norm's gradient costs little beside that of its input, and goes nowhere.
        let mut nowhere = Vec::new();
        let weight_grad =
            tape.params.learning(weight).whole(self.gradients.tensors_mut()).unwrap_or_else(|| {
                nowhere.resize(values.len(), 0.0);
                &mut nowhere
            });
        norm.backward(grad, onto, x_grad.values_mut(), weight_grad);
        drop(values);
        tape.set_grad(x, x_grad);
        Ok(())
    }

    fn linear(
        &mut self,
        tape: &mut Tape,
        (x, projection): (NodeId, Projection),
        grad: &Rows,
    ) -> Result<(), ModelError> {
        let Projection { weight, bias } = projection;
        let mut x_grad = tape.nodes[x.0].learns.then(|| tape.take_grad(x));
        let values = tape.params.values(weight)?;
        let (k, dtype) = (tape.nodes[x.0].rows.width(), tape.params.dtype(weight));
        let linear = Linear { x: tape.values(x), w: &values, k, dtype, lengths: &self.attend.lengths };
        if let Some((x_grad, onto)) = &mut x_grad {
            linear.x_gradient(grad.values(), *onto, x_grad.values_mut());
        }
        let gradients = self.gradients.tensors_mut();
        linear.add_w_gradient(grad.values(), tape.params.learning(weight).gradient(gradients, 0));
        drop(values);
        if let Some((x_grad, _)) = x_grad {
            tape.set_grad(x, x_grad);
        }
        if let Some(bias) =
            bias.and_then(|bias| tape.params.learning(bias).whole(self.gradients.tensors_mut()))
        {
            for row in grad.values().chunks_exact(grad.width()) {
                residual::add(row, bias);
            }
        }
        Ok(())
    }

    fn attend(&mut self, tape: &mut Tape, qkv: [NodeId; 3], grad: &Rows) {
        let mut grads = qkv.map(|id| tape.nodes[id.0].learns.then(|| tape.fresh_grad(id)));
        let values = qkv.map(|id| tape.nodes[id.0].rows.values());
        let out = grads.each_mut().map(|grad| grad.as_mut().map(Rows::values_mut));
        tape.attention.backward(values, &self.attend.sequences, grad.values(), out);
        for (id, grad) in qkv.into_iter().zip(grads) {
            if let Some(grad) = grad {
                tape.set_grad(id, grad);
            }
        }
    }

    /// Gates that were replayed are constants: the scores beneath have the loss's own gradient, if any.
    fn route(
        &mut self,
        tape: &mut Tape,
        (scores, layer): (NodeId, usize),
        gated: Option<(&Choice, &[f32])>,
        grad: &[f32],
    ) {
        if gated.is_none() && self.score_grads[layer].is_none() {
            return;
        }
        let mut scores_grad = tape.fresh_grad(scores);
        match &self.score_grads[layer] {
            Some(of_loss) => scores_grad.values_mut().copy_from_slice(of_loss),
            None => scores_grad.values_mut().fill(0.0),
        }
        if let Some((choice, gates)) = gated {
            let gated = Gated { scores: tape.values(scores), config: tape.constants.router, choice, gates };
            gated.add_scores_gradient(grad, scores_grad.values_mut());
        }
        tape.set_grad(scores, scores_grad);
    }

    fn experts(
        &mut self,
        tape: &mut Tape,
        (x, gates): (NodeId, NodeId),
        (experts, trace): (ExpertsId, &ExpertTrace),
        grad: &Rows,
    ) -> Result<(), ModelError> {
        let mut x_grad = tape.nodes[x.0].learns.then(|| tape.fresh_grad(x));
        let mut gates_grad = tape.fresh_grad(gates);
        let [gate_up, down] = tape.params.expert_params(experts).map(|id| tape.params.learning(id));
        let gradients = self.gradients.tensors_mut();
        // Trained tensors lie in the order of the weights.
        let at = down.first().unwrap_or(gradients.len());
        let (before, after) = gradients.split_at_mut(at);
        let (gate_up, down) = (gate_up.gradient(before, 0), down.gradient(after, at));
        let x_out = x_grad.as_mut().map(Rows::values_mut);
        let out = ExpertGrads { x: x_out, gates: gates_grad.values_mut(), gate_up, down };
        tape.with_operands((x, gates), experts, &self.attend.lengths, |operands| {
            trace.backward(operands, grad.values(), out);
        })?;
        if let Some(x_grad) = x_grad {
            tape.set_grad(x, x_grad);
        }
        tape.set_grad(gates, gates_grad);
        Ok(())
    }
}

impl Tape {
    /// What is known of a node's gradient and whether that is anything, in rows of its own: to be put back with
    /// [`Self::set_grad`].
    fn take_grad(&mut self, id: NodeId) -> (Rows, bool) {
        match self.nodes[id.0].grad.take() {
            None => (self.fresh_grad(id), false),
            Some(grad) => match Arc::try_unwrap(grad) {
                Ok(grad) => (grad, true),
                Err(shared) => {
                    let mut own = self.fresh_grad(id);
                    own.values_mut().copy_from_slice(shared.values());
                    (own, true)
                }
            },
        }
    }

    /// Rows for the gradient of a node that has none, holding whatever was there.
    fn fresh_grad(&mut self, id: NodeId) -> Rows {
        let node = &self.nodes[id.0];
        assert!(node.grad.is_none(), "who replaces a gradient goes first");
        self.pool.take(node.rows.rows(), node.rows.width())
    }

    /// What a kernel finds out on its way of a node that does not learn goes no further.
    fn set_grad(&mut self, id: NodeId, grad: Rows) {
        match self.nodes[id.0].learns {
            true => self.nodes[id.0].grad = Some(Arc::new(grad)),
            false => self.pool.release(grad),
        }
    }

    /// Adds `grad` to that of a node that learns, without a copy if it had none.
    fn share_grad(&mut self, id: NodeId, grad: &Arc<Rows>) {
        if !self.nodes[id.0].learns {
            return;
        }
        if self.nodes[id.0].grad.is_none() {
            self.nodes[id.0].grad = Some(grad.clone());
            return;
        }
        let (mut own, _) = self.take_grad(id);
        residual::add(grad.values(), own.values_mut());
        self.set_grad(id, own);
    }

    fn recycle(&mut self, grad: Arc<Rows>) {
        if let Ok(rows) = Arc::try_unwrap(grad) {
            self.pool.release(rows);
        }
    }
}
