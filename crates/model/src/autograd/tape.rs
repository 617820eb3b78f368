//! The trainer's executor: it runs the engine's kernels and remembers what it ran, so that gradients can run back.
//!
//! The tape is a stack. A node is the result of one operation, of which every input lies further down; so gradients run
//! back by taking nodes off the top, and what a node holds is free for the next one as soon as it is off.
//!
//! Gradients end at the lowest weight that is trained. Layers below it leave the stream they end with and nothing else, and
//! so do all of them where no gradient is to run back at all.

use std::sync::Arc;

use r3_core::ids::TokenId;
use r3_kernels::attention::packed::PackedAttention;
use r3_kernels::cast::round_to_bf16;
use r3_kernels::experts::ExpertDims;
use r3_kernels::experts::trained::{ExpertOperands, ExpertTrace};
use r3_kernels::gemm::linear::linear;
use r3_kernels::gemm::{Dtype, matmul};
use r3_kernels::residual;
use r3_kernels::rms_norm::rms_norm;
use r3_kernels::rope::{RopeTable, rope};
use r3_kernels::router::{Choice, Router, Routing, choose, gates};
use r3_kernels::swiglu::silu_mul;

use super::params::{ExpertsId, ParamId, Params};
use super::{PackedSequences, Precision, RanExperts};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::executor::{BuildWeights, Constants, Executor, Named, check_vocabulary};
use crate::rows::{Pool, Rows};

/// A projection's tensors.
#[derive(Clone, Copy, Debug)]
pub struct Projection {
    pub(super) weight: ParamId,
    pub(super) bias: Option<ParamId>,
}

/// A tensor that is as it was read.
#[derive(Clone, Debug)]
pub(super) struct FixedTensor {
    pub(super) name: String,
    pub(super) values: Arc<[f32]>,
}

/// A node of the tape, counted from the bottom.
#[derive(Clone, Copy, Debug)]
pub struct NodeId(pub(super) usize);

/// A layer's choice with its gates `[T, K]`: a node that the router made.
#[derive(Clone, Copy, Debug)]
pub struct RouteId(NodeId);

/// What made a node.
#[derive(Debug)]
pub(super) enum Op {
    Embed {
        table: ParamId,
        tokens: Arc<[TokenId]>,
    },
    RmsNorm {
        x: NodeId,
        weight: ParamId,
    },
    Linear {
        x: NodeId,
        projection: Projection,
    },
    NormRope {
        x: NodeId,
        weight: ParamId,
    },
    Attend {
        qkv: [NodeId; 3],
    },
    Route {
        scores: NodeId,
        layer: usize,
        choice: Choice,
        /// Whether the gates are of these scores, and not replayed.
        is_live: bool,
    },
    Experts {
        x: NodeId,
        gates: NodeId,
        experts: ExpertsId,
        trace: ExpertTrace,
    },
    SiluMul {
        x: NodeId,
    },
    Add {
        x: NodeId,
        y: NodeId,
    },
    /// A whole layer, to be run again. The two nodes below are its input and the norm of that.
    Layer {
        index: usize,
    },
    /// Layers of which nothing is trained: what they came to is a constant.
    Given,
}

/// The result of an operation.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) op: Op,
    pub(super) rows: Rows,
    /// Whether anything that it was made with is trained. Others have no gradient.
    pub(super) learns: bool,
    /// What is known of its gradient. The two summands of a sum share theirs.
    pub(super) grad: Option<Arc<Rows>>,
}

/// Runs the model on reused buffers and keeps what gradients need.
#[derive(Debug)]
pub struct Tape {
    pub(super) rope: RopeTable,
    pub(super) constants: Constants,
    pub(super) params: Params,
    /// What no gradient reaches.
    pub(super) fixed: Vec<FixedTensor>,
    pub(super) attention: PackedAttention,
    pub(super) pool: Pool,
    /// Traces that are free.
    pub(super) traces: Vec<ExpertTrace>,
    pub(super) nodes: Vec<Node>,
    /// Whether layers keep their input alone and run again when gradients need the rest.
    recompute: bool,
    /// Whether a gradient will run back over the pass.
    pub(super) is_learning: bool,
    /// Where the nodes of the layer that is running start.
    layer_start: usize,
    /// Layers that ended.
    n_layers: usize,
    /// The experts of this pass, `[L, T, K]`: what a layer that runs again replays; empty if none will.
    pub(super) routes: Vec<u16>,
    /// Their gates, where these are replayed, too.
    pub(super) replayed_gates: Vec<f32>,
    /// What was run, a MoE layer each.
    pub(super) ran: Vec<RanExperts>,
    /// Router logits of this pass, `[T, E]` a MoE layer.
    pub(super) router_scores: Vec<Vec<f32>>,
}

