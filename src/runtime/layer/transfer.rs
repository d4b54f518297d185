//! Lists the weights of layers once: for a copy to the storage of a device, and for whatever else visits all of them.

use super::{
    Attention, Block, BlockInput, DeltaNet, LatentAttention, Layer, Mamba, MixtureNorms, Mlp, Moe, Operation,
    ShortConv, Storage, TokenInput,
};
use crate::error::Result;

/// Copies weights from one storage to another. It is called for the weights of a block in the order of their use.
pub trait Transfer<'a, From: Storage, To: Storage> {
    /// Copies a matrix with its bias.
    ///
    /// # Errors
    /// It cannot be copied.
    fn matrix(&mut self, matrix: &'a From::Matrix) -> Result<To::Matrix>;

    /// Copies the matrices of experts.
    ///
    /// # Errors
    /// They cannot be copied.
    fn stack(&mut self, stack: &'a From::Stack) -> Result<To::Stack>;

    /// Copies a vector.
    ///
    /// # Errors
    /// It cannot be copied.
    fn vector(&mut self, vector: &'a From::Vector) -> Result<To::Vector>;

    /// Copies the logits of attention sinks.
    ///
    /// # Errors
    /// They cannot be copied.
    fn sinks(&mut self, sinks: &'a From::Vector) -> Result<To::Vector> {
        self.vector(sinks)
    }
}

/// Copies something that may be absent.
fn optional<A, B>(from: Option<A>, copy: impl FnOnce(A) -> Result<B>) -> Result<Option<B>> {
    from.map(copy).transpose()
}

impl<S: Storage> Layer<S> {
    /// Copies all weights.
    ///
    /// # Errors
    /// A weight cannot be copied.
    pub fn transfer<'a, T: Storage>(&'a self, to: &mut impl Transfer<'a, S, T>) -> Result<Layer<T>> {
        let block = |block: &'a Block<S>| -> Result<Block<T>> {
            Ok(Block {
                input: match &block.input {
                    BlockInput::Normed(norm) => BlockInput::Normed(to.vector(norm)?),
                    BlockInput::Stream => BlockInput::Stream,
                    BlockInput::Previous => BlockInput::Previous,
                },
                operation: block.operation.transfer(to)?,
                post_norm: optional(block.post_norm.as_ref(), |norm| to.vector(norm))?,
            })
        };
        Ok(Layer { blocks: self.blocks.iter().map(block).collect::<Result<_>>()?, scalar: self.scalar })
    }
}

impl<S: Storage> Operation<S> {
    /// Copies all weights.
    ///
    /// # Errors
    /// A weight cannot be copied.
    pub fn transfer<'a, T: Storage>(&'a self, to: &mut impl Transfer<'a, S, T>) -> Result<Operation<T>> {
        Ok(match self {
            Operation::Attention(op) => Operation::Attention(op.transfer(to)?),
            Operation::Latent(op) => Operation::Latent(op.transfer(to)?),
            Operation::ShortConv(op) => Operation::ShortConv(ShortConv {
                width: op.width,
                input: to.matrix(&op.input)?,
                kernel: to.vector(&op.kernel)?,
                bias: optional(op.bias.as_ref(), |bias| to.vector(bias))?,
                output: to.matrix(&op.output)?,
            }),
            Operation::DeltaNet(op) => Operation::DeltaNet(op.transfer(to)?),
            Operation::Mamba(op) => Operation::Mamba(op.transfer(to)?),
            Operation::Mlp(op) => Operation::Mlp(op.transfer(to)?),
            Operation::Moe(op) => Operation::Moe(op.transfer(to)?),
            Operation::Input(op) => {
                Operation::Input(TokenInput { gate: to.matrix(&op.gate)?, projection: to.matrix(&op.projection)? })
            }
        })
    }
}

impl<S: Storage> Attention<S> {
    fn transfer<'a, T: Storage>(&'a self, to: &mut impl Transfer<'a, S, T>) -> Result<Attention<T>> {
        Ok(Attention {
            shape: self.shape,
            q: to.matrix(&self.q)?,
            k: optional(self.k.as_ref(), |k| to.matrix(k))?,
            v: optional(self.v.as_ref(), |v| to.matrix(v))?,
            gate: optional(self.gate.as_ref(), |gate| to.matrix(gate))?,
            head_norms: optional(self.head_norms.as_ref(), |[q, k]| Ok([to.vector(q)?, to.vector(k)?]))?,
            value_norm: optional(self.value_norm.as_ref(), |norm| to.vector(norm))?,
            sinks: optional(self.sinks.as_ref(), |sinks| to.sinks(sinks))?,
            o: to.matrix(&self.o)?,
        })
    }
}

