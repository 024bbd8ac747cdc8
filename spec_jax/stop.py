"""The commit contract: where a run of accepted tokens is cut.

A cycle emits the accepted tokens and one more; the run is cut behind the first end-of-text token, stop id or
token that completes a stop string, or at the budget, whichever comes first. A stop at the budget's last token is a
stop. Stop strings are found on device: an automaton over bytes is compiled on the host into a table of tokens.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spec_jax.contract import ContractError
from spec_jax.pytree import pytree
from spec_jax.sampling import SamplingParams

RUNNING, STOP, LENGTH, ERROR = range(4)
REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}

# States of the table that every set of strings shares: no strings asked for, and a string completed.
_IDLE, _MATCHED = 0, 1


@pytree
class StopRows:
    """The stop conditions of a batch.

    Attributes:
      ids_BxM: stop token ids of each row, padded with an id outside the vocabulary.
      table_QxV: next state of the stop-string automaton by state and token.
      state_B: the state of each row.
    """

    ids_BxM: Int[Array, "B M"]
    table_QxV: Int[Array, "Q V"]
    state_B: Int[Array, "B"]

    @classmethod
    def create(cls, params: Sequence[SamplingParams], target: Any) -> "StopRows":
        """Compiles the stop conditions of one request per row.

        Raises:
          ContractError: a stop id lies outside the vocabulary, or stop strings without a tokenizer.
        """
        ids = [_stop_ids(p, target) for p in params]
        # A power of two, so that few different programs are compiled.
        width = _power_of_two(max(map(len, ids), default=1), 4)
        ids_BxM = np.full((len(ids), width), target.vocab_size, np.int32)
        for row, values in zip(ids_BxM, ids, strict=True):
            row[: len(values)] = values
        table_QxV, state_B = _string_table([p.stop for p in params], target)
        return cls(jnp.asarray(ids_BxM), jnp.asarray(table_QxV), jnp.asarray(state_B))


def cut(
    stop: StopRows,
    tokens_BxP: Int[Array, "B P"],
    count_B: Int[Array, "B"],
    budget_B: Int[Array, "B"],
) -> tuple[Int[Array, "B"], Int[Array, "B"], StopRows]:
    """Cuts a run of tokens at the first stop or at the budget.

    Args:
      tokens_BxP: the run; entries from `count` on are ignored.
      count_B: its length.
      budget_B: tokens that each row may still emit, at least 1 for a row with tokens.

    Returns:
      How many tokens are emitted, the reason each row ends (RUNNING if it does not), and the advanced automaton.
    """
    P = tokens_BxP.shape[1]
    index_1xP = jnp.arange(P)[None, :]
    state_BxP = _advance(stop, tokens_BxP)
    stops_BxP = jnp.any(tokens_BxP[:, :, None] == stop.ids_BxM[:, None, :], axis=-1) | (state_BxP == _MATCHED)
    stops_BxP &= index_1xP < count_B[:, None]
    stop_length_B = jnp.where(jnp.any(stops_BxP, axis=1), jnp.argmax(stops_BxP, axis=1) + 1, P + 1)
    emitted_B = jnp.minimum(jnp.minimum(count_B, stop_length_B), budget_B).astype(jnp.int32)
    ran_B = emitted_B > 0
    reason_B = jnp.where(ran_B & (emitted_B == budget_B), LENGTH, RUNNING)
    reason_B = jnp.where(ran_B & (emitted_B == stop_length_B), STOP, reason_B)
    last_Bx1 = jnp.take_along_axis(state_BxP, jnp.maximum(emitted_B - 1, 0)[:, None], axis=1)
    state_B = jnp.where(ran_B, last_Bx1[:, 0], stop.state_B)
    return emitted_B, reason_B, dataclasses.replace(stop, state_B=state_B)


def cut_text(data: bytes, strings: Sequence[str]) -> bytes:
    """The text before the first occurrence of any stop string."""
    starts = [data.find(text.encode()) for text in strings]
    return data[: min((s for s in starts if s >= 0), default=len(data))]


def held_back(data: bytes, strings: Sequence[str]) -> int:
    """How many bytes at the end of a text may be the beginning of a stop string."""
    prefixes = (text.encode()[:n] for text in strings for n in range(1, len(text.encode())))
    return max((len(prefix) for prefix in prefixes if data.endswith(prefix)), default=0)


def _advance(stop: StopRows, tokens_BxP) -> Int[Array, "B P"]:
    def step(state_B, token_B):
        state_B = stop.table_QxV[state_B, token_B]
        return state_B, state_B

    _, state_PxB = jax.lax.scan(step, stop.state_B, tokens_BxP.T)
    return state_PxB.T


def _stop_ids(params: SamplingParams, target) -> tuple[int, ...]:
    for token in params.stop_token_ids:
        if not 0 <= token < target.vocab_size:
            raise ContractError(f"stop token id {token} is outside the vocabulary 0..{target.vocab_size - 1}")
    return params.stop_token_ids + (() if params.ignore_eos else tuple(target.eos_token_ids))


def _string_table(stops: Sequence[tuple[str, ...]], target):
    """One table for the batch: the automata of the different sets of strings, one behind the other."""
    if any(stops) and target.tokenizer is None:
        raise ContractError("stop strings need a target with a tokenizer; use stop_token_ids instead")
    for text in {text for strings in stops for text in strings}:
        ids = target.tokenizer.encode(text)
        if not any(map(target.tokenizer.token_bytes, ids)):
            raise ContractError(f"stop string {text!r} is a special token, which has no text; use stop_token_ids={ids}")
    idle_2xV = np.repeat(np.array([[_IDLE], [_MATCHED]], np.int32), target.vocab_size, axis=1)
    tables, starts = [idle_2xV], {(): _IDLE}
    for strings in sorted(set(stops) - {()}):
        first = sum(map(len, tables))
        starts[strings] = first
        tables.append(_token_table(strings, target.tokenizer, target.vocab_size, first))
    table = np.concatenate(tables)
    states = _power_of_two(len(table), 2)
    table = np.pad(table, ((0, states - len(table)), (0, 0)))
    return table, np.asarray([starts[s] for s in stops], np.int32)


@functools.lru_cache(maxsize=32)
def _token_table(strings: tuple[str, ...], tokenizer, vocab_size: int, first: int) -> np.ndarray:
    """Next state by state and token for one set of strings, whose states are numbered from `first`."""
    byte_Qx256 = _byte_automaton(strings)
    num_states = len(byte_Qx256)
    # State num_states is "matched": absorbing.
    byte_Qx256 = np.concatenate([byte_Qx256, np.full((1, 256), num_states, np.int32)])
    data = [tokenizer.token_bytes(token) for token in range(vocab_size)]
    state_QxV = np.repeat(np.arange(num_states, dtype=np.int32)[:, None], vocab_size, axis=1)
    for index in range(max(map(len, data))):
        longer = np.asarray([token for token, text in enumerate(data) if len(text) > index])
        byte = np.asarray([data[token][index] for token in longer])
        state_QxV[:, longer] = byte_Qx256[state_QxV[:, longer], byte[None, :]]
    return np.where(state_QxV == num_states, _MATCHED, state_QxV + first)


def _byte_automaton(strings: tuple[str, ...]) -> np.ndarray:
    """Aho-Corasick over UTF-8 bytes: next state by state and byte; a completed string goes to state `len`."""
    children, ends = [{}], [False]
    for text in strings:
        node = 0
        for byte in text.encode():
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                ends.append(False)
            node = children[node][byte]
        ends[node] = True
    table = np.zeros((len(children), 256), np.int32)
    fail = [0] * len(children)
    queue = collections.deque([0])
    while queue:
        node = queue.popleft()
        ends[node] |= ends[fail[node]]
        if node:
            table[node] = table[fail[node]]
        for byte, child in children[node].items():
            fail[child] = table[fail[node], byte] if node else 0
            table[node, byte] = child
            queue.append(child)
    return np.where(np.asarray(ends)[table], len(children), table)


def _power_of_two(value: int, least: int) -> int:
    return max(least, 1 << (value - 1).bit_length())
