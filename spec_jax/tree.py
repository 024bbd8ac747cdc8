"""Draft trees: from parents alone to depth, ancestor bits, child order and paths.

Node 0 is the root, the last committed token; every other node is a drafted token. A chain is a tree.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

MAX_NODES = 128


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static tree. `parents[0]` is -1; every later node comes after its parent (level order is not required).

    Raises:
      ValueError: the parents are not one tree of at most 128 nodes.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        parents = self.parents
        if not parents or parents[0] != -1:
            raise ValueError(f"node 0 must be the root with parent -1, got parents={parents}")
        if len(parents) > MAX_NODES:
            raise ValueError(f"a tree has at most {MAX_NODES} nodes with its root, got {len(parents)}")
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"node {node} has parent {parent}: a parent must be an earlier node (0..{node - 1}), "
                    "otherwise the nodes hold a cycle, an orphan or a second root"
                )

    @classmethod
    def chain(cls, length: int) -> "Tree":
        """The root and `length` drafted tokens in a row; `length` 0 is plain decoding."""
        if length < 0:
            raise ValueError(f"a chain has length >= 0, got {length}")
        return cls(tuple(range(-1, length)))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "Tree":
        """A tree from paths of child ranks, as published for Medusa and EAGLE: `[[0], [1], [0, 0]]`.

        Nodes are ordered by depth, then by path. Every prefix of a path must be given too.
        """
        ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        index = {(): 0} | {path: i for i, path in enumerate(ordered, start=1)}
        if ordered and not ordered[0]:
            raise ValueError("the root is implicit: paths must not be empty")
        missing = sorted({path[:-1] for path in ordered} - index.keys())
        if missing:
            raise ValueError(f"paths without a parent: their prefixes {missing} are not in the list")
        return cls((-1, *(index[path[:-1]] for path in ordered)))

    @property
    def size(self) -> int:
        """N: nodes with the root."""
        return len(self.parents)

    @functools.cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, self.size - 1))

    @functools.cached_property
    def ancestors_NxN(self) -> np.ndarray:
        """bool: `[n, m]` is true where m is n itself or one of its ancestors."""
        seen = np.eye(self.size, dtype=bool)
        for node in range(1, self.size):
            seen[node] |= seen[self.parents[node]]
        return seen

    @functools.cached_property
    def ancestor_words_NxW(self) -> np.ndarray:
        """uint32: the ancestors as bits, node m in bit m % 32 of word m // 32."""
        num_words = -(-self.size // 32)
        bits = np.zeros((self.size, num_words * 32), np.uint32)
        bits[:, : self.size] = self.ancestors_NxN
        shifted = bits.reshape(self.size, num_words, 32) << np.arange(32, dtype=np.uint32)
        return shifted.sum(-1, dtype=np.uint32)

    @functools.cached_property
    def depth_N(self) -> np.ndarray:
        """int32: 0 for the root."""
        return self.ancestors_NxN.sum(1).astype(np.int32) - 1

    @property
    def max_depth(self) -> int:
        return int(self.depth_N.max())

    @functools.cached_property
    def path_NxP(self) -> np.ndarray:
        """int32: the nodes from the root to each node, one per depth; `size` where the path has ended.

        The padding lies out of range on purpose: an index of -1 would wrap to a real row.
        """
        path = np.full((self.size, self.max_depth + 1), self.size, np.int32)
        for node in range(self.size):
            above = np.flatnonzero(self.ancestors_NxN[node])
            path[node, : len(above)] = above[np.argsort(self.depth_N[above])]
        return path
