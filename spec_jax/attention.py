"""The one attention operation that prefill, verification, drafting and training share.

Prefix by length, tail by ancestor bits. Models call `attend` with the KV buffer and a layer number; how the buffer is
laid out is its own business, and which implementation runs that of its `kernels`.
"""

from jaxtyping import Array, Float, UInt32

from spec_jax.kv import KVBuffer


def attend(
    q_BxNxHxD: Float[Array, "B N H D"],
    kv: KVBuffer,
    layer: int,
    words_BxNxW: UInt32[Array, "B N W"] | None,
    scale: float | None = None,
) -> Float[Array, "B N H D"]:
    """Attention of N new positions over the committed prefix and their own ancestors.

    Args:
      q_BxNxHxD: queries of the new positions, rotary embedding applied.
      kv: the buffer; the new positions' keys and values are already written by `kv.write(layer, ...)`.
      layer: which layer's rows to read.
      words_BxNxW: ancestor bits over the rows behind the committed ones, or None for a chain (each sees all before it).
      scale: factor on the scores, 1/sqrt(D) by default.

    Returns:
      [B, N, H, D] in the dtype of the queries.
    """
    return kv.kernels.attend(
        q_BxNxHxD, kv.keys[layer], kv.values[layer], kv.length_B, words_BxNxW, scale, kv.tail, kv.heads_in_row
    )