impl Tape {
    pub(super) fn new(config: &ModelConfig) -> Self {
        let Precision { dtype, recompute } = Precision::default();
        Self {
            rope: RopeTable::new(config.rope_theta, config.head_dim, config.max_positions),
            constants: Constants { eps: config.rms_norm_eps, router: config.router() },
            params: Params::new(dtype),
            fixed: Vec::new(),
            attention: PackedAttention::new(config.heads(), dtype),
            pool: Pool::default(),
            traces: Vec::new(),
            nodes: Vec::new(),
            recompute,
            is_learning: true,
            layer_start: 2,
            n_layers: 0,
            routes: Vec::new(),
            replayed_gates: Vec::new(),
            ran: Vec::new(),
            router_scores: Vec::new(),
        }
    }

    pub(super) fn set_precision(&mut self, config: &ModelConfig, precision: Precision) {
        self.clear();
        self.params.set_dtype(precision.dtype);
        self.attention = PackedAttention::new(config.heads(), precision.dtype);
        self.recompute = precision.recompute;
    }

    /// Forgets the last pass.
    pub(super) fn clear(&mut self) {
        self.truncate(0);
        self.routes.clear();
        self.replayed_gates.clear();
        self.ran.clear();
        self.router_scores.clear();
        (self.layer_start, self.n_layers) = (2, 0);
    }

    /// Gives back `bytes` of the memory that passes work on, or all there is.
    pub(super) fn give_back(&mut self, bytes: usize) {
        self.clear();
        let mut left = self.pool.give_back(bytes);
        while let Some(trace) = self.traces.pop_if(|_| left > 0) {
            left = left.saturating_sub(trace.bytes());
        }
    }

    /// Forgets what lies above the first `len` nodes but for the residual stream that a layer ends with, which is now of
    /// `op`, and its norm.
    fn keep_ends(&mut self, len: usize, op: Op) -> [NodeId; 2] {
        let norm = self.nodes.pop().expect("a layer ends with a norm");
        let stream = self.nodes.pop().expect("of a sum");
        let Op::RmsNorm { weight, .. } = norm.op else { unreachable!("a layer ends with a norm") };
        self.truncate(len);
        let x = self.push(op, stream.rows);
        [x, self.push(Op::RmsNorm { x, weight }, norm.rows)]
    }

    /// Takes nodes off the top until `len` are left.
    pub(super) fn truncate(&mut self, len: usize) {
        for node in self.nodes.drain(len.min(self.nodes.len())..) {
            if let Op::Experts { trace, .. } = node.op {
                self.traces.push(trace);
            }
            self.pool.release(node.rows);
        }
    }

    pub(super) fn values(&self, id: NodeId) -> &[f32] {
        self.nodes[id.0].rows.values()
    }

