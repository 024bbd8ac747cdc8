"""What a measurement depends on besides its settings: machine, versions, code."""

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import jax

_ROOT = Path(__file__).parents[1]
_MEASURED = ("kernels_pallas", "models", "spec_jax")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where and with what something was measured.

    Attributes:
      cpu, cores: the processor's name, and how many cores this process may use.
      backend, device: JAX's platform and the kind of its first device.
      versions: of Python and of the packages that ours runs on.
      code: a hash of the source that is measured.
      commit: of the repository, if it is one; "+" behind it where files differ from it.
    """

    cpu: str
    cores: int
    backend: str
    device: str
    versions: dict[str, str]
    code: str
    commit: str | None

    @classmethod
    def here(cls) -> "Machine":
        packages = ("jax", "jaxlib", "numpy")
        return cls(
            cpu=_cpu(),
            cores=cores(),
            backend=jax.default_backend(),
            device=jax.devices()[0].device_kind,
            versions={"python": platform.python_version()} | {p: v for p in packages if (v := _version(p))},
            code=_code(),
            commit=_commit(),
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        commit = f", commit {self.commit}" if self.commit else ""
        device = "" if self.backend == "cpu" else f", {self.backend} {self.device}"
        return f"{self.cpu}, {self.cores} cores{device}; {versions}{commit}"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy() -> str | None:
    """A warning where other programs are using the machine, so that times are not to be trusted."""
    if not hasattr(os, "getloadavg"):
        return None
    load, available = os.getloadavg()[0], cores()
    if load < 0.3 * available:
        return None
    return f"the machine is busy (load {load:.1f} on {available} cores): times may be off, ratios are interleaved"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for folder in _MEASURED for path in (_ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _commit() -> str | None:
    def git(*command: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(_ROOT), *command], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Only a repository of this very folder: an installed copy may lie inside somebody else's.
    if git("rev-parse", "--show-prefix") != "":
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
