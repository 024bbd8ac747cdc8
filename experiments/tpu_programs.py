"""Whole programs of decoding for TPUs, from shapes alone: no weight is allocated, no TPU is needed.

A program is a stage of decoding (`prefill`; `cycle`, one of them; `generate`, all cycles in one loop on device) for one
of `SETUPS`: a target of a public model's shape, alone ("plain"), with a draft model's "chain" of 4 or with its "tree".
They are the very functions that `Decoder` runs; only their arguments are shapes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import spec_jax as sj
from experiments import tpu_compiler
from experiments.tpu_cases import Program, Shape
from kernels_pallas.chips import Chip
from models import sharding
from models.config import Llama3Scaling, LlamaConfig
from models.llama import Llama
from models.target import LlamaTarget
from spec_jax import decode, shapes
from spec_jax.kernels import Kernels
from spec_jax.kv import KVBuffer
from spec_jax.propose import DraftModel

_LLAMA_1B = LlamaConfig(
    family="llama",
    vocab_size=128_256,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    model_dim=2048,
    mlp_dim=8192,
    rope_base=500_000.0,
    rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
    norm_eps=1e-5,
    tied_embeddings=True,
    max_positions=131_072,
    dtype="bfloat16",
)
_LLAMA_8B = dataclasses.replace(
    _LLAMA_1B,
    num_layers=32,
    head_dim=128,
    model_dim=4096,
    mlp_dim=14_336,
    rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
    tied_embeddings=False,
)
CONFIGS = {
    "llama-3.2-1b": _LLAMA_1B,
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.3-70b": dataclasses.replace(_LLAMA_8B, num_layers=80, num_heads=64, model_dim=8192, mlp_dim=28_672),
    # SmolLM2-135M with the vocabulary of Llama 3.
    "small-135m": dataclasses.replace(
        _LLAMA_1B, num_layers=30, num_heads=9, num_kv_heads=3, model_dim=576, mlp_dim=1536, rope_scaling=None
    ),
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """A target with its draft model.

    Attributes:
      target, draft: of `CONFIGS`.
      topology: by chip, a mesh of all whose devices shares out the target and holds a draft on each; empty for one
        device.
    """

    target: str
    draft: str
    topology: dict[str, str] = dataclasses.field(default_factory=dict)


SETUPS = {
    "1b": Setup("llama-3.2-1b", "small-135m"),
    "8b": Setup("llama-3.1-8b", "llama-3.2-1b"),
    "70b": Setup("llama-3.3-70b", "llama-3.2-1b", {"v6e": "v6e:2x4", "v5p": "v5p:2x2x1", "7x": "tpu7x:2x2x1"}),
}
STAGES = {"prefill": decode.prefill, "cycle": decode.step, "generate": decode.run}
PROPOSERS = ("plain", "chain", "tree")
_SHAPE = Shape()
_CHAIN = 4
# How often the child of rank 0, 1, ... is accepted: the tree is the best one for it.
_ACCEPTANCE = (0.7, 0.15, 0.06, 0.03)


def program(
    chip: Chip,
    setup: str,
    proposer: str,
    stage: str,
    shape: Shape = _SHAPE,
    attention: str = "kernel",
    num_layers: int | None = None,
) -> Program:
    """A stage of decoding as `tpu_compiler.compile` takes it.

    Args:
      chip: to compile for.
      setup, proposer, stage: of `SETUPS`, `PROPOSERS` and `STAGES`.
      shape: `rows`, of texts up to `context`, and the `nodes` of the tree; the rest is the model's.
      attention: "kernel" or "reference", as of `Kernels.choose`.
      num_layers: of the models instead of their own.

    Raises:
      KeyError: there is no such setup or stage.
      ValueError: a choice that `Decoder`, its models or its tree refuse.
      TpuCompilerError: the program is for several devices, and there is no TPU compiler to name them.
      ModelError: the target cannot be shared out over the chip's topology.
    """
    decoder = _decoder(chip, SETUPS[setup], proposer, shape, attention, num_layers)
    mesh = decoder.target.kernels.mesh
    request = decoder.request([[1]] * shape.rows, sj.SamplingParams(seed=0))
    state = jax.eval_shape(lambda: decoder.start(request))
    if mesh is not None:
        state = _placed(state, sharding.state_shardings(state, mesh))
    buffers = _buffers(state)
    return Program(
        functools.partial(STAGES[stage], decoder.plan),
        (decoder.params, state),
        donate=(1,),
        topology=SETUPS[setup].topology.get(chip.name),
        kv_sizes=tuple({kv.capacity for kv in buffers}),
        kv_bytes=sum(bytes_on_a_device((kv.keys, kv.values)) for kv in buffers),
    )


def _usual(chip: Chip, shape: Shape, stage: str) -> Program:
    """With a tree, of the largest setup that one chip holds."""
    return program(chip, "1b" if chip.name == "v5e" else "8b", "tree", stage, shape)


def _case(chip: Chip, shape: Shape, setup: str, proposer: str, stage: str) -> Program:
    return program(chip, setup, proposer, stage, shape)


CASES: dict[str, Callable[[Chip, Shape], Program]] = {
    **{stage: functools.partial(_usual, stage=stage) for stage in ("cycle", "generate")},
    **{
        f"{stage}_{setup}_{proposer}": functools.partial(_case, setup=setup, proposer=proposer, stage=stage)
        for setup in SETUPS
        for proposer in PROPOSERS
        for stage in STAGES
    },
}


def _buffers(state: decode.DecodeState) -> list[KVBuffer]:
    """Of target and draft."""
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, KVBuffer))
    return [leaf for leaf in leaves if isinstance(leaf, KVBuffer)]


def bytes_on_a_device(tree) -> int:
    """Bytes of a tree of shapes, or of a device's share of it where they are sharded."""

    def own(x):
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(own, jax.tree.leaves(tree)))


