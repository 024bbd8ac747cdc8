"""Exact speculative decoding: propose, verify and commit on one static-shape KV buffer.

Who proposes, chain or tree, and which rule commits are three independent choices::

    import models
    import spec_jax as sj

    target = models.load("smollm2-135m")
    decoder = sj.Decoder(target, proposer=sj.propose.PromptLookup(), rule=sj.verify.Match(), max_len=1024)
    results = decoder.generate(["Once upon a time"], sj.SamplingParams(temperature=0.0))
"""

from spec_jax import growth, metrics, propose, sampling, shapes, stop, testing, verify
from spec_jax.contract import Contract, ContractError, Law, Promise
from spec_jax.decode import Decoder, Result, Results
from spec_jax.growth import Beam
from spec_jax.kv import KVBuffer
from spec_jax.metrics import Stats
from spec_jax.sampling import SamplingParams
from spec_jax.target import Target
from spec_jax.tree import DynamicTree, Tree

__all__ = [
    "Beam",
    "Contract",
    "ContractError",
    "Decoder",
    "DynamicTree",
    "KVBuffer",
    "Law",
    "Promise",
    "Result",
    "Results",
    "SamplingParams",
    "Stats",
    "Target",
    "Tree",
    "growth",
    "metrics",
    "propose",
    "sampling",
    "shapes",
    "stop",
    "testing",
    "verify",
]
