"""Draft trees: from parents alone to depth, ancestor bits, child order and paths.

Node 0 is the root, the last committed token; every other node is a drafted token. A chain is a tree. The children of
a node are in the order of their numbers, which for a sampled tree is the order they were drawn in.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax.pytree import pytree

MAX_NODES = 128


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static tree. `parents[0]` is -1; every later node comes after its parent (level order is not required).

    Raises:
      ValueError: the parents are not one tree of at most 128 nodes.
    """

    parents: Sequence[int]

    def __post_init__(self):
        try:
            parents = tuple(map(operator.index, self.parents))
        except TypeError:
            raise ValueError(f"parents must be whole numbers, one a node, got {self.parents!r}") from None
        object.__setattr__(self, "parents", parents)
        if not parents or parents[0] != -1:
            raise ValueError(f"node 0 must be the root with parent -1, got parents={parents}")
        check_size(len(parents))
        for node, parent in enumerate(parents[1:], start=1):
            if parent == -1:
                raise ValueError(f"node {node} has parent -1 and is a second root: only node 0 has no parent")
            if not 0 <= parent < len(parents):
                raise ValueError(f"node {node} is an orphan: its parent {parent} is none of the {len(parents)} nodes")
            if parent >= node:
                raise ValueError(
                    f"node {node} has parent {parent}: a parent must be an earlier node (0..{node - 1}), which also "
                    "keeps the nodes from forming a cycle"
                )

    @classmethod
    def chain(cls, length: int) -> "Tree":
        """The root and `length` drafted tokens in a row; `length` 0 is plain decoding."""
        if length < 0:
            raise ValueError(f"a chain has length >= 0, got {length}")
        check_size(length + 1)
        return cls(tuple(range(-1, length)))

    @classmethod
    def branching(cls, widths: Sequence[int]) -> "Tree":
        """Every node of depth i has `widths[i]` children: `(3, 2)` is a root, 3 children and 6 grandchildren."""
        if any(width < 1 for width in widths):
            raise ValueError(f"every level needs at least one child a node, got widths {tuple(widths)}")
        parents, level = [-1], [0]
        for width in widths:
            check_size(len(parents) + len(level) * width)
            level = [parents.append(node) or len(parents) - 1 for node in level for _ in range(width)]
        return cls(tuple(parents))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "Tree":
        """A tree from paths of child ranks, as published for Medusa and EAGLE: `[[0], [1], [0, 0]]`.

        Nodes are ordered by depth, then by path. Every prefix and every elder sibling of a path must be given too.
        """
        paths = [tuple(map(operator.index, path)) for path in paths]
        ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        index = {(): 0} | {path: i for i, path in enumerate(ordered, start=1)}
        if ordered and not ordered[0]:
            raise ValueError("the root is implicit: paths must not be empty")
        missing = sorted({path[:-1] for path in ordered} - index.keys())
        if missing:
            raise ValueError(f"paths without a parent: their prefixes {missing} are not in the list")
        skipped = sorted({(*path[:-1], path[-1] - 1) for path in ordered if path[-1]} - index.keys())
        if skipped:
            raise ValueError(
                f"ranks begin at 0 and must not be skipped: the elder siblings {skipped} are not in the list"
            )
        return cls((-1, *(index[path[:-1]] for path in ordered)))

    @property
    def size(self) -> int:
        """N: nodes with the root."""
        return len(self.parents)

    @functools.cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, self.size - 1))

    @functools.cached_property
    def parents_N(self) -> np.ndarray:
        """int32: -1 for the root."""
        return np.asarray(self.parents, np.int32)

    @functools.cached_property
    def ancestors_NxN(self) -> np.ndarray:
        """bool: `[n, m]` is true where m is n itself or one of its ancestors."""
        return ancestors_of(self.parents_N[None])[0]

    @functools.cached_property
    def ancestor_words_NxW(self) -> np.ndarray:
        """uint32: the ancestors as bits, node m in bit m % 32 of word m // 32."""
        return pack_words(self.ancestors_NxN)

    @functools.cached_property
    def depth_N(self) -> np.ndarray:
        """int32: 0 for the root."""
        return self.ancestors_NxN.sum(1).astype(np.int32) - 1

    @property
    def max_depth(self) -> int:
        return int(self.depth_N.max())

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of every node, in order."""
        return tuple(tuple(np.flatnonzero(self.parents_N == node).tolist()) for node in range(self.size))

    @functools.cached_property
    def rank_N(self) -> np.ndarray:
        """int32: the place of each node among its siblings, 0 first (and for the root)."""
        rank_N = np.zeros(self.size, np.int32)
        for siblings in self.children:
            rank_N[list(siblings)] = np.arange(len(siblings))
        return rank_N

    @property
    def max_children(self) -> int:
        return max(map(len, self.children))

    @functools.cached_property
    def post_order(self) -> np.ndarray:
        """int32: every node after its children, siblings in order; the root is last."""
        order, stack = [], [0]
        while stack:
            order.append(stack.pop())
            stack.extend(self.children[order[-1]])
        return np.asarray(order[::-1], np.int32)

    @property
    def topology(self) -> "Topology":
        """The tree as arrays with a leading axis of 1."""
        return Topology(*map(jnp.asarray, (self.parents_N[None], self.depth_N[None], self.ancestors_NxN[None])))


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """Bounds of trees whose parents are data: they may differ by row and by cycle (see `Proposal.parents_BxN`).

    Attributes:
      size: N, nodes with the root; rows with fewer mark the rest invalid.
      max_depth: of any node.
    """

    size: int
    max_depth: int

    is_chain = False
    max_children = 0
    """Not known before the tree is grown; whoever grows it marks what does not exist invalid."""

    def __post_init__(self):
        check_size(self.size)
        if not 1 <= self.max_depth < self.size:
            raise ValueError(
                f"a tree of {self.size} nodes has a depth between 1 and {self.size - 1}, got {self.max_depth}"
            )


@pytree
class Topology:
    """What parents say, as arrays; the leading axis is 1 where all rows share a static tree.

    Attributes:
      parents_BxN: -1 for the root, otherwise an earlier node.
      depth_BxN: 0 for the root.
      ancestors_BxNxN: `[b, n, m]` is true where m is n itself or one of its ancestors.
    """

    parents_BxN: Int[Array, "B N"]
    depth_BxN: Int[Array, "B N"]
    ancestors_BxNxN: Array

    @classmethod
    def of(cls, parents_BxN: Int[Array, "B N"]) -> "Topology":
        ancestors_BxNxN = ancestors_of(parents_BxN)
        return cls(parents_BxN, ancestors_BxNxN.sum(-1).astype(jnp.int32) - 1, ancestors_BxNxN)

    @property
    def words_BxNxW(self):
        """Ancestor bits, as attention takes them."""
        return pack_words(self.ancestors_BxNxN)

    def path(self, node_B: Int[Array, "B"], num_steps: int) -> Int[Array, "B P"]:
        """The nodes from the root to `node`, one per depth below `num_steps`; N where the path has ended.

        The padding lies out of range on purpose: an index of -1 would wrap to a real row.
        """
        N = self.parents_BxN.shape[1]
        shape = (len(node_B), N)
        above_BxN = jnp.take_along_axis(
            jnp.broadcast_to(self.ancestors_BxNxN, (*shape, N)), node_B[:, None, None], axis=1
        )[:, 0]
        depth_BxN = jnp.where(above_BxN, self.depth_BxN, -1)
        hit_BxPxN = depth_BxN[:, None, :] == jnp.arange(num_steps)[None, :, None]
        return jnp.where(hit_BxPxN.any(-1), jnp.argmax(hit_BxPxN, axis=-1), N).astype(jnp.int32)

    def under_parent(self, values_BxNxV, tokens_BxN):
        """`values[b, parent of n, token of n]`; the root's is meaningless."""
        B, N = tokens_BxN.shape
        parent_BxN = jnp.broadcast_to(jnp.maximum(self.parents_BxN, 0), (B, N))
        return values_BxNxV[jnp.arange(B)[:, None], parent_BxN, tokens_BxN]


