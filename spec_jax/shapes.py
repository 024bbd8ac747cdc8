"""Which tree to draft: published choices, the best tree for measured acceptance, and trees written as text.

Sizes count the root, as everywhere; a depth is that of the deepest node. A tree's worth is the expected number of
tokens of a cycle, acceptance length tau: the root counts 1, since a cycle always commits one token of the target's own,
and every other node counts the chance that it is accepted.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spec_jax.growth import Beam
from spec_jax.tree import Tree, check_size


def _paths(text: str) -> tuple[tuple[int, ...], ...]:
    """One path a word, one digit a rank."""
    return tuple(tuple(map(int, path)) for path in text.split())


PUBLISHED: Mapping[str, tuple[tuple[int, ...], ...]] = {
    # Medusa (Cai et al., arXiv 2401.10774), medusa_choices.py.
    "medusa_mc_sim_7b_63": _paths(
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 "
        "0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    ),
    # EAGLE (Li et al., arXiv 2401.15077), choices.py: the same name there, another tree.
    "eagle_mc_sim_7b_63": _paths(
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ),
}
"""Paths of child ranks, in the order of their publication; the root is implicit."""


def published(name: str) -> Tree:
    """The tree of that name in `PUBLISHED`.

    Raises:
      ValueError: there is none.
    """
    if name not in PUBLISHED:
        raise ValueError(f"no published tree is called {name!r}; choose one of {', '.join(PUBLISHED)}")
    return Tree.from_paths(PUBLISHED[name])


def expected_tokens(tree: Tree, acceptance: Sequence[float] | np.ndarray) -> float:
    """Expected tokens of a cycle: over all nodes, the sum of the product of `acceptance[rank]` down the path.

    Args:
      acceptance: `[b]`, the probability that the b-th child is the accepted one, given that its parent was accepted.

    Raises:
      ValueError: `acceptance` holds no such probabilities, or fewer than a node of the tree has children.
    """
    (acceptance_R,) = _probabilities("acceptance", [acceptance])
    if len(acceptance_R) < tree.max_children:
        raise ValueError(
            f"the tree has nodes of {tree.max_children} children: acceptance must give a probability for each, "
            f"got {len(acceptance_R)}"
        )
    chance_N = np.append(1.0, acceptance_R[tree.rank_N[1:]])
    return float(np.where(tree.ancestors_NxN, chance_N[None, :], 1.0).prod(1).sum())


def sequoia(acceptance: Sequence[float] | np.ndarray, size: int, max_depth: int | None = None) -> Tree:
    """The tree of greatest expected number of tokens (Sequoia's dynamic programme: Chen et al., arXiv 2402.12374).

    Args:
      acceptance: `[b]`, the probability that the b-th child is the accepted one, given that its parent was accepted.
        No node gets more children than there are probabilities.
      size: nodes with the root, exactly.
      max_depth: of any node; None sets no bound.

    Returns:
      The tree in level order.

    Raises:
      ValueError: `acceptance` holds no such probabilities, or there is no tree of that size within the bounds.
    """
    if max_depth is not None and max_depth < 1:
        raise ValueError(f"max_depth must be >= 1, or None for no bound, got {max_depth}")
    check_size(size)
    levels = size - 1 if max_depth is None else min(max_depth, size - 1)
    return _best(_probabilities("acceptance", [acceptance]).repeat(levels, 0), size)


def search(accuracy_DxR: Sequence[Sequence[float]] | np.ndarray, size: int) -> Tree:
    """The tree of greatest expected number of tokens by depth and rank (Medusa's search: arXiv 2401.10774, 2.3.3).

    Medusa takes the nodes of greatest product greedily, the next sibling or the first child at a time. That is the
    best tree only where accuracy falls with rank, which a measured table need not do in its tail; so this is
    Sequoia's programme over a table by depth, which gives the same worth there and the best elsewhere.

    Args:
      accuracy_DxR: `[d, r]`, the chance that the rank-r candidate at depth d + 1 is right, given that everything above
        it is. The tree is at most D deep, and no node gets more than R children.
      size: nodes with the root, exactly.

    Returns:
      The tree in level order.

    Raises:
      ValueError: `accuracy_DxR` is no such table, or there is no tree of that size within it.
    """
    check_size(size)
    return _best(_probabilities("accuracy", accuracy_DxR)[: size - 1], size)


def plan(
    acceptance: Sequence[float] | np.ndarray,
    sizes: Sequence[int],
    depths: Sequence[int],
    t_draft: float,
    t_target: Callable[[int], float],
) -> tuple[Tree, float]:
    """The tree that costs least time per token on this hardware (Sequoia, arXiv 2402.12374).

    Minimises `(depth * t_draft + t_target(size)) / expected tokens` over Sequoia's trees of all sizes and depth bounds,
    with the tree's own depth, which may lie below its bound. Size 1 is plain decoding.

    Args:
      acceptance: as in `sequoia`.
      sizes: to choose from. `t_target` is asked once for each.
      depths: bounds to choose from. A pair of size and bound that no tree fits is passed over.
      t_draft: seconds to draft one level.
      t_target: seconds to score that many nodes.

    Returns:
      The tree and its expected seconds per token.

    Raises:
      ValueError: what `sequoia` refuses; a time that is none; no pair of size and bound fits.
    """
    if not sizes or not depths or min(depths) < 1:
        raise ValueError(f"give at least one size and one depth >= 1, got sizes {list(sizes)}, depths {list(depths)}")
    for size in sizes:
        check_size(size)
    levels = min(max(depths), max(sizes) - 1)
    worth_LxM, taken_LxRxM = _table(_probabilities("acceptance", [acceptance]).repeat(levels, 0), max(sizes))
    choices = []
    for size in sizes:
        scoring = t_target(size)
        if not (0.0 < scoring < np.inf and 0.0 <= t_draft < np.inf):
            raise ValueError(f"times must be seconds, got t_draft={t_draft} and t_target({size})={scoring}")
        for level in {min(depth, levels) for depth in depths}:
            if worth_LxM[level, size] > 0.0:
                tree = _read(taken_LxRxM, level, size)
                choices.append((tree, float((tree.max_depth * t_draft + scoring) / worth_LxM[level, size])))
    if not choices:
        raise ValueError(
            f"{len(acceptance)} children a node and depths {list(depths)} hold no tree of the sizes {list(sizes)}"
        )
    return min(choices, key=lambda choice: choice[1])


FORMS = f"""\
  4                      a chain of 4 drafted tokens; 0 is plain decoding
  3x2x1                  every node of depth 0, 1, 2 has 3, 2, 1 children
  paths:0/1/0.0/0.1      nodes by the ranks on their path
  beam:SIZExDEPTHxWIDTH  grown by beam (EAGLE-2: beam:60x6x10)
  opt:SIZExDEPTH         grown by OPT-Tree
  a published tree       {", ".join(PUBLISHED)}"""


def parse(text: str) -> Tree | Beam:
    """The tree that a command line names; see `FORMS`.

    Raises:
      ValueError: the text has none of the forms, or what it names is no tree of at most 128 nodes.
    """
    if text in PUBLISHED:
        return published(text)
    *kind, rest = text.split(":")
    if kind == ["paths"] and re.fullmatch(r"\d+([./]\d+)*", rest):
        paths = {tuple(map(int, path.split("."))) for path in rest.split("/")}
        return Tree.from_paths(paths)
    if re.fullmatch(r"\d+(x\d+)*", rest):
        match kind, [int(number) for number in rest.split("x")]:
            case [], [length]:
                return Tree.chain(length)
            case [], widths:
                return Tree.branching(widths)
            case ["beam"], [size, depth, width]:
                return Beam(size, depth, width)
            case ["opt"], [size, depth]:
                return Beam.opt_tree(size, depth)
    raise ValueError(f"{text!r} names no tree; the forms are\n{FORMS}")


def _probabilities(name: str, table_DxR) -> np.ndarray:
    table_DxR = np.asarray(table_DxR, np.float64)
    if table_DxR.ndim != 2 or not table_DxR.size:
        raise ValueError(f"{name} must hold one probability per child rank, got shape {table_DxR.shape}")
    # Siblings are different tokens, of which at most one is accepted.
    if not ((table_DxR >= 0.0) & (table_DxR <= 1.0)).all() or (table_DxR.sum(1) > 1.0 + 1e-6).any():
        raise ValueError(
            f"{name} must be probabilities in [0, 1] that sum to at most 1 over siblings, got {table_DxR.tolist()}"
        )
    return table_DxR


def _table(accuracy_DxR: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequoia's programme, from the leaves up; level l has l more levels below it, of the last l rows.

    Returns:
      worth_LxM: the most expected tokens below and with a node of level l that has m nodes; -inf where no tree is so.
      taken_LxRxM: how many of m nodes below a node of level l go to its child r, when children before r have theirs.
    """
    (D, R), M = accuracy_DxR.shape, size + 1
    worth_LxM = np.full((D + 1, M), -np.inf)
    worth_LxM[0, 1] = 1.0
    taken_LxRxM = np.zeros((D + 1, R, M), np.int64)
    left_MxM = np.arange(M)[:, None] - np.arange(M)[None, :]
    left_MxM = np.where(left_MxM >= 0, left_MxM, M)
    for level in range(1, D + 1):
        below_M, rest_M = worth_LxM[level - 1], np.where(np.arange(M) == 0, 0.0, -np.inf)
        for rank in reversed(range(R)):
            child_M = np.full(M, -np.inf)
            np.multiply(below_M, accuracy_DxR[D - level, rank], out=child_M, where=below_M > 0.0)
            total_MxM = child_M[None, :] + np.append(rest_M, -np.inf)[left_MxM]
            taken_LxRxM[level, rank] = total_MxM.argmax(1)
            rest_M = np.append(0.0, total_MxM.max(1)[1:])
        worth_LxM[level, 1:] = 1.0 + rest_M[:-1]
    return worth_LxM, taken_LxRxM


def _read(taken_LxRxM: np.ndarray, level: int, size: int) -> Tree:
    paths, stack = [], [((), level, size - 1)]
    while stack:
        path, level, left = stack.pop()
        rank = 0
        while left:
            taken = int(taken_LxRxM[level, rank, left])
            paths.append((*path, rank))
            stack.append((paths[-1], level - 1, taken - 1))
            left, rank = left - taken, rank + 1
    return Tree.from_paths(paths)


def _best(accuracy_DxR: np.ndarray, size: int) -> Tree:
    D, R = accuracy_DxR.shape
    most = sum(R**depth for depth in range(D + 1))
    if size > most:
        raise ValueError(f"{R} children a node and depth {D} make at most {most} nodes with the root, got size {size}")
    return _read(_table(accuracy_DxR, size)[1], D, size)
