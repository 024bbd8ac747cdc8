"""The real TPU compiler, on a machine without a TPU.

`libtpu` compiles ahead of time for a named topology, and writes its schedule into a folder if it was told so before it
was loaded. It is loaded once in a process: call `prepare` before anything else looks for a TPU, and from a program or a
process of its own.
"""

import contextlib
import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

# libtpu asks these for the machine that it does not run on; the last lets two processes use it at once.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class TpuCompilerError(ValueError):
    """The compiler is not there, or was not prepared for what it is asked."""


def is_installed() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def prepare(dump: Path | None = None) -> None:
    """Makes ready to compile for TPUs in this process; JAX itself runs on the CPU.

    Args:
      dump: an existing folder into which every compilation writes its schedule, hundreds of files.

    Raises:
      TpuCompilerError: libtpu is not installed, or was loaded before without these settings.
    """
    if not is_installed():
        raise TpuCompilerError("the TPU compiler, libtpu, is not installed: pip install -e '.[tpu]'")
    jax.config.update("jax_platforms", "cpu")
    # What is cached is not compiled, and writes no schedule; nor can it be read where there is no device.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # Whether there is one is decided once.
    # Without where operations were written: for a loop over several devices libtpu 0.0.42 may merge that for ever.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    wanted = "" if dump is None else f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    if not _is_loaded():
        os.environ.update(_ENVIRONMENT)
        os.environ["LIBTPU_INIT_ARGS"] = f"{given} {wanted}".strip()
    elif wanted not in given:
        raise TpuCompilerError(
            f"libtpu was loaded before it was told to write schedules to {dump}: call `prepare` first, in a process of "
            "its own"
        )


def _is_loaded() -> bool:
    maps = Path("/proc/self/maps")  # libtpu exists for Linux only.
    return maps.exists() and "libtpu.so" in maps.read_text()


def devices(topology: str) -> tuple[jax.Device, ...]:
    """The devices of a topology such as `v6e:2x4` (`Chip.topology` is the smallest of its chip).

    Raises:
      TpuCompilerError: the compiler does not know it, or is not there.
    """
    if not _is_loaded():
        prepare()
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise TpuCompilerError(f"the TPU compiler does not know the topology {topology!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler tells about a program.

    Attributes:
      seconds: that lowering and compilation took.
      argument_bytes, output_bytes, temp_bytes: HBM of a device for them.
      alias_bytes: of the outputs that take the place of donated arguments.
      text: the optimised HLO, in the order in which it runs.
    """

    seconds: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    text: str


def compile(function: Callable, arguments: Sequence, device: jax.Device, donate: Sequence[int] = ()) -> Compiled:
    """Compiles for a device of a topology.

    Args:
      function: of arrays; may be jitted already, then `donate` is its own business.
      arguments: trees of `jax.ShapeDtypeStruct`. Those with a sharding over a mesh of the topology keep it, all others
        are on `device`.
      donate: numbers of the arguments whose memory the outputs may take.

    Raises:
      jax.errors.JaxRuntimeError and others: the compiler refuses the program.
    """
    sharded = any(x.sharding is not None for x in jax.tree.leaves(arguments))
    single = jax.sharding.SingleDeviceSharding(device)
    if not sharded:
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=single), arguments)
    jitted = function if hasattr(function, "lower") else jax.jit(function, donate_argnums=tuple(donate))
    # Kernels that ask what chip they run on look at the mesh.
    mesh = jax.sharding.Mesh([device], ("x",)).abstract_mesh
    start = time.perf_counter()
    with contextlib.nullcontext() if sharded else jax.sharding.use_abstract_mesh(mesh):
        lowered = jitted.lower(*arguments)
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Compiled(
        seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        text=compiled.as_text(),
    )
