"""A tiny target that reads and writes bytes, as the programs expect a model."""

import pytest
from absl import flags

import spec_jax as sj
from experiments import bench, prompts, registry
from spec_jax.testing import HistLM
from tests.toys import BYTES, ByteTokenizer


@pytest.fixture(scope="session")
def toy():
    target = HistLM(vocab_size=256)
    target.tokenizer = ByteTokenizer(BYTES)
    target.chat = lambda text: list(f"<{text}>".encode())
    return target


@pytest.fixture
def make_bench(toy, tmp_path):
    """A benchmark of the toy on three short prompts; keyword arguments change the configuration."""
    chosen = [prompts.Prompt(f"p{i}", f"kind {i % 2}", "abcabc" * (i + 1)) for i in range(3)]

    def make(chosen=chosen, resume=True, **changes):
        config = bench.Config(
            **{
                "target": "toy",
                "proposers": (registry.parse_proposer("prompt_lookup:length=3"),),
                "repeats": 2,
                "max_len": 64,
                "params": sj.SamplingParams(temperature=0.0, seed=0, max_new_tokens=12),
            }
            | changes
        )
        return bench.Bench(config, chosen, tmp_path, lambda name, dtype: toy, resume)

    return make


@pytest.fixture(scope="module")
def define_flags():
    """Defines the flags of a program for the tests of a module, and takes them away again for the next one."""
    before = set(flags.FLAGS)
    yield lambda program: program.define_flags()
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
