"""One decoder for the Llama family, over a KV buffer and a tree of new positions."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from models.config import LlamaConfig
from models.errors import ModelError
from models.linear import input_first, matmul
from spec_jax.attention import attend
from spec_jax.kv import KVBuffer


def _param(init, shape: tuple[int, ...], dtype: str, rngs: nnx.Rngs | None) -> nnx.Param:
    """A parameter, or only its shape and dtype where there are no `rngs`: a checkpoint gives the values."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(dtype)))


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, width: int, config: LlamaConfig, rngs: nnx.Rngs | None):
        self.weight = _param(jax.nn.initializers.ones, (width,), config.dtype, rngs)
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*axes E"]) -> Float[Array, "*axes E"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        weight_E = self.weight[...].astype(jnp.float32)
        return (x32 * jnp.expand_dims(weight_E, tuple(range(x.ndim - 1)))).astype(x.dtype)


class Linear(nnx.Module):
    """A product with a weight, and a bias where the family has one; `models.linear` says how the weight is stored."""

    def __init__(self, width: int, out: int, use_bias: bool, config: LlamaConfig, rngs: nnx.Rngs | None):
        self.input_first = input_first(config.dtype)
        init = jax.nn.initializers.normal(width**-0.5)
        shape = (width, out) if self.input_first else (out, width)
        self.weight = _param(init, shape, config.dtype, rngs)
        self.bias = _param(jax.nn.initializers.zeros, (out,), config.dtype, rngs) if use_bias else None

    def __call__(self, x_BxNxE: Float[Array, "B N E"]) -> Float[Array, "B N O"]:
        y_BxNxO = matmul(x_BxNxE, self.weight[...], self.input_first)
        return y_BxNxO if self.bias is None else y_BxNxO + self.bias[...][None, None, :]


