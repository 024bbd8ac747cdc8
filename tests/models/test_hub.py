import sys
import types

import pytest

import models
from models import hf, hub
from models.errors import ModelError
from tests.models.common import TINY, assert_same_params, noisy_target


def installed(monkeypatch, snapshot_download):
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_hub_id_loads_from_its_snapshot(monkeypatch, tmp_path):
    hf.save(noisy_target(TINY), tmp_path)
    asked = {}

    def snapshot_download(repo_id, **kwargs):
        asked.update(kwargs, repo_id=repo_id)
        return str(tmp_path)

    installed(monkeypatch, snapshot_download)
    target = models.load("org/some-model_1.0", revision="v2")
    assert target.name == asked["repo_id"] == "org/some-model_1.0"
    assert asked["revision"] == "v2"
    assert "*.safetensors" in asked["allow_patterns"] and "*.bin" not in asked["allow_patterns"]
    assert_same_params(target, noisy_target(TINY))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"'org/name' is not a local path.*pip install 'spec-jax\[hub\]'"):
        models.load("org/name")


def test_an_unreachable_hub_is_an_error_with_advice(monkeypatch):
    def snapshot_download(repo_id, **kwargs):
        raise ConnectionError("no route to host\nand many more lines")

    installed(monkeypatch, snapshot_download)
    with pytest.raises(ModelError, match="ConnectionError: no route to host.. Check the name, the network"):
        models.load("org/name")


@pytest.mark.parametrize("name, answer", [("org/name", True), ("name", False), ("a/b/c", False), ("a b/c", False)])
def test_what_looks_like_a_hub_id(name, answer):
    assert hub.is_hub_id(name) == answer