    /// Lends `compute` what the `experts` of a layer are computed of, for sequences of `lengths`.
    pub(super) fn with_operands(
        &self,
        (x, gates): (NodeId, NodeId),
        experts: ExpertsId,
        lengths: &[usize],
        compute: impl FnOnce(&ExpertOperands<'_>),
    ) -> Result<(), ModelError> {
        let [gate_up, down] = self.params.expert_params(experts);
        let ExpertDims { width, inter, .. } = self.params.expert_dims(experts)?;
        compute(&ExpertOperands {
            x: self.values(x),
            gates: self.values(gates),
            gate_up: &self.params.values(gate_up)?,
            down: &self.params.values(down)?,
            width,
            inter,
            dtype: self.params.dtype(gate_up),
            lengths,
        });
        Ok(())
    }

    /// Room for the result of an operation on the tokens of `x`.
    fn like(&mut self, x: NodeId, width: usize) -> Rows {
        let rows = self.nodes[x.0].rows.rows();
        self.pool.take(rows, width)
    }

    fn width(&self, x: NodeId) -> usize {
        self.nodes[x.0].rows.width()
    }

    fn push(&mut self, op: Op, rows: Rows) -> NodeId {
        let learns = self.is_learning && self.learns(&op);
        self.nodes.push(Node { op, rows, learns, grad: None });
        NodeId(self.nodes.len() - 1)
    }

    /// Whether a gradient of what `op` makes reaches anything that is trained.
    fn learns(&self, op: &Op) -> bool {
        let node = |id: &NodeId| self.nodes[id.0].learns;
        let param = |id: &ParamId| self.params.learning(*id).first().is_some();
        match op {
            Op::Embed { table, .. } => param(table),
            Op::RmsNorm { x, weight } | Op::NormRope { x, weight } => node(x) || param(weight),
            Op::Linear { x, projection: Projection { weight, bias } } => {
                node(x) || param(weight) || bias.as_ref().is_some_and(param)
            }
            Op::Attend { qkv } => qkv.iter().any(node),
            Op::Route { scores, .. } => node(scores),
            Op::Experts { x, gates, experts, .. } => {
                node(x) || node(gates) || self.params.expert_params(*experts).iter().any(param)
            }
            Op::SiluMul { x } => node(x),
            Op::Add { x, y } => node(x) || node(y),
            Op::Layer { .. } => true, // Another is forgotten, not run again.
            Op::Given => false,
        }
    }
}

impl Executor for Tape {
    type Act = NodeId;
    type Matrix = Projection;
    type Vector = ParamId;
    type Bias = Arc<[f32]>;
    type Experts = ExpertsId;
    type Routed = RouteId;
    type Attend<'a> = PackedSequences;

    fn embed(&mut self, table: &Projection, tokens: &[TokenId]) -> Result<NodeId, ModelError> {
        let (vocab_size, width) = self.params.shape(table.weight)?;
        check_vocabulary(tokens, vocab_size)?;
        let mut out = self.pool.take(tokens.len(), width);
        let weight = self.params.values(table.weight)?;
        for (row, token) in out.values_mut().chunks_exact_mut(width).zip(tokens) {
            row.copy_from_slice(&weight[token.index() * width..][..width]);
        }
        if self.params.dtype(table.weight) == Dtype::Bf16 {
            round_to_bf16(out.values_mut());
        }
        drop(weight);
        Ok(self.push(Op::Embed { table: table.weight, tokens: tokens.into() }, out))
    }

    fn rms_norm(&mut self, x: &NodeId, weight: &ParamId) -> Result<NodeId, ModelError> {
        let mut out = self.like(*x, self.width(*x));
        rms_norm(self.values(*x), &self.params.values(*weight)?, self.constants.eps, out.values_mut());
        Ok(self.push(Op::RmsNorm { x: *x, weight: *weight }, out))
    }

    fn linear(&mut self, x: &NodeId, projection: &Projection) -> Result<NodeId, ModelError> {
        let (n, k) = self.params.shape(projection.weight)?;
        let mut out = self.like(*x, n);
        let bias = projection.bias.map(|bias| self.params.values(bias)).transpose()?;
        let weight = self.params.values(projection.weight)?;
        let dtype = self.params.dtype(projection.weight);
        match self.params.packed_matrix(projection.weight) {
            Some(copy) => matmul(self.values(*x), &copy, bias.as_deref(), out.values_mut()),
            None => linear(self.values(*x), (&weight, k), dtype, bias.as_deref(), out.values_mut()),
        }
        drop((bias, weight));
        Ok(self.push(Op::Linear { x: *x, projection: *projection }, out))
    }

    fn norm_rope(
        &mut self,
        x: NodeId,
        weight: &ParamId,
        attend: &PackedSequences,
    ) -> Result<NodeId, ModelError> {
        let mut out = self.like(x, self.width(x));
        rms_norm(self.values(x), &self.params.values(*weight)?, self.constants.eps, out.values_mut());
        rope(out.values_mut(), &attend.positions, &self.rope);
        Ok(self.push(Op::NormRope { x, weight: *weight }, out))
    }

    fn attend(
        &mut self,
        _layer: usize,
        qkv: [NodeId; 3],
        attend: &mut PackedSequences,
    ) -> Result<NodeId, ModelError> {
        let mut out = self.like(qkv[0], self.width(qkv[0]));
        let [q, k, v] = qkv.map(|id| self.nodes[id.0].rows.values());
        self.attention.forward(q, (k, v), &attend.sequences, out.values_mut());
        Ok(self.push(Op::Attend { qkv }, out))
    }

