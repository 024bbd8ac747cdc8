"""Kernels as functions of arrays, each beside its plain-JAX reference. Knows no model and no decoding state."""
