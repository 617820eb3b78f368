//! The small set of operations the transformer is written over, and the weights it needs.

use r3_core::ids::TokenId;
use r3_kernels::router::{RouterConfig, Routing};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::source::{Lent, SELECTION_BIAS, TensorSource};

/// What runs the operations of [`crate::forward::forward`].
///
/// Activations are f32 `[T, n]`. An operation takes its input by value when no later one reads it, so that an
/// executor with its own buffers can work in place.
pub trait Executor {
    /// Activations of `T` tokens.
    type Act;
    /// A projection `y = x Wᵀ + b`, `W` `[N, K]`.
    type Matrix;
    /// The weight of a norm.
    type Vector;
    /// A bias of a router's choice.
    type Bias;
    /// All experts of one layer.
    type Experts;
    /// A layer's choice of experts with its gates: the only way into [`Self::experts`].
    type Routed;
    /// How tokens see each other: which sequence, which position, where keys and values are kept.
    type Attend<'a>;

    /// Rows of the embedding table, `[T, D]`.
    fn embed(&mut self, table: &Self::Matrix, tokens: &[TokenId]) -> Result<Self::Act, ModelError>;
    /// RMSNorm over `D`.
    fn rms_norm(&mut self, x: &Self::Act, weight: &Self::Vector) -> Result<Self::Act, ModelError>;
    /// `x Wᵀ + b`.
    fn linear(&mut self, x: &Self::Act, matrix: &Self::Matrix) -> Result<Self::Act, ModelError>;
    /// [`Self::linear`] of the same `x` by the projections of queries, keys and values.
    fn qkv(&mut self, x: &Self::Act, [q, k, v]: [&Self::Matrix; 3]) -> Result<[Self::Act; 3], ModelError> {
        Ok([self.linear(x, q)?, self.linear(x, k)?, self.linear(x, v)?])
    }
    /// RMSNorm of every head of `x` `[T, H * hd]`, then the rotary embedding of its position.
    fn norm_rope(
        &mut self,
        x: Self::Act,
        weight: &Self::Vector,
        attend: &Self::Attend<'_>,
    ) -> Result<Self::Act, ModelError>;
    /// Causal attention of `layer`, `[T, H * hd]`.
    fn attend(
        &mut self,
        layer: usize,
        qkv: [Self::Act; 3],
        attend: &mut Self::Attend<'_>,
    ) -> Result<Self::Act, ModelError>;
    /// Chooses experts from router logits `[T, E]`, as `routing` says, for MoE layer `layer` of `0..L`.
    fn route(
        &mut self,
        scores: Self::Act,
        bias: Option<&Self::Bias>,
        layer: usize,
        routing: &mut Routing<'_>,
    ) -> Result<Self::Routed, ModelError>;
    /// The gated sum of each token's experts, `[T, D]`.
    fn experts(
        &mut self,
        x: &Self::Act,
        routed: Self::Routed,
        experts: &Self::Experts,
    ) -> Result<Self::Act, ModelError>;
    /// `silu(gate) * up` of `[T, 2F]`.
    fn silu_mul(&mut self, gate_up: Self::Act) -> Result<Self::Act, ModelError>;
    /// `x + y`.
    fn add(&mut self, x: Self::Act, y: Self::Act) -> Result<Self::Act, ModelError>;
    /// `x + y` and its RMSNorm.
    fn add_rms_norm(
        &mut self,
        x: Self::Act,
        y: Self::Act,
        weight: &Self::Vector,
    ) -> Result<[Self::Act; 2], ModelError> {
        let x = self.add(x, y)?;
        let h = self.rms_norm(&x, weight)?;
        Ok([x, h])
    }
    /// Says that a layer ends with the residual stream and its norm, and that nothing else it made is needed again.
    fn end_layer(&mut self, ends: [Self::Act; 2]) -> [Self::Act; 2] {
        ends
    }
    /// Says that `act` is no longer needed.
    fn release(&mut self, act: Self::Act);
}

/// Refuses tokens that a vocabulary of `vocab_size` does not have.
///
/// # Errors
/// The first such token, with its position.
pub fn check_vocabulary(tokens: &[TokenId], vocab_size: usize) -> Result<(), ModelError> {
    match tokens.iter().position(|token| token.index() >= vocab_size) {
        None => Ok(()),
        Some(position) => {
            Err(ModelError::TokenOutOfRange { token: tokens[position].0, position, vocab_size })
        }
    }
}

