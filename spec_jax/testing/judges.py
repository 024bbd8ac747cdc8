"""Judges of whole decoders: the same tokens, and what must hold between two states."""

import jax
import numpy as np

from spec_jax.cycle import DecodeState


def assert_same_tokens(decoder, plain, prompts, params) -> None:
    """Speculation on and off give the same tokens and reasons for the same seeds (rule `match`, or greedy rows)."""
    ours, theirs = decoder.generate(prompts, params), plain.generate(prompts, params)
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if (a.tokens, a.finish_reason) != (b.tokens, b.finish_reason):
            raise AssertionError(
                f"row {row}: {a.tokens} ({a.finish_reason}) with speculation, {b.tokens} ({b.finish_reason}) without"
            )


def assert_invariants(before: DecodeState, after: DecodeState) -> None:
    """What must hold between two consecutive states, whatever was proposed and accepted."""
    before, after = jax.device_get((before, after))
    emitted = after.num_tokens_B - before.num_tokens_B
    checks = {
        "KV length is committed tokens - 1": after.kv.length_B == after.num_tokens_B - 1,
        "length fits the buffer": after.num_tokens_B <= after.tokens_BxS.shape[1],
        "an active row emits unless it fails": (emitted > 0) | (before.status_B != 0) | (after.status_B == 3),
        "another row does not": (emitted == 0) | (before.status_B == 0),
        "emitted is taken from the budget": before.budget_B - after.budget_B == emitted,
        "the budget is kept": after.budget_B >= 0,
        "counters count emitted tokens": emitted
        == sum(
            getattr(after.counters, name) - getattr(before.counters, name)
            for name in ("accepted_B", "correction_B", "bonus_B")
        ),
    }
    for what, holds in checks.items():
        if not np.all(holds):
            raise AssertionError(f"{what}: rows {np.flatnonzero(~holds).tolist()}")
    for row, count in enumerate(before.num_tokens_B):
        if (before.tokens_BxS[row, :count] != after.tokens_BxS[row, :count]).any():
            raise AssertionError(f"row {row}: committed tokens changed")
        for old, new in zip(before.kv.keys + before.kv.values, after.kv.keys + after.kv.values, strict=True):
            if not np.array_equal(old[row, :, : count - 1], new[row, :, : count - 1], equal_nan=True):
                raise AssertionError(f"row {row}: committed KV changed")