impl<S: Storage> LatentAttention<S> {
    fn transfer<'a, T: Storage>(&'a self, to: &mut impl Transfer<'a, S, T>) -> Result<LatentAttention<T>> {
        Ok(LatentAttention {
            shape: self.shape,
            latent: self.latent,
            q_a: optional(self.q_a.as_ref(), |(q_a, norm)| Ok((to.matrix(q_a)?, to.vector(norm)?)))?,
            q: to.matrix(&self.q)?,
            kv_a: to.matrix(&self.kv_a)?,
            kv_norm: to.vector(&self.kv_norm)?,
            kv_b: to.matrix(&self.kv_b)?,
            o: to.matrix(&self.o)?,
        })
    }
}

impl<S: Storage> DeltaNet<S> {
    fn transfer<'a, T: Storage>(&'a self, to: &mut impl Transfer<'a, S, T>) -> Result<DeltaNet<T>> {
        Ok(DeltaNet {
            sizes: self.sizes,
            q: to.matrix(&self.q)?,
            k: to.matrix(&self.k)?,
            v: to.matrix(&self.v)?,
            z: to.matrix(&self.z)?,
            b: to.matrix(&self.b)?,
            a: to.matrix(&self.a)?,
            kernel: to.vector(&self.kernel)?,
            decay: to.vector(&self.decay)?,
            decay_bias: to.vector(&self.decay_bias)?,
            norm: to.vector(&self.norm)?,
            output: to.matrix(&self.output)?,
        })
    }
}

impl<S: Storage> Mamba<S> {
    fn transfer<'a, T: Storage>(&'a self, to: &mut impl Transfer<'a, S, T>) -> Result<Mamba<T>> {
        Ok(Mamba {
            sizes: self.sizes,
            z: to.matrix(&self.z)?,
            x: to.matrix(&self.x)?,
            b: to.matrix(&self.b)?,
            c: to.matrix(&self.c)?,
            dt: to.matrix(&self.dt)?,
            kernel: to.vector(&self.kernel)?,
            bias: optional(self.bias.as_ref(), |bias| to.vector(bias))?,
            decay: to.vector(&self.decay)?,
            decay_bias: to.vector(&self.decay_bias)?,
            skip: to.vector(&self.skip)?,
            norm: to.vector(&self.norm)?,
            output: to.matrix(&self.output)?,
        })
    }
}

impl<S: Storage> Mlp<S> {
    fn transfer<'a, T: Storage>(&'a self, to: &mut impl Transfer<'a, S, T>) -> Result<Mlp<T>> {
        Ok(Mlp {
            activation: self.activation,
            intermediate: self.intermediate,
            gate: optional(self.gate.as_ref(), |gate| to.matrix(gate))?,
            up: to.matrix(&self.up)?,
            down: to.matrix(&self.down)?,
        })
    }
}

impl<S: Storage> Moe<S> {
    fn transfer<'a, T: Storage>(&'a self, to: &mut impl Transfer<'a, S, T>) -> Result<Moe<T>> {
        Ok(Moe {
            activation: self.activation,
            intermediate: self.intermediate,
            experts: self.experts,
            top_k: self.top_k,
            softmax: self.softmax,
            selection: self.selection,
            router: to.matrix(&self.router)?,
            selection_bias: optional(self.selection_bias.as_ref(), |bias| to.vector(bias))?,
            factors: optional(self.factors.as_ref(), |factors| to.vector(factors))?,
            gate_up: to.stack(&self.gate_up)?,
            down: to.stack(&self.down)?,
            shared: optional(self.shared.as_ref(), |mlp| mlp.transfer(to))?,
            shared_gate: optional(self.shared_gate.as_ref(), |gate| to.matrix(gate))?,
            latent: optional(self.latent.as_ref(), |[down, up]| Ok([to.matrix(down)?, to.matrix(up)?]))?,
            norms: optional(self.norms.as_ref(), |norms| {
                Ok(MixtureNorms {
                    mlp_output: to.vector(&norms.mlp_output)?,
                    router_input: to.vector(&norms.router_input)?,
                    expert_input: to.vector(&norms.expert_input)?,
                    expert_output: to.vector(&norms.expert_output)?,
                })
            })?,
        })
    }
}
