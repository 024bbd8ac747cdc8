"""State as frozen dataclasses that JAX can pass through its transformations."""

import dataclasses
import typing

import jax


@typing.dataclass_transform(frozen_default=True)
def pytree(cls):
    """A frozen dataclass registered as a pytree; fields with `metadata={"static": True}` are static.

    Field annotations give the shapes of live arrays. They are not checked at construction: JAX rebuilds pytrees with
    NumPy arrays, shape structures or placeholders in the leaves. Functions that take a pytree's arrays check them.
    """
    cls = jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
    cls.__init__.__no_type_check__ = True
    return cls