def _decoder(
    chip: Chip, setup: Setup, proposer: str, shape: Shape, attention: str, num_layers: int | None
) -> sj.Decoder:
    if proposer not in PROPOSERS:
        raise ValueError(f"proposer {proposer!r} is not known; expected one of {', '.join(PROPOSERS)}")
    topology = setup.topology.get(chip.name)
    if setup.topology and topology is None:
        raise ValueError(f"{setup.target} is compiled for {', '.join(setup.topology)}; {chip.name} cannot hold it")
    mesh = None if topology is None else Mesh(np.asarray(tpu_compiler.devices(topology)), ("model",))

    def model(name: str, axis: str | None) -> LlamaTarget:
        config = CONFIGS[name]
        config = config if num_layers is None else dataclasses.replace(config, num_layers=num_layers)
        return _target(config, chip, attention, mesh, axis)

    target = model(setup.target, "model")
    if proposer == "plain":
        return sj.Decoder(target, max_len=shape.context)
    tree = sj.Tree.chain(_CHAIN) if proposer == "chain" else shapes.sequoia(_ACCEPTANCE, shape.nodes)
    return sj.Decoder(target, DraftModel(model(setup.draft, None), tree), sj.verify.Recursive(), max_len=shape.context)


def _target(config: LlamaConfig, chip: Chip, attention: str, mesh: Mesh | None, axis: str | None) -> LlamaTarget:
    """A model of shapes; with a mesh shared out along the axis, or whole on each device."""
    kernels = Kernels.choose(attention, config.head_dim, chip)
    _, params = nnx.split(Llama(config))
    if mesh is not None:
        kernels = dataclasses.replace(kernels, mesh=mesh, axis=axis)
        params = _placed(params, sharding.param_shardings(config, kernels))
    return LlamaTarget(config, params, kernels=kernels)


def _placed(tree, shardings):
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings)
