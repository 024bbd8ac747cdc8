import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax as sj
from experiments import measure
from experiments.measure import Spread

GREEDY = sj.SamplingParams(temperature=0.0, max_new_tokens=12)
PROMPT = list(b"abcabcabc")


def test_compilations_are_counted():
    @jax.jit
    def double(x):
        return x * jnp.float32(2.0)

    one, two = np.ones(3, np.float32), np.ones(4, np.float32)
    with measure.counting_compilations() as counted:
        double(one)
    assert counted.count == 1
    with measure.counting_compilations() as again:
        double(one)
    assert again.count == 0
    with measure.counting_compilations() as outer:
        double(two)
        with measure.counting_compilations() as inner:
            double(two)
    assert (outer.count, inner.count, counted.count) == (1, 0, 1)


def test_runs_take_turns():
    order = []
    runs = {name: (lambda name=name: order.append(name) or jnp.zeros(1)) for name in "abc"}
    times = measure.interleaved(runs, repeats=3, warmup=1)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_times_are_of_the_right_run():
    times = measure.interleaved({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, repeats=3, warmup=0)
    assert min(times["slow"]) >= 0.02 > max(times["fast"])
    assert measure.paired_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == Spread(2.0, 1.0, 3.0)


@pytest.mark.parametrize("proposer", [None, sj.propose.PromptLookup(length=3)])
def test_a_timed_call_is_generate(toy, proposer):
    decoder = sj.Decoder(toy, proposer, max_len=64)
    timed, results = measure.timed_generate(decoder, [PROMPT], GREEDY), decoder.generate([PROMPT], GREEDY)
    assert timed.tokens == [results[0].tokens] and timed.stats == results.stats
    assert 0.0 < timed.decode_s < timed.wall_s
    assert timed.decode_tokens == 12


def test_nothing_compiles_after_the_first_call(toy):
    decoder = sj.Decoder(toy, sj.propose.PromptLookup(length=3), max_len=64)
    measure.timed_generate(decoder, [PROMPT], GREEDY)
    with measure.counting_compilations() as counted:
        for length in (1, 5, 40):
            measure.timed_generate(decoder, [list(range(length))], sj.SamplingParams(temperature=0.0, max_new_tokens=9))
        measure.memory(decoder, batch=1)
    assert counted.count == 0


def test_stages_of_a_cycle(toy):
    decoder, plain = sj.Decoder(toy, sj.propose.PromptLookup(length=3), max_len=64), sj.Decoder(toy, max_len=64)
    times = measure.cycle_times(decoder, plain, [PROMPT, PROMPT[:4]], GREEDY, cycles=3)
    for stage in (times.propose, times.verify, times.reconcile, times.plain):
        assert 0.0 < stage.low <= stage.median <= stage.high
    assert times.total == pytest.approx(times.propose.median + times.verify.median + times.reconcile.median)


def test_stages_decode_what_generate_decodes(toy, monkeypatch):
    """The stages are real cycles: the last state they leave holds the text of `generate`."""
    states = []
    reconcile = measure._reconcile
    monkeypatch.setattr(measure, "_reconcile", lambda *args: states.append(reconcile(*args)) or states[-1])
    decoder, plain = sj.Decoder(toy, sj.propose.PromptLookup(length=3), max_len=64), sj.Decoder(toy, max_len=64)
    measure.cycle_times(decoder, plain, [PROMPT], GREEDY, cycles=3)
    new = int(states[-1].num_tokens_B[0]) - len(PROMPT)
    assert new >= 5
    expected = plain.generate([PROMPT], sj.SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True))
    assert states[-1].tokens_BxS[0, len(PROMPT) : len(PROMPT) + new].tolist() == expected[0].tokens


def test_single_steps(toy):
    steps = measure.step_times(toy, in_buffer=20, positions=4, max_len=64, repeats=3)
    assert 0.0 < steps.one.median and 0.0 < steps.many_to_one.low <= steps.many_to_one.high


def test_bookkeeping_accepts_a_part_and_keeps_the_buffer(toy):
    times = measure.bookkeeping_times(toy, batch=2, beam=sj.Beam(6, 3, 2), in_buffer=5, max_len=32, repeats=3)
    assert 0.0 < times.bookkeeping.median and 0.0 < times.ratio.low <= times.ratio.high


def test_memory_is_that_of_the_buffers(toy):
    decoder = sj.Decoder(toy, max_len=64, prefill_chunk=8)
    # Keys and values of one float32 in 72 rows, a length a row, and the length of the tail.
    assert measure.memory(decoder, batch=3).kv == 3 * (2 * 4 * 72 + 4) + 4
    drafted = sj.Decoder(toy, sj.propose.DraftModel(toy, 2, sj.Law.POINT_MASS), max_len=64, prefill_chunk=8)
    # The draft's own, and the scratch row of each of its three nodes.
    assert measure.memory(drafted, batch=3).kv == 2 * measure.memory(decoder, batch=3).kv + 3 * 3 * 4
    assert measure.memory(decoder, batch=3).workspace > 0