/// Makes an executor's weights out of f32 tensors.
pub trait BuildWeights: Executor {
    /// A projection from `weight` `[N, K]` and its optional bias `[N]`, by canonical name.
    fn matrix(&mut self, weight: Named<'_>, bias: Option<Named<'_>>) -> Result<Self::Matrix, ModelError>;
    /// The weight of a norm.
    fn vector(&mut self, weight: Named<'_>) -> Result<Self::Vector, ModelError>;
    /// A bias `[E]` of a router's choice. No gradient reaches it: it stays as it is read.
    fn bias(&mut self, bias: Named<'_>) -> Result<Self::Bias, ModelError>;
    /// A layer's experts from `gate_up` `[E, 2I, D]` and `down` `[E, D, I]`.
    fn expert_weights(&mut self, gate_up: Named<'_>, down: Named<'_>) -> Result<Self::Experts, ModelError>;
}

/// A tensor on its way into an executor.
#[derive(Clone, Copy)]
pub struct Named<'a> {
    /// Canonical name.
    pub name: &'a str,
    /// Its shape.
    pub shape: &'a [usize],
    /// Where its values are read, row-major, and which may hold them packed as well.
    pub source: &'a dyn TensorSource,
}

impl<'a> Named<'a> {
    /// Its values, in memory of their own.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn read(self) -> Result<Vec<f32>, ModelError> {
        let mut values = Vec::new();
        self.source.read(self.name, &mut values)?;
        Ok(values)
    }

    /// Its values, where they lie or read.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn values(self) -> Result<Lent<'a>, ModelError> {
        match self.source.lend(self.name) {
            Some(values) => Ok(values),
            None => Ok(Box::new(self.read()?)),
        }
    }
}

/// All weights of one model, held the way executor `E` wants them.
pub struct Weights<E: Executor> {
    /// Shape and constants.
    pub config: ModelConfig,
    /// Embedding table `[V, D]`.
    pub embed: E::Matrix,
    /// Decoder layers in order.
    pub layers: Vec<Layer<E>>,
    /// Final norm.
    pub norm: E::Vector,
    /// Output head `[V, D]`; `None` when it is the embedding table.
    pub head: Option<E::Matrix>,
}

/// One decoder layer.
pub struct Layer<E: Executor> {
    /// Norm before attention.
    pub input_norm: E::Vector,
    /// Query projection `[H * hd, D]`.
    pub q: E::Matrix,
    /// Key projection `[Hkv * hd, D]`.
    pub k: E::Matrix,
    /// Value projection `[Hkv * hd, D]`.
    pub v: E::Matrix,
    /// Output projection `[D, H * hd]`.
    pub o: E::Matrix,
    /// Per-head norm of queries `[hd]`.
    pub q_norm: E::Vector,
    /// Per-head norm of keys `[hd]`.
    pub k_norm: E::Vector,
    /// Norm before the MLP.
    pub post_norm: E::Vector,
    /// What follows attention.
    pub mlp: Mlp<E>,
}

/// The second half of a layer.
pub enum Mlp<E: Executor> {
    /// A router over experts.
    Moe {
        /// Router `[E, D]`.
        router: E::Matrix,
        /// What is added to its scores for the choice, `[E]`.
        bias: Option<E::Bias>,
        /// The experts.
        experts: E::Experts,
        /// What every token takes beside its own.
        shared: Option<DenseMlp<E>>,
    },
    /// One MLP for every token.
    Dense(DenseMlp<E>),
}

/// An MLP without a router.
pub struct DenseMlp<E: Executor> {
    /// Gate rows, then up rows, `[2F, D]`.
    pub gate_up: E::Matrix,
    /// `[D, F]`.
    pub down: E::Matrix,
}

impl<E: BuildWeights> Weights<E> {
    /// Reads every tensor of `source` into executor `exec`'s own form.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn load(exec: &mut E, config: &ModelConfig, source: &dyn TensorSource) -> Result<Self, ModelError> {
        let mut reader = Reader { exec, config, source };
        let embed = reader.matrix("model.embed_tokens", [config.vocab_size, config.hidden_size], false)?;
        let layers = (0..config.n_layers).map(|layer| reader.layer(layer)).collect::<Result<_, _>>()?;
        let norm = reader.vector("model.norm.weight", config.hidden_size)?;
        let head = if config.tied_head {
            None
        } else {
            Some(reader.matrix("lm_head", [config.vocab_size, config.hidden_size], false)?)
        };
        Ok(Self { config: config.clone(), embed, layers, norm, head })
    }
}

