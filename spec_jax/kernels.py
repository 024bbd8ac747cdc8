"""Which implementation of attention, write and commit runs: the Pallas kernels on TPU, plain JAX elsewhere.

A `KVBuffer` carries the choice, since who reads it and how it is laid out belong together. A kernel is one device's
program: where the heads lie on several, each runs it on its own (tensor parallelism), and plain JAX is partitioned by
the compiler.
"""

import dataclasses
import functools
import math

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from kernels_pallas import commit as commit_kernels
from kernels_pallas import lanes, tree_attention_tpu
from kernels_pallas import write as write_kernel
from kernels_pallas.checks import HEAD_DIMS, LANES
from kernels_pallas.chips import CHIPS, Chip, chip_of
from kernels_pallas.tree_attention import tree_attention_reference

IMPLEMENTATIONS = ("auto", "reference", "kernel", "interpret")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """How attention, write and commit run.

    Attributes:
      chip: the TPU that kernels are built for; None runs plain JAX.
      interpret: kernels run on any platform, slowly, to be checked.
      mesh, axis: devices over which the heads lie, and the mesh axis of them. No axis: all heads on each device; no
        mesh: one device.
    """

    chip: Chip | None = None
    interpret: bool = False
    mesh: Mesh | None = None
    axis: str | None = "model"

    @classmethod
    def choose(cls, implementation: str = "auto", head_dim: int = 128, chip: Chip | None = None) -> "Kernels":
        """The choice of that name.

        Args:
          implementation: "auto" takes kernels on a TPU where they are made for the model, plain JAX elsewhere;
            "reference" and "kernel" force either; "interpret" runs the kernels without a TPU.
          head_dim: of the model.
          chip: compile for this TPU; by default the one that is here.

        Raises:
          ValueError: there is no such choice, or kernels are forced where there are none.
        """
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"attention {implementation!r} is not known; expected one of {', '.join(IMPLEMENTATIONS)}")
        if implementation == "reference":
            return cls()
        backend = jax.default_backend()
        if chip is None and backend == "tpu":
            try:
                chip = chip_of(jax.devices()[0].device_kind)
            except ValueError:  # A TPU that kernels were never compiled for.
                if implementation == "kernel":
                    raise
        if implementation == "auto" and (chip is None or head_dim not in HEAD_DIMS):
            return cls()
        if head_dim not in HEAD_DIMS:
            raise ValueError(
                f"attention {implementation!r}: kernels are made for head_dim {', '.join(map(str, HEAD_DIMS))}, the "
                f"model has {head_dim}; use 'reference'"
            )
        if implementation == "interpret":
            return cls(chip or CHIPS["v5e"], interpret=True)
        if chip is None:
            raise ValueError(
                f"attention 'kernel' needs a TPU, and this is {backend}; use 'interpret' to run the kernels anyway, "
                "slowly, or name a chip to compile for"
            )
        return cls(chip)

    def capacity(self, positions: int) -> int:
        """How long a buffer for so many positions must be."""
        return positions if self.chip is None else -(-positions // LANES) * LANES

    def layout(self, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Heads in a row of a buffer, rows of a position, and values in a row (see `kernels_pallas.lanes`)."""
        return (1, num_kv_heads, head_dim) if self.chip is None else lanes.layout(num_kv_heads, head_dim)

    def attend(
        self,
        q_BxNxHxD: Float[Array, "B N H D"],
        k_BxKxSxD: Float[Array, "B K S L"],
        v_BxKxSxD: Float[Array, "B K S L"],
        length_B: Int[Array, "B"],
        words_BxNxW: UInt32[Array, "B N W"] | None,
        scale: float | None,
        tail: Int[Array, ""],
        heads_in_row: int = 1,
    ) -> Float[Array, "B N H D"]:
        """Attention by the contract of `kernels_pallas.tree_attention`, over rows of several heads where there are."""
        if self.chip is None:
            return tree_attention_reference(q_BxNxHxD, k_BxKxSxD, v_BxKxSxD, length_B, words_BxNxW, scale, tail)
        head_dim = q_BxNxHxD.shape[-1]

        def attend(q_BxNxHxD, k_BxKxSxD, v_BxKxSxD, length_B, tail, words_BxNxW=None):
            _, rows, _, width = k_BxKxSxD.shape
            out_BxNxHxD = tree_attention_tpu.tree_attention(
                lanes.pack_queries(q_BxNxHxD, heads_in_row, rows, width),
                k_BxKxSxD,
                v_BxKxSxD,
                length_B,
                words_BxNxW,
                1.0 / math.sqrt(head_dim) if scale is None else scale,
                tail,
                chip=self.chip,
                interpret=self.interpret,
            )
            return lanes.unpack(out_BxNxHxD, heads_in_row, rows, head_dim)

        q, kv, whole = PartitionSpec(None, None, self.axis), PartitionSpec(None, self.axis), PartitionSpec()
        words = () if words_BxNxW is None else (words_BxNxW,)
        specs = (q, kv, kv, whole, whole, *(whole for _ in words))
        return self._on_each_device(attend, specs, q)(q_BxNxHxD, k_BxKxSxD, v_BxKxSxD, length_B, tail, *words)

    def write(
        self,
        k_BxKxSxD: Float[Array, "B K S D"],
        v_BxKxSxD: Float[Array, "B K S D"],
        start_B: Int[Array, "B"],
        new_k_BxNxKxD: Float[Array, "B N K D"],
        new_v_BxNxKxD: Float[Array, "B N K D"],
    ) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
        """Keys and values with new positions of each row from `start` on, by `kernels_pallas.write`."""
        if self.chip is None:
            return (
                write_kernel.write_reference(k_BxKxSxD, start_B, new_k_BxNxKxD),
                write_kernel.write_reference(v_BxKxSxD, start_B, new_v_BxNxKxD),
            )
        kv, new, whole = PartitionSpec(None, self.axis), PartitionSpec(None, None, self.axis), PartitionSpec()
        write = functools.partial(write_kernel.write, chip=self.chip, interpret=self.interpret)
        write = self._on_each_device(write, (kv, kv, whole, new, new), (kv, kv))
        return write(k_BxKxSxD, v_BxKxSxD, start_B, new_k_BxNxKxD, new_v_BxNxKxD)

    def commit(
        self,
        keys: tuple[Float[Array, "B K S D"], ...],
        values: tuple[Float[Array, "B K S D"], ...],
        length_B: Int[Array, "B"],
        count_B: Int[Array, "B"],
        path_BxP: Int[Array, "B P"],
        num_rows: int,
    ) -> tuple[tuple[Float[Array, "B K S D"], ...], tuple[Float[Array, "B K S D"], ...]]:
        """Keys and values of every layer with accepted rows moved, by `kernels_pallas.commit`."""
        if self.chip is None:
            move = functools.partial(
                commit_kernels.commit_reference, length_B=length_B, count_B=count_B, path_BxP=path_BxP
            )
            return tuple(map(move, keys)), tuple(map(move, values))
        kv, whole = PartitionSpec(None, self.axis), PartitionSpec()
        move = functools.partial(commit_kernels.commit, num_rows=num_rows, chip=self.chip, interpret=self.interpret)
        move = self._on_each_device(move, (kv, kv, whole, whole, whole), (kv, kv))
        moved = [move(k, v, length_B, count_B, path_BxP) for k, v in zip(keys, values, strict=True)]
        return tuple(zip(*moved, strict=True))

    def _on_each_device(self, kernel, in_specs, out_specs):
        if self.mesh is None:
            return kernel
        # A kernel says nothing of how its output varies over the mesh.
        return jax.shard_map(kernel, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


REFERENCE = Kernels()
