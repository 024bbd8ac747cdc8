"""How a model and the state it decodes with lie on several devices: tensor parallelism, as shardings.

Along one mesh axis lie attention by key/value heads (with the query heads they serve), the MLP by features, and
embedding and output head by vocabulary; norms, the biases of the residual stream, tokens and lengths are on every
device. Weights never move: the products into heads and features are local, those back into the residual stream and
the embedding sum over devices, and what is sampled from is each device's part of the vocabulary. The compiler adds
that communication; nothing in the model knows of it.

For a loop over several TPUs set `jax.config.update("jax_traceback_in_locations_limit", 0)`: libtpu 0.0.42 may merge the
places where operations were written for ever.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.checkpoint import Params
from models.config import LlamaConfig
from models.errors import ModelError
from models.linear import input_first
from models.llama import Llama
from spec_jax.kernels import Kernels
from spec_jax.kv import KVBuffer

_BY_OUTPUT, _BY_INPUT = ("qkv", "gate_up"), ("o", "down")


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with axes that the compiler partitions over by itself (`jax.make_mesh` makes explicit ones)."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def check(config: LlamaConfig, kernels: Kernels) -> None:
    """Refuses a model that does not divide over the devices along `kernels.axis`.

    Raises:
      ModelError: the mesh has no such axis, or a size that is shared out is no multiple of the devices along it.
    """
    mesh, axis = kernels.mesh, kernels.axis
    if axis is None:
        return
    if axis not in mesh.shape:
        raise ModelError(f"the mesh has axes {', '.join(map(repr, mesh.axis_names))} and no {axis!r}; name one of them")
    devices = mesh.shape[axis]
    sizes = {name: getattr(config, name) for name in ("num_kv_heads", "mlp_dim", "vocab_size")}
    heads_in_row, rows, _ = kernels.layout(config.num_kv_heads, config.head_dim)
    if heads_in_row > 1:
        sizes[f"rows of {heads_in_row} key/value heads"] = rows
    if uneven := [f"{name}={size}" for name, size in sizes.items() if size % devices]:
        raise ModelError(
            f"{', '.join(uneven)} cannot be divided over {devices} devices (mesh axis {axis!r}); take a number of "
            "devices that divides it, or put the whole model on each with `replicated`"
        )


def param_specs(config: LlamaConfig, axis: str | None) -> Params:
    """A `PartitionSpec` for every parameter; `axis` None leaves all of them whole."""
    _, state = nnx.split(Llama(config))
    flat = [(path, leaf.replace(_spec(path, leaf.ndim, config, axis))) for path, leaf in nnx.to_flat_state(state)]
    return nnx.from_flat_state(flat)


def param_shardings(config: LlamaConfig, kernels: Kernels) -> Params:
    """A `NamedSharding` for every parameter.

    Raises:
      ModelError: as `check`.
    """
    check(config, kernels)
    specs = param_specs(config, kernels.axis)
    return jax.tree.map(lambda spec: NamedSharding(kernels.mesh, spec), specs, is_leaf=_is_spec)


def kv_shardings(kv: KVBuffer) -> KVBuffer:
    """A `NamedSharding` for every array of a buffer: rows by heads along its kernels' axis."""
    mesh, axis = kv.kernels.mesh, kv.kernels.axis
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(None, axis))
    return dataclasses.replace(
        kv, keys=(rows,) * len(kv.keys), values=(rows,) * len(kv.values), length_B=whole, tail=whole
    )


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """A `NamedSharding` for every array of a decoding state: its KV buffers as they say, the rest on every device."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: kv_shardings(leaf) if _is_kv(leaf) else whole, state, is_leaf=_is_kv)


def _is_kv(leaf) -> bool:
    return isinstance(leaf, KVBuffer)


def _is_spec(leaf) -> bool:
    return isinstance(leaf, PartitionSpec)


def _spec(path: tuple, ndim: int, config: LlamaConfig, axis: str | None) -> PartitionSpec:
    *_, module, kind = map(str, path)
    if module in ("embedding", "head"):
        return PartitionSpec(axis)
    if module in _BY_OUTPUT:
        return PartitionSpec(None, axis) if kind == "weight" and input_first(config.dtype) else PartitionSpec(axis)
    if module in _BY_INPUT and kind == "weight":
        return PartitionSpec(axis) if input_first(config.dtype) else PartitionSpec(None, axis)
    return PartitionSpec()