struct Reader<'a, E> {
    exec: &'a mut E,
    config: &'a ModelConfig,
    source: &'a dyn TensorSource,
}

impl<E: BuildWeights> Reader<'_, E> {
    fn layer(&mut self, layer: usize) -> Result<Layer<E>, ModelError> {
        let config = self.config;
        let (d, hd, bias) = (config.hidden_size, config.head_dim, config.attention_bias);
        let (q_rows, kv_rows) = (config.n_heads * hd, config.n_kv_heads * hd);
        let at = |suffix: &str| format!("model.layers.{layer}.{suffix}");
        Ok(Layer {
            input_norm: self.vector(&at("input_layernorm.weight"), d)?,
            q: self.matrix(&at("self_attn.q_proj"), [q_rows, d], bias)?,
            k: self.matrix(&at("self_attn.k_proj"), [kv_rows, d], bias)?,
            v: self.matrix(&at("self_attn.v_proj"), [kv_rows, d], bias)?,
            o: self.matrix(&at("self_attn.o_proj"), [d, q_rows], bias)?,
            q_norm: self.vector(&at("self_attn.q_norm.weight"), hd)?,
            k_norm: self.vector(&at("self_attn.k_norm.weight"), hd)?,
            post_norm: self.vector(&at("post_attention_layernorm.weight"), d)?,
            mlp: self.mlp(&at("mlp"), config.is_moe[layer])?,
        })
    }

    fn mlp(&mut self, prefix: &str, is_moe: bool) -> Result<Mlp<E>, ModelError> {
        let (d, config) = (self.config.hidden_size, self.config);
        if !is_moe {
            return Ok(Mlp::Dense(self.dense(prefix, config.dense_inter)?));
        }
        let router = self.matrix(&format!("{prefix}.gate"), [config.n_experts, d], false)?;
        let bias =
            config.selection_bias.then(|| self.bias(&format!("{prefix}.{SELECTION_BIAS}"))).transpose()?;
        let (gate_up, down) =
            (format!("{prefix}.experts.gate_up_proj"), format!("{prefix}.experts.down_proj"));
        let (e, inter, source) = (config.n_experts, config.moe_inter, self.source);
        let experts = self.exec.expert_weights(
            Named { name: &gate_up, shape: &[e, 2 * inter, d], source },
            Named { name: &down, shape: &[e, d, inter], source },
        )?;
        let shared = match config.shared_inter {
            0 => None,
            inter => Some(self.dense(&format!("{prefix}.shared_experts"), inter)?),
        };
        Ok(Mlp::Moe { router, bias, experts, shared })
    }

    fn dense(&mut self, prefix: &str, inter: usize) -> Result<DenseMlp<E>, ModelError> {
        let d = self.config.hidden_size;
        Ok(DenseMlp {
            gate_up: self.matrix(&format!("{prefix}.gate_up_proj"), [2 * inter, d], false)?,
            down: self.matrix(&format!("{prefix}.down_proj"), [d, inter], false)?,
        })
    }

    fn bias(&mut self, name: &str) -> Result<E::Bias, ModelError> {
        self.exec.bias(Named { name, shape: &[self.config.n_experts], source: self.source })
    }

    fn matrix(&mut self, prefix: &str, shape: [usize; 2], has_bias: bool) -> Result<E::Matrix, ModelError> {
        let (weight_name, bias_name) = (format!("{prefix}.weight"), format!("{prefix}.bias"));
        let source = self.source;
        let weight = Named { name: &weight_name, shape: &shape, source };
        let bias = has_bias.then_some(Named { name: &bias_name, shape: &shape[..1], source });
        self.exec.matrix(weight, bias)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<E::Vector, ModelError> {
        self.exec.vector(Named { name, shape: &[len], source: self.source })
    }
}

/// Constants an executor needs beside the weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// Epsilon of every norm.
    pub eps: f32,
    /// How the router scores.
    pub router: RouterConfig,
}