class Embedding(nnx.Module):
    """A row for every token, [V, E]: the table that tokens are looked up in, or the output head, or both."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs | None):
        init = jax.nn.initializers.normal(config.model_dim**-0.5)
        self.weight = _param(init, (config.vocab_size, config.model_dim), config.dtype, rngs)

    def __call__(self, tokens_BxN: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        return jax.lax.platform_dependent(self.weight[...], tokens_BxN, cpu=_rows_on_cpu, default=_rows)


def _rows(weight_VxE, tokens_BxN):
    return jnp.take(weight_VxE, tokens_BxN, axis=0, mode="clip")


def _rows_on_cpu(weight_VxE, tokens_BxN):
    if weight_VxE.dtype != jnp.bfloat16:
        return _rows(weight_VxE, tokens_BxN)
    # As bits: XLA:CPU would convert the whole table to float32 to look up a row of bfloat16. (XLA:TPU copies the table
    # to see it as bits.)
    bits_BxNxE = _rows(jax.lax.bitcast_convert_type(weight_VxE, jnp.uint16), tokens_BxN)
    return jax.lax.bitcast_convert_type(bits_BxNxE, jnp.bfloat16)


class Rotary:
    """Cosines and sines of one set of positions, shared by all layers; the halves of a head form the pairs."""

    def __init__(self, config: LlamaConfig, positions_BxN: Int[Array, "B N"]):
        frequencies_R = jnp.asarray(config.rope_frequencies())
        angles_BxNx1xR = positions_BxN.astype(jnp.float32)[:, :, None, None] * frequencies_R[None, None, None, :]
        self.cos_BxNx1xR, self.sin_BxNx1xR = jnp.cos(angles_BxNx1xR), jnp.sin(angles_BxNx1xR)

    def __call__(self, x_BxNxHxD: Float[Array, "B N H D"]) -> Float[Array, "B N H D"]:
        half = self.cos_BxNx1xR.shape[-1]
        first, second = (x_BxNxHxD[..., i * half : (i + 1) * half].astype(jnp.float32) for i in range(2))
        rotated = [
            first * self.cos_BxNx1xR - second * self.sin_BxNx1xR,
            second * self.cos_BxNx1xR + first * self.sin_BxNx1xR,
        ]
        rotated = [part.astype(x_BxNxHxD.dtype) for part in rotated]
        return jnp.concatenate([*rotated, x_BxNxHxD[..., 2 * half :]], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention over the buffer's committed prefix and the new positions' own ancestors."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs | None):
        # One product for queries, keys and values: fewer, larger ones are faster everywhere. Its features come in a
        # group for each key/value head, [its query heads | key | value], so that heads can be shared out over devices.
        self.qkv = Linear(config.model_dim, config.q_width + 2 * config.kv_width, config.attention_bias, config, rngs)
        self.o = Linear(config.q_width, config.model_dim, config.output_bias, config, rngs)
        self.q_norm = RMSNorm(config.head_dim, config, rngs) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config, rngs) if config.qk_norm else None
        self.group_shape = config.num_kv_heads, config.num_heads // config.num_kv_heads + 2, config.head_dim

    def __call__(
        self,
        x_BxNxE: Float[Array, "B N E"],
        rotary: Rotary,
        kv: KVBuffer,
        layer: int,
        words_BxNxW: UInt32[Array, "B N W"] | None,
    ) -> tuple[Float[Array, "B N E"], KVBuffer]:
        batch, num_nodes, _ = x_BxNxE.shape
        # J: a group's heads.
        qkv_BxNxKxJxD = self.qkv(x_BxNxE).reshape(batch, num_nodes, *self.group_shape)
        q_BxNxHxD = qkv_BxNxKxJxD[..., :-2, :].reshape(batch, num_nodes, -1, self.group_shape[-1])
        k_BxNxKxD, v_BxNxKxD = qkv_BxNxKxJxD[..., -2, :], qkv_BxNxKxJxD[..., -1, :]
        if self.q_norm is not None:
            q_BxNxHxD, k_BxNxKxD = self.q_norm(q_BxNxHxD), self.k_norm(k_BxNxKxD)
        kv = kv.write(layer, rotary(k_BxNxKxD), v_BxNxKxD)
        out_BxNxHxD = attend(rotary(q_BxNxHxD), kv, layer, words_BxNxW)
        return self.o(out_BxNxHxD.reshape(batch, num_nodes, -1)), kv


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs | None):
        # One product as in attention, in groups of [gate | up].
        self.num_groups = config.mlp_groups
        self.gate_up = Linear(config.model_dim, 2 * config.mlp_dim, config.mlp_bias, config, rngs)
        self.down = Linear(config.mlp_dim, config.model_dim, config.mlp_bias, config, rngs)

    def __call__(self, x_BxNxE: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        batch, num_nodes, _ = x_BxNxE.shape
        gate_up_BxNxGx2xF = self.gate_up(x_BxNxE).reshape(batch, num_nodes, self.num_groups, 2, -1)
        hidden_BxNxGxF = jax.nn.silu(gate_up_BxNxGx2xF[..., 0, :]) * gate_up_BxNxGx2xF[..., 1, :]
        return self.down(hidden_BxNxGxF.reshape(batch, num_nodes, -1))


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs | None):
        self.attention_norm = RMSNorm(config.model_dim, config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.model_dim, config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(
        self,
        x_BxNxE: Float[Array, "B N E"],
        rotary: Rotary,
        kv: KVBuffer,
        layer: int,
        words_BxNxW: UInt32[Array, "B N W"] | None,
    ) -> tuple[Float[Array, "B N E"], KVBuffer]:
        update_BxNxE, kv = self.attention(self.attention_norm(x_BxNxE), rotary, kv, layer, words_BxNxW)
        x_BxNxE = x_BxNxE + update_BxNxE
        return x_BxNxE + self.mlp(self.mlp_norm(x_BxNxE)), kv


class Llama(nnx.Module):
    """The whole decoder. Layers are unrolled: stacking them under a scan costs a copy of each weight on CPU."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs | None = None):
        """With `rngs` a random model; without, one of shapes only, to be filled from a checkpoint."""
        self.config = config
        self.embedding = Embedding(config, rngs)
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.model_dim, config, rngs)
        untied = not config.tied_embeddings
        self.head = Embedding(config, rngs) if untied else None

    def __call__(
        self,
        tokens_BxN: Int[Array, "B N"],
        positions_BxN: Int[Array, "B N"],
        kv: KVBuffer,
        words_BxNxW: UInt32[Array, "B N W"] | None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B N V"], tuple[Float[Array, "B N E"], ...], KVBuffer]:
        """Scores N new positions of every row; see `spec_jax.target.Target.forward`. Logits are float32.

        Raises:
          ModelError: a tap outside 0..num_layers+1.
        """
        last_tap = len(self.layers) + 1
        if any(not 0 <= tap <= last_tap for tap in taps):
            raise ModelError(f"taps {taps} asked for; this model has taps 0..{last_tap}")
        rotary = Rotary(self.config, positions_BxN)
        stream_BxNxE = self.embedding(tokens_BxN)
        tapped = {0: stream_BxNxE}
        for layer, block in enumerate(self.layers):
            stream_BxNxE, kv = block(stream_BxNxE, rotary, kv, layer, words_BxNxW)
            tapped[layer + 1] = stream_BxNxE
        final_BxNxE = tapped[last_tap] = self.norm(stream_BxNxE)
        head = self.embedding if self.head is None else self.head
        logits_BxNxV = matmul(final_BxNxE, head.weight[...], out_dtype=jnp.dtype("float32"))
        return logits_BxNxV, tuple(tapped[tap] for tap in taps), kv
