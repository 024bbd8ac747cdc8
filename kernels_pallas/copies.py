"""Copies between HBM and VMEM that kernels start, and wait for later."""

from collections.abc import Callable, Iterable

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Transfer = tuple[Callable[[], None], Callable[[], None]]
"""`start` and `wait` of copies that share a semaphore."""


def together(pairs: Iterable[tuple], semaphore) -> Transfer:
    """Copies of (source, target) pairs of refs."""
    copies = [pltpu.make_async_copy(*pair, semaphore) for pair in pairs]

    def each(action):
        for copy in copies:
            getattr(copy, action)()

    return lambda: each("start"), lambda: each("wait")


def of_pages(pages_ref, table_ref, row, first, count, buffer, semaphore, reads: bool = True) -> Transfer:
    """Copies of `count` pages of a row, from place `first` of its table on, into `buffer` [2, K, rows, D] or back."""
    page_size = pages_ref.shape[3]

    def each(action):
        def page(i, _):
            place = buffer.at[:, :, pl.ds(pl.multiple_of(i * page_size, page_size), page_size), :]
            source = pages_ref.at[table_ref[row, first + i]]
            pair = (source, place) if reads else (place, source)
            getattr(pltpu.make_async_copy(*pair, semaphore), action)()

        lax.fori_loop(0, count, page, None)

    return lambda: each("start"), lambda: each("wait")