def ancestors_of(parents_BxN):
    """bool [B, N, N]: `[b, n, m]` is true where m is n itself or one of its ancestors. NumPy or JAX arrays.

    Each round joins what a node knows with what the node at the end of its knowledge knows, so log2(N) rounds do.
    """
    xp = parents_BxN.__array_namespace__()
    N = parents_BxN.shape[1]
    above_BxN = xp.maximum(parents_BxN, 0)
    seen_BxNxN = xp.broadcast_to(xp.eye(N, dtype=bool)[None], (len(parents_BxN), N, N))
    for _ in range((N - 1).bit_length()):
        seen_BxNxN = seen_BxNxN | xp.take_along_axis(seen_BxNxN, above_BxN[:, :, None], axis=1)
        above_BxN = xp.take_along_axis(above_BxN, above_BxN, axis=1)
    return seen_BxNxN


def pack_words(bits_NxM):
    """uint32 [..., W]: the last axis as bits, m in bit m % 32 of word m // 32. NumPy or JAX arrays."""
    xp = bits_NxM.__array_namespace__()
    *lead, M = bits_NxM.shape
    num_words = -(-M // 32)
    padded = xp.pad(bits_NxM, [(0, 0)] * len(lead) + [(0, num_words * 32 - M)]).astype(np.uint32)
    shift = xp.arange(32, dtype=np.uint32).reshape((1,) * (len(lead) + 1) + (32,))
    return (padded.reshape(*lead, num_words, 32) << shift).sum(-1, dtype=np.uint32)


def check_size(size: int) -> None:
    """Raises ValueError for a number of nodes that no tree may have."""
    if not 1 <= size <= MAX_NODES:
        raise ValueError(f"a tree has between 1 and {MAX_NODES} nodes with its root, got {size}")