    fn route(
        &mut self,
        scores: NodeId,
        bias: Option<&Arc<[f32]>>,
        layer: usize,
        routing: &mut Routing<'_>,
    ) -> Result<RouteId, ModelError> {
        let (mut choice, router) = (Choice::empty(), self.constants.router);
        let mut out = self.like(scores, router.top_k);
        let biased = Router { config: router, bias: bias.map(|bias| &bias[..]) };
        choose(self.values(scores), biased, layer, routing, &mut choice);
        let replayed = routing.replayed_gates(layer, &choice);
        match replayed {
            Some(replayed) => out.values_mut().copy_from_slice(replayed),
            None => gates(self.values(scores), router, &choice, out.values_mut()),
        }
        let is_live = replayed.is_none();
        Ok(RouteId(self.push(Op::Route { scores, layer, choice, is_live }, out)))
    }

    fn experts(&mut self, x: &NodeId, routed: RouteId, experts: &ExpertsId) -> Result<NodeId, ModelError> {
        let RouteId(gates) = routed;
        let mut out = self.like(*x, self.width(*x));
        let mut trace = self.traces.pop().unwrap_or_default();
        let Op::Route { choice, .. } = &self.nodes[gates.0].op else {
            unreachable!("only the router makes a route")
        };
        let copy = self.params.packed_experts(*experts);
        self.with_operands((*x, gates), *experts, &[choice.n_tokens()], |operands| {
            trace.forward(operands, copy.as_deref(), choice, out.values_mut());
        })?;
        Ok(self.push(Op::Experts { x: *x, gates, experts: *experts, trace }, out))
    }

    fn silu_mul(&mut self, gate_up: NodeId) -> Result<NodeId, ModelError> {
        let inter = self.width(gate_up) / 2;
        let mut out = self.like(gate_up, inter);
        silu_mul(self.values(gate_up), inter, out.values_mut());
        Ok(self.push(Op::SiluMul { x: gate_up }, out))
    }

    /// In the memory of `y`, of which no gradient reads what it was.
    fn add(&mut self, x: NodeId, y: NodeId) -> Result<NodeId, ModelError> {
        let mut out = self.nodes[y.0].rows.take();
        residual::add(self.values(x), out.values_mut());
        Ok(self.push(Op::Add { x, y }, out))
    }

    fn end_layer(&mut self, ends: [NodeId; 2]) -> [NodeId; 2] {
        for node in &self.nodes[self.layer_start..] {
            if let Op::Route { scores, choice, is_live, .. } = &node.op {
                if self.recompute {
                    self.routes.extend_from_slice(choice.ids());
                }
                if self.recompute && !is_live {
                    self.replayed_gates.extend_from_slice(node.rows.values());
                }
                self.ran.push(RanExperts { ids: choice.ids().into(), gates: node.rows.values().into() });
                self.router_scores.push(self.values(*scores).to_vec());
            }
        }
        let index = self.n_layers;
        self.n_layers += 1;
        let [stream, _] = ends;
        let ends = match self.nodes[stream.0].learns {
            false => self.keep_ends(0, Op::Given),
            true if self.recompute => self.keep_ends(self.layer_start, Op::Layer { index }),
            true => ends,
        };
        self.layer_start = self.nodes.len();
        ends
    }

    fn release(&mut self, _act: NodeId) {}
}

impl BuildWeights for Tape {
    fn matrix(&mut self, weight: Named<'_>, bias: Option<Named<'_>>) -> Result<Projection, ModelError> {
        let weight = self.params.add(weight)?;
        Ok(Projection { weight, bias: bias.map(|bias| self.params.add(bias)).transpose()? })
    }

    fn vector(&mut self, weight: Named<'_>) -> Result<ParamId, ModelError> {
        self.params.add(weight)
    }

    fn bias(&mut self, bias: Named<'_>) -> Result<Arc<[f32]>, ModelError> {
        let values: Arc<[f32]> = bias.read()?.into();
        self.fixed.push(FixedTensor { name: bias.name.to_owned(), values: values.clone() });
        Ok(values)
    }

    fn expert_weights(&mut self, gate_up: Named<'_>, down: Named<'_>) -> Result<ExpertsId, ModelError> {
        let (gate_up, down) = (self.params.add(gate_up)?, self.params.add(down)?);
        Ok(self.params.add_experts(gate_up, down))
    }
}
