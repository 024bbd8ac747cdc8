"""Packaging of spec_jax; tool settings are in pyproject.toml."""

import pathlib

from setuptools import setup

TRAIN = ["optax>=0.2.4", "orbax-checkpoint>=0.11.25"]

EXTRAS = {
    "hub": ["huggingface-hub>=0.30"],
    "train": TRAIN,
    # With JAX comes the TPU compiler that belongs to it.
    "tpu": ["jax[tpu]>=0.10.1"],
    "peer": ["torch>=2.6", "transformers>=4.51"],
    "test": [
        *TRAIN,
        "beartype>=0.20",
        "hypothesis>=6.100",
        "pytest>=8.2",
        "pytest-xdist>=3.6",
        "ruff>=0.9",
        "scipy>=1.13",
    ],
}

setup(
    name="spec-jax",
    version="0.1.0",
    description="Exact speculative decoding in JAX: propose, verify and commit on one static-shape KV buffer",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        "spec_jax",
        "spec_jax.propose",
        "spec_jax.testing",
        "spec_jax.verify",
        "models",
        "training",
        "kernels_pallas",
        "experiments",
    ],
    install_requires=[
        "absl-py>=2.1",
        "flax>=0.12.4",
        "gguf>=0.17",
        "jax>=0.10.1",
        "jaxtyping>=0.3.0",
        "jinja2>=3.1",
        "matplotlib>=3.9",
        "numpy>=2.0",
        "safetensors>=0.5",
        "tokenizers>=0.21",
        "tqdm>=4.66",
    ],
    extras_require=EXTRAS,
)
