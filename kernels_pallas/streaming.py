"""The Pallas body that attention over a contiguous buffer and over pages share: softmax streamed over key blocks.

A grid step is a *task*: one row of the batch and one block of its queries, all heads. Its keys and values come in
blocks of `block_keys` positions, copied from HBM into two alternating buffers; while one block is worked on, the next
(of the next task, behind a task's last) is on its way. Blocks behind a row's last position are not read.

Only blocks that reach behind the committed prefix are masked: all other keys are seen by every query. The mask of such
a block is made once and used by all heads.

The schedule is built for the vector unit, which limits these kernels rather than memory does. The queries of a group
are folded into rows, so that a head is one product of [M, D] with [D, keys]. Scores take a detour through VMEM and
maxima stay per lane until a head's block is complete: few values are alive at a time, and the compiler can work on the
scores of one head and the weights of the one before together. Sums of weights stay per lane until the end.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.checks import LANES, KernelError
from kernels_pallas.chips import Chip
from kernels_pallas.tree_attention import MASKED

_QUERY_TILE = 128  # Rows of queries worked on at once.
_QUERY_BLOCK = 256  # Most rows of queries in a task.
_SUBLANES = 16  # Rows come in multiples of a packed bfloat16 register.


def attention(
    q_BxNxHxD: jax.Array,
    kv: tuple[jax.Array, ...],
    fetch: Callable,
    prefetch: tuple[jax.Array, ...],
    length_B: jax.Array,
    words_BxNxW: jax.Array | None,
    scale: float | None,
    tail: jax.Array | int,
    *,
    num_kv_heads: int,
    capacity: int,
    chip: Chip,
    name: str,
    interpret,
) -> jax.Array:
    """Attention over keys and values in HBM that `fetch` knows how to copy.

    Args:
      kv: arrays that stay in HBM.
      fetch: called in the kernel as `fetch(prefetch refs, kv refs, buffer, semaphore, row, start, end)`, where
        `buffer` is [2, K, block_keys, D] in VMEM; returns `start` and `wait`, functions of no argument, for positions
        `start` to `min(start + block_keys, end)` of a row.
      prefetch: int32 arrays that `fetch` reads as scalars.
      capacity: positions of a row, a multiple of 128.
      name: of the kernel, for profiles and reports.

    The other arguments and the result are those of the reference.
    """
    B, N, H, D = q_BxNxHxD.shape
    K, G, W = num_kv_heads, H // num_kv_heads, 1 if words_BxNxW is None else words_BxNxW.shape[2]
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    nodes = N if N * G <= _QUERY_BLOCK else max(_SUBLANES, _QUERY_BLOCK // G // _SUBLANES * _SUBLANES)
    tasks = pl.cdiv(N, nodes)
    M = pl.cdiv(nodes * G, _SUBLANES) * _SUBLANES
    if M > _QUERY_TILE:
        M = pl.cdiv(M, _QUERY_TILE) * _QUERY_TILE
    itemsize = q_BxNxHxD.dtype.itemsize
    width = pl.cdiv(D, LANES) * LANES  # What a row of D values occupies in VMEM.
    fixed_bytes = 4 * M * (K * width + 2 * (K + 1) * LANES) + 4 * itemsize * M * K * width
    bytes_per_key = 4 * itemsize * K * width + 12 * M
    block_keys = chip.keys_in_block(fixed_bytes, bytes_per_key, capacity)
    if not block_keys:
        needed = (fixed_bytes + 128 * bytes_per_key) / 2**20
        raise KernelError(
            f"queries {q_BxNxHxD.shape} {q_BxNxHxD.dtype} with {K} key heads need {needed:.0f} MiB for a block of 128 "
            f"keys, and a {chip.name} has {chip.vmem_bytes / 2**21:.0f} MiB to spare; lay the heads over more devices"
        )

    def fold(x_BxNxKxGxX):  # [B, N, K, G, X] to [B, K, tasks * M, X]
        X = x_BxNxKxGxX.shape[-1]
        x = jnp.pad(x_BxNxKxGxX, ((0, 0), (0, tasks * nodes - N), (0, 0), (0, 0), (0, 0)))
        x = x.transpose(0, 2, 1, 3, 4).reshape(B, -1, tasks, nodes * G, X)
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, M - nodes * G), (0, 0))).reshape(B, -1, tasks * M, X)

    q_BxKxMxD = fold(q_BxNxHxD.reshape(B, N, K, G, D))
    if words_BxNxW is None:  # Of a chain the kernel needs the number of each query.
        bits_BxNxW = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[None, :, None], (B, N, 1))
    else:
        bits_BxNxW = lax.bitcast_convert_type(words_BxNxW, jnp.int32)
    words_BxMxW = fold(jnp.broadcast_to(bits_BxNxW[:, :, None, None], (B, N, 1, G, W)))[:, 0]
    if not interpret:
        # XLA would otherwise move a small cache into VMEM and write it back whole, every step.
        kv = tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in kv)
    body = functools.partial(
        _kernel,
        fetch=fetch,
        num_prefetch=len(prefetch),
        num_kv=len(kv),
        num_new=N,
        nodes=nodes,
        capacity=capacity,
        scale=scale,
        is_tree=words_BxNxW is not None,
        heads_together=math.gcd(K, chip.heads_together),
    )
    out_BxKxMxD = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2 + len(prefetch),
            grid=(B, tasks),
            in_specs=[
                pl.BlockSpec((1, K, M, D), lambda b, i, *_: (b, 0, i, 0)),
                pl.BlockSpec((1, M, W), lambda b, i, *_: (b, i, 0)),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in kv),
            ],
            out_specs=pl.BlockSpec((1, K, M, D), lambda b, i, *_: (b, 0, i, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, 2, K, block_keys, D), q_BxNxHxD.dtype),
                pltpu.VMEM((K, M, D), jnp.float32),
                pltpu.VMEM((K, M, LANES), jnp.float32),
                pltpu.VMEM((K, M, LANES), jnp.float32),
                pltpu.VMEM((2, M, LANES), jnp.float32),
                pltpu.VMEM((2, M, block_keys), jnp.float32),
                pltpu.VMEM((M, block_keys), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BxKxMxD.shape, q_BxKxMxD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            # Beside what is counted the compiler keeps spilled registers there.
            vmem_limit_bytes=max(16 * 2**20, 2 * (fixed_bytes + bytes_per_key * block_keys)),
        ),
        name=name,
        interpret=interpret,
    )(length_B, jnp.asarray(tail, jnp.int32).reshape(1), *prefetch, q_BxKxMxD, words_BxMxW, *kv)
    out = out_BxKxMxD.reshape(B, K, tasks, M, D)[:, :, :, : nodes * G].reshape(B, K, tasks * nodes, G, D)
    return out.transpose(0, 2, 1, 3, 4).reshape(B, tasks * nodes, H, D)[:, :N]


def _kernel(
    # Prefetch
    length_ref,  # [B]
    tail_ref,  # [1]
    *refs,
    # The rest, in this order: scalars of `fetch`;
    # Input
    #   q_ref [1, K, M, D], words_ref [1, M, W] (of a chain: the queries' numbers), key and value arrays in HBM
    # Output
    #   o_ref [1, K, M, D]
    # Scratch
    #   kv_ref [2, 2, K, block_keys, D]: buffers of a block's keys and values
    #   acc_ref [K, M, D]: weighted sums of values
    #   max_ref [K, M, 128]: maximum of the scores so far, the same in all lanes
    #   sum_ref [K, M, 128]: sum of weights so far, by lane
    #   decay_ref [2, M, 128]: what a head's new maximum makes of its older sums
    #   scores_ref [2, M, block_keys]: of a block and head, before scaling; two heads at a time
    #   seen_ref [M, block_keys]: the mask of a block
    #   sems [2], slot_ref [1]: which buffer is being filled
    fetch,
    num_prefetch: int,
    num_kv: int,
    num_new: int,
    nodes: int,
    capacity: int,
    scale: float,
    is_tree: bool,
    heads_together: int,
):
    prefetch_refs, refs = refs[:num_prefetch], refs[num_prefetch:]
    (q_ref, words_ref), kv_hbm_refs, refs = refs[:2], refs[2 : 2 + num_kv], refs[2 + num_kv :]
    o_ref, kv_ref, acc_ref, max_ref, sum_ref, decay_ref, scores_ref, seen_ref, sems, slot_ref = refs
    row, task, num_rows, num_tasks = pl.program_id(0), pl.program_id(1), pl.num_programs(0), pl.num_programs(1)
    K, M, D = q_ref.shape[1:]
    block_keys, exponent = scores_ref.shape[2], scale * math.log2(math.e)
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    def end(row, task):  # One behind the last position that a query of the task may see.
        new = num_new if is_tree else jnp.minimum(num_new, (task + 1) * nodes)
        return jnp.minimum(length_ref[row] + tail_ref[0] + new, capacity)

    def first_key(block):  # The last block of a full row is moved back to fit; its mask knows.
        return pl.multiple_of(jnp.minimum(block * block_keys, capacity - block_keys), LANES)

    def transfer(row, task, block, slot):
        return fetch(prefetch_refs, kv_hbm_refs, kv_ref.at[slot], sems.at[slot], row, first_key(block), end(row, task))

    @pl.when((row == 0) & (task == 0))
    def _():
        slot_ref[0] = 0
        transfer(0, 0, 0, 0)[0]()

    acc_ref[...] = jnp.zeros_like(acc_ref)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    max_ref[...] = jnp.full_like(max_ref, MASKED)
    num_blocks = pl.cdiv(end(row, task), block_keys)

    def across(x_Mx128, width):  # The same lanes again, up to a width.
        return jnp.concatenate([x_Mx128] * (width // LANES), axis=1) if width > LANES else x_Mx128[:, :width]

    def score(slot, head, parity, masked):
        for at in range(0, M, _QUERY_TILE):
            rows = pl.ds(at, min(M, _QUERY_TILE))
            best = None
            for key in range(0, block_keys, LANES):
                s = lax.dot_general(
                    q_ref[0, head, rows, :],
                    kv_ref[slot, 0, head, pl.ds(key, LANES), :],
                    (((1,), (1,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
                if masked:  # A selection: whatever lies in rows nobody wrote, the score of an unseen key is finite.
                    s = jnp.where(seen_ref[rows, pl.ds(key, LANES)] != 0, s, MASKED)
                scores_ref[parity, rows, pl.ds(key, LANES)] = s
                best = s if best is None else jnp.maximum(best, s)
            old = max_ref[head, rows, :]
            new = jnp.maximum(old, jnp.max(best, axis=1, keepdims=True))
            max_ref[head, rows, :] = new
            decay_ref[parity, rows, :] = jnp.exp2((old - new) * exponent)

    def weigh(slot, head, parity, masked):
        step = min(block_keys, 2 * LANES)  # Keys in one product; block_keys may be an odd number of registers.
        for at in range(0, M, _QUERY_TILE):
            rows = pl.ds(at, min(M, _QUERY_TILE))
            best, decay = max_ref[head, rows, :], decay_ref[parity, rows, :]
            total = values = None
            for first in range(0, block_keys, step):
                keys = min(step, block_keys - first)
                weights = []
                for key in range(first, first + keys, LANES):
                    w = jnp.exp2((scores_ref[parity, rows, pl.ds(key, LANES)] - best) * exponent)
                    total = w if total is None else total + w
                    weights.append(w.astype(kv_ref.dtype))
                v = kv_ref[slot, 1, head, pl.ds(first, keys), :]
                if masked:
                    v = _finite(v)
                part = lax.dot_general(
                    jnp.concatenate(weights, axis=1),
                    v,
                    (((1,), (0,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
                values = part if values is None else values + part
            sum_ref[head, rows, :] = sum_ref[head, rows, :] * decay + total
            acc_ref[head, rows, :] = acc_ref[head, rows, :] * across(decay, D) + values

    def attend(slot, masked, together):
        def heads(first):
            score(slot, first, 0, masked)
            for i in range(together):
                if i + 1 < together:
                    score(slot, first + i + 1, (i + 1) % 2, masked)
                weigh(slot, first + i, i % 2, masked)

        lax.fori_loop(0, K // together, lambda turn, _: heads(turn * together), None)

    def mask(block):
        position = first_key(block) + lax.broadcasted_iota(jnp.int32, (M, block_keys), 1)
        behind = position - length_ref[row]
        if is_tree:
            word = jnp.broadcast_to(words_ref[0, :, :1], (M, block_keys))
            for w in range(1, words_ref.shape[2]):
                word = jnp.where(behind >> 5 == w, jnp.broadcast_to(words_ref[0, :, w : w + 1], word.shape), word)
            seen = jnp.where(behind < 32 * words_ref.shape[2], word >> (behind & 31) & 1, 0)
        else:
            node = jnp.broadcast_to(words_ref[0], (M, block_keys))
            seen = jnp.where(behind <= tail_ref[0] + node, 1, 0)
        seen = jnp.where(behind < 0, 1, jnp.where(position < end(row, task), seen, 0))
        seen_ref[...] = jnp.where(position >= block * block_keys, seen, 0)

    def work(block, _):
        slot = slot_ref[0]
        last = block + 1 == num_blocks
        next_row = jnp.where(last & (task + 1 == num_tasks), row + 1, row)
        next_task = jnp.where(last, jnp.where(task + 1 == num_tasks, 0, task + 1), task)

        @pl.when(next_row < num_rows)
        def _():
            transfer(next_row, next_task, jnp.where(last, 0, block + 1), 1 - slot)[0]()

        transfer(row, task, block, slot)[1]()
        slot_ref[0] = 1 - slot
        masked = (block + 1) * block_keys > jnp.minimum(length_ref[row], capacity)

        @pl.when(jnp.logical_not(masked))
        def _():
            attend(slot, False, heads_together)

        @pl.when(masked)
        def _():
            mask(block)
            # Masks and a second head's values together do not fit the registers.
            attend(slot, True, 1)

    lax.fori_loop(0, num_blocks, work, None)
    for head in range(K):
        total = jnp.sum(sum_ref[head], axis=1, keepdims=True)
        o_ref[0, head] = (acc_ref[head] / total).astype(o_ref.dtype)


def _finite(x):
    """The values of x [R, D] that are finite numbers, and zeros: a weight of zero does not hide a NaN."""
    if x.dtype == jnp.float32:
        exponent = pltpu.bitcast(x, jnp.int32) & 0x7F800000
        return jnp.where(exponent == 0x7F800000, 0.0, x)
    # A register holds pairs of rows; not every chip can select among 16-bit values.
    pairs = pltpu.bitcast(x, jnp.int32)
    low, high = 0x7F80, 0x7F800000
    kept = jnp.where(pairs & low == low, 0, 0xFFFF) | jnp.where(pairs & high == high, 0, jnp.int32(-(2**16)))
    return pltpu.bitcast(pairs & kept, x.dtype)
