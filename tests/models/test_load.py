import subprocess
import sys

import pytest

import models
from models.errors import ModelError


@pytest.mark.parametrize("name", ["nothing-here", "no/such/folder", "also-nothing.gguf"])
def test_a_name_that_is_nothing_says_what_is_accepted(name):
    with pytest.raises(ModelError, match=f"'{name}' is no model: expected a name of the zoo .smollm2-135m"):
        models.load(name)


def test_a_bad_dtype_is_refused_before_anything_is_fetched(monkeypatch):
    monkeypatch.setattr("models.zoo.fetch", lambda name: pytest.fail("fetched"))
    with pytest.raises(ModelError, match="dtype 'float16' is not supported; choose one of float32, bfloat16"):
        models.load("smollm2-135m", dtype="float16")


def test_importing_models_loads_no_heavy_library():
    code = "import sys, models; print({'jax', 'flax', 'gguf', 'tokenizers'} & sys.modules.keys() or 'none')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "none"


def test_submodules_are_attributes():
    assert models.inspect.describe
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        models.nothing  # noqa: B018
