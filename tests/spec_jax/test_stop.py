"""Cutting runs of tokens, against a plain-Python model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import SamplingParams, stop
from spec_jax.contract import ContractError
from spec_jax.stop import LENGTH, RUNNING, STOP, StopRows
from tests.toys import BYTES, ByteTokenizer

_cut = jax.jit(stop.cut)


class Model:
    """What `StopRows.create` asks of a target."""

    def __init__(self, pieces=None, vocab_size=64, eos=()):
        self.tokenizer = None if pieces is None else ByteTokenizer(pieces)
        self.vocab_size = vocab_size if pieces is None else len(pieces)
        self.eos_token_ids = eos


def cut_one(tokens, budget, params, model, count=None):
    rows = StopRows.create([params], model)
    count = len(tokens) if count is None else count
    run = jnp.asarray([tokens], jnp.int32)
    emitted, reason, _ = _cut(rows, run, jnp.array([count], jnp.int32), jnp.array([budget], jnp.int32))
    return int(emitted[0]), int(reason[0])


@pytest.mark.smoke
def test_stop_and_budget_whichever_comes_first():
    run, params = [10, 11, 12, 20, 21, 22], SamplingParams(stop_token_ids=(12,))
    assert cut_one(run, 5, params, Model()) == (3, STOP)
    assert cut_one(run, 3, params, Model()) == (3, STOP)  # a stop at the budget's last token is a stop
    assert cut_one(run, 2, params, Model()) == (2, LENGTH)
    assert cut_one(run, 9, SamplingParams(stop_token_ids=(22,)), Model()) == (6, STOP)
    assert cut_one(run, 5, SamplingParams(stop_token_ids=(22,)), Model()) == (5, LENGTH)
    assert cut_one(run, 9, SamplingParams(), Model()) == (6, RUNNING)
    assert cut_one(run, 6, SamplingParams(), Model()) == (6, LENGTH)


@pytest.mark.parametrize("depth", [0, 1, 4, 5])
def test_eos_anywhere_in_the_run(depth):
    run = [30, 31, 32, 33, 34, 35]
    model = Model(eos=(run[depth],))
    assert cut_one(run, 9, SamplingParams(), model) == (depth + 1, STOP)
    assert cut_one(run, 9, SamplingParams(ignore_eos=True), model) == (6, RUNNING)


def test_tokens_behind_the_run_do_not_stop_it():
    assert cut_one([5, 6, 7], 9, SamplingParams(stop_token_ids=(7,)), Model(), count=2) == (2, RUNNING)


def test_a_row_without_tokens_keeps_its_state():
    rows = StopRows.create([SamplingParams(stop=("ab",))], Model([b"a", b"b"]))
    emitted, reason, after = _cut(rows, jnp.array([[0, 1]], jnp.int32), *(jnp.array([n], jnp.int32) for n in (0, 0)))
    assert int(emitted[0]) == 0 and int(reason[0]) == RUNNING
    np.testing.assert_array_equal(after.state_B, rows.state_B)


PIECES = [b"a", b"b", b"c", b"ab", b"ca", b"bca", b"", "é".encode(), b"\xc3", b"\xa9"]
STRINGS = [("abc",), ("bb", "cab"), ("aa",), ("abab", "ba"), ("é",), ("c",), ()]


def test_stop_strings_over_token_and_cycle_borders():
    """Random runs in random pieces: the automaton stops exactly where the text first contains a stop string."""
    rng = np.random.default_rng(0)
    model = Model(PIECES)
    stopped = 0
    params = [SamplingParams(stop=strings) for strings in STRINGS]
    for _ in range(60):
        rows, done = StopRows.create(params, model), [False] * len(STRINGS)
        text = [b""] * len(STRINGS)
        for _ in range(4):
            run = rng.integers(0, len(PIECES), (len(STRINGS), 5))
            count = np.where(done, 0, rng.integers(1, 6, len(STRINGS)))
            emitted, reason, rows = _cut(
                rows, jnp.asarray(run, jnp.int32), jnp.asarray(count, jnp.int32), jnp.full(len(STRINGS), 99, jnp.int32)
            )
            for row, strings in enumerate(STRINGS):
                want = int(count[row])
                for n in range(int(count[row])):
                    text[row] += PIECES[run[row, n]]
                    if any(s.encode() in text[row] for s in strings):
                        want, done[row] = n + 1, True
                        break
                assert int(emitted[row]) == want
                assert (int(reason[row]) == STOP) == (done[row] and want > 0)
                stopped += int(reason[row]) == STOP
    assert stopped > 100


def test_text_is_cut_before_the_first_stop_string():
    assert stop.cut_text(b"one two three", ("three", "two")) == b"one "
    assert stop.cut_text(b"one", ("two",)) == b"one"


def test_held_back_is_the_longest_possible_beginning():
    assert stop.held_back(b"xxab", ("abc", "bd")) == 2
    assert stop.held_back(b"xxabc", ("abc",)) == 0
    assert stop.held_back(b"xx", ()) == 0


def test_bad_stops_are_refused():
    with pytest.raises(ContractError, match="stop token id 64 is outside the vocabulary 0..63"):
        StopRows.create([SamplingParams(stop_token_ids=(64,))], Model())
    special = Model([*BYTES, b""])
    special.tokenizer.encode = lambda text: [256]
    with pytest.raises(ContractError, match=r"special token, which has no text; use stop_token_ids=\[256\]"):
        StopRows.create([SamplingParams(stop=("<|end|>",))], special)
    with pytest.raises(ContractError, match="need a target with a tokenizer"):
        StopRows.create([SamplingParams(stop=("x",))], Model())
