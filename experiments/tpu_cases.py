"""What `tpu_report` compiles: our kernels, and JAX's own at the same shape (`tpu_programs` has whole programs).

A case is a function of a chip and a shape that gives a `Program`; list it in `CASES`. One with a `kernel` has its
schedule read, one without is judged by its HLO alone. The rounds of loops that depend on data are stated here, in
numbers for a whole call: run the case without them, and the error names the regions that the kernel has.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_ragged

from kernels_pallas.chips import Chip
from kernels_pallas.commit import commit, paged_commit
from kernels_pallas.paged_attention import paged_tree_attention
from kernels_pallas.tree_attention_tpu import tree_attention
from kernels_pallas.write import write


@dataclasses.dataclass(frozen=True)
class Shape:
    """What kernels are compared at.

    Attributes:
      nodes: new positions of a row, whose keys are already written.
      context: positions that a row's last node may see, itself and all nodes included.
      page_size: positions of a page.
    """

    nodes: int = 32
    rows: int = 8
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    context: int = 2048
    page_size: int = 32
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, context {self.context}, {self.heads} query and {self.kv_heads} key heads of "
            f"{self.head_dim}, {self.dtype}"
        )


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of a program.

    Attributes:
      name: how its name in the schedule begins.
      hbm_bytes: that it must move between HBM and the core at least.
      flops: of its matrix products.
      cores: that share its work (v5p has two, for grids that allow it); the schedule is that of one.
      executions: of regions of its schedule that depend on data, in a whole call (see `tpu_schedule.Schedule`).
    """

    name: str
    hbm_bytes: int
    flops: float
    executions: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cores: int = 1


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled.

    Attributes:
      arguments: trees of `jax.ShapeDtypeStruct`; with a sharding where the program runs on more than one device.
      donate: arguments whose memory the outputs may take.
      topology: that it is compiled for; the smallest of the chip by default.
      kernel: whose schedule is read, if any.
      least_copy: copies inside of loops are reported from this size on.
      kv_sizes: of copies that hold one of these array sizes only; all of them count where it is empty.
      kv_bytes: of the donated buffers on a device, all of which must be aliased.
    """

    function: Callable
    arguments: Sequence
    donate: tuple[int, ...] = ()
    topology: str | None = None
    kernel: Kernel | None = None
    least_copy: int = 2**20
    kv_sizes: tuple[int, ...] = ()
    kv_bytes: int = 0


def _bytes(*arrays: jax.ShapeDtypeStruct) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def _queries(shape: Shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.rows, shape.nodes, shape.heads, shape.head_dim), shape.dtype)


def _words(shape: Shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.rows, shape.nodes, -(-shape.nodes // 32)), jnp.uint32)


def _ints(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)


def _buffer(shape: Shape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.rows, shape.kv_heads, shape.context, shape.head_dim), shape.dtype)


def _pages(shape: Shape) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    places = shape.context // shape.page_size
    pool = (shape.rows * places, 2, shape.kv_heads, shape.page_size, shape.head_dim)
    return jax.ShapeDtypeStruct(pool, shape.dtype), _ints(shape.rows, places)


def _attention_flops(shape: Shape) -> float:
    return 4.0 * shape.rows * shape.heads * shape.nodes * shape.context * shape.head_dim


def _streamed(name: str, chip: Chip, shape: Shape, moved: Sequence[jax.ShapeDtypeStruct], paged: bool) -> Kernel:
    """Our attention: all blocks of a row but the last are of the prefix alone, and need no mask."""
    blocks, pages = -(-shape.context // chip.block_keys), chip.block_keys // shape.page_size
    groups = -(-shape.kv_heads // chip.heads_together)
    # Loops over the pages of the first block, of the next one and of this one come before those over heads.
    loop, first_heads = ("1.2", 3) if paged else ("1.1", 1)
    executions = {
        "1b1": shape.rows,
        loop: shape.rows * blocks,
        f"{loop}.{first_heads}": shape.rows * (blocks - 1) * groups,
        f"{loop}b1": shape.rows,
        f"{loop}.{first_heads + 1}": shape.rows * shape.kv_heads,
    }
    if paged:
        executions |= {"1.1": pages, "1.2.1": (shape.rows * blocks - 1) * pages, "1.2.2": shape.rows * blocks * pages}
    return Kernel(name, _bytes(*moved), _attention_flops(shape), executions)


def _tree_attention(chip: Chip, shape: Shape, tree: bool) -> Program:
    q, kv, words = _queries(shape), _buffer(shape), [_words(shape)] if tree else []
    return Program(
        functools.partial(tree_attention, chip=chip),
        (q, kv, kv, _ints(shape.rows), *words),
        kernel=_streamed("tree_attention" if tree else "causal_attention", chip, shape, (q, q, kv, kv, *words), False),
    )


def _paged_tree_attention(chip: Chip, shape: Shape, tree: bool) -> Program:
    q, (pages, table), words = _queries(shape), _pages(shape), [_words(shape)] if tree else []
    name = "paged_tree_attention" if tree else "paged_causal_attention"
    return Program(
        functools.partial(paged_tree_attention, chip=chip),
        (q, pages, table, _ints(shape.rows), *words),
        kernel=_streamed(name, chip, shape, (q, q, pages, *words), True),
    )


def _commit(chip: Chip, shape: Shape, paged: bool) -> Program:
    """A quarter of the nodes is accepted, in every row, and has to move."""
    length, path, accepted = _ints(shape.rows), _ints(shape.rows, shape.nodes), max(1, shape.nodes // 4)
    row_bytes = 2 * shape.rows * shape.kv_heads * shape.head_dim * jnp.dtype(shape.dtype).itemsize
    hbm_bytes, moves = 2 * accepted * row_bytes, shape.rows * accepted
    if paged:
        pages, table = _pages(shape)
        rows, touched = shape.rows, -(-(shape.nodes + shape.page_size - 1) // shape.page_size)
        # Pages of the first row; then in each row pages of the one before to wait for, of the next and of its own,
        # moves, pages to write; those of the last row.
        executions = {"1.1": touched, "1.2": (rows - 1) * touched, "1.3": (rows - 1) * touched, "1b1": rows}
        executions |= {"1.4": rows * touched, "1.5": moves, "1.6": rows * touched, "1.7": touched}
        function = functools.partial(paged_commit, num_rows=shape.nodes, chip=chip)
        kernel = Kernel("paged_commit", hbm_bytes, 0.0, executions)
        return Program(function, (pages, table, length, length, path), donate=(0,), kernel=kernel)
    kv, kernel = _buffer(shape), Kernel("commit", hbm_bytes, 0.0, {"1.1": moves})
    function = functools.partial(commit, num_rows=shape.nodes, chip=chip)
    return Program(function, (kv, kv, length, length, path), donate=(0, 1), kernel=kernel)


def _write(chip: Chip, shape: Shape) -> Program:
    kv, new = (
        _buffer(shape),
        jax.ShapeDtypeStruct((shape.rows, shape.nodes, shape.kv_heads, shape.head_dim), shape.dtype),
    )
    kernel = Kernel("write", 2 * _bytes(new, new), 0.0, {"1.1": shape.rows * shape.nodes})
    function = functools.partial(write, chip=chip)
    return Program(function, (kv, kv, _ints(shape.rows), new, new), donate=(0, 1), kernel=kernel)


def _ragged_paged_attention(chip: Chip, shape: Shape) -> Program:
    """JAX's own, causal, with pages of heads interleaved and blocks of 256 keys."""
    del chip  # It asks the mesh.
    q = jax.ShapeDtypeStruct((shape.rows * shape.nodes, shape.heads, shape.head_dim), shape.dtype)
    places = shape.context // shape.page_size
    pool = (shape.rows * places, shape.page_size, 2 * shape.kv_heads, shape.head_dim)
    pages = jax.ShapeDtypeStruct(pool, shape.dtype)
    function = functools.partial(
        jax_ragged.ragged_paged_attention,
        sm_scale=shape.head_dim**-0.5,
        num_kv_pages_per_block=256 // shape.page_size,
        num_queries_per_block=shape.nodes,
    )
    arguments = (q, pages, _ints(shape.rows), _ints(shape.rows, places), _ints(shape.rows + 1), _ints(1))
    executions = {"1.1": shape.rows, "1.1.1": shape.rows * -(-shape.context // 256)}
    kernel = Kernel("ragged_paged_attention", _bytes(q, q, pages), _attention_flops(shape), executions)
    return Program(function, arguments, kernel=kernel)


def _flash_attention(chip: Chip, shape: Shape) -> Program:
    """JAX's own with a float32 bias as the mask; a group's queries are folded into rows beforehand, at no charge."""
    group = shape.nodes * shape.heads // shape.kv_heads
    q = jax.ShapeDtypeStruct((shape.rows, shape.kv_heads, group, shape.head_dim), shape.dtype)
    bias = jax.ShapeDtypeStruct((shape.rows, shape.kv_heads, group, shape.context), jnp.float32)
    kv, block = _buffer(shape), min(512, shape.context)

    def function(q, k, v, bias):
        sizes = jax_flash.BlockSizes(block_q=group, block_k_major=block, block_k=block, block_b=1)
        return jax_flash.flash_attention(q, k, v, bias, sm_scale=shape.head_dim**-0.5, block_sizes=sizes)

    cores = 2 if chip.name == "v5p" else 1
    kernel = Kernel("flash_attention", _bytes(q, q, kv, kv, bias), _attention_flops(shape), cores=cores)
    return Program(function, (q, kv, kv, bias), kernel=kernel)


CASES: dict[str, Callable[[Chip, Shape], Program]] = {
    "tree_attention": functools.partial(_tree_attention, tree=True),
    "causal_attention": functools.partial(_tree_attention, tree=False),
    "paged_tree_attention": functools.partial(_paged_tree_attention, tree=True),
    "paged_causal_attention": functools.partial(_paged_tree_attention, tree=False),
    "write": _write,
    "commit": functools.partial(_commit, paged=False),
    "paged_commit": functools.partial(_commit, paged=True),
    "ragged_paged_attention": _ragged_paged_attention,
    "flash_attention": _flash_attention,
}

JAX_OWN = ("ragged_paged_attention", "flash_attention")

PEERS = {
    "tree_attention": ("causal_attention", *JAX_OWN),
    "causal_attention": JAX_OWN,
    "paged_tree_attention": ("paged_causal_attention", *JAX_OWN),
    "paged_causal_attention": JAX_OWN,
}
"""What a case is compared with."""
