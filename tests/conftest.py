"""Strict numerics for every test, and compiled programs kept between runs."""

import gc
import pathlib

import jax
import pytest

if jax.config.jax_platforms is None:
    # Two processes cannot share most accelerators; JAX_PLATFORMS and `-n 0` run the tests on one.
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parents[1] / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(scope="session")
def smollm2():
    """The real model in float32; downloaded on first use."""
    import models

    return models.load("smollm2-135m")


@pytest.fixture(autouse=True)
def _quick_compilation(request):
    """Toys run for milliseconds and compile for seconds; only long tests need optimised programs."""
    jax.config.update("jax_disable_most_optimizations", "slow" not in request.keywords)


@pytest.fixture(autouse=True)
def _programs_do_not_pile_up():
    """Compiled programs hold memory maps, of which a process may have some 65,000; beyond that XLA crashes."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()
