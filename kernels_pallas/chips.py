"""The TPU chips that kernels are compiled for: what they can do, and the block sizes that suit them.

A kernel takes the chip as an argument instead of asking the machine, so that a program for any of them can be
compiled, and its schedule read, where there is none.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TensorCore of a TPU, as kernels see it.

    Attributes:
      name: what people call the chip.
      device_kind: what JAX calls a device of it, as a regular expression.
      topology: the smallest slice that the compiler knows by name.
      vmem_bytes: vector memory of a core.
      hbm_bytes_per_s: HBM bandwidth that one core has to itself.
      flops_per_s: peak of bfloat16 products.
      clock_hz: instruction clock. An inference from the peaks and not a vendor's figure.
      block_keys: most keys in one block of attention (see `streaming`).
      heads_together: heads whose work the compiler may interleave.
    """

    name: str
    device_kind: str
    topology: str
    vmem_bytes: int
    hbm_bytes_per_s: float
    flops_per_s: float
    clock_hz: float
    block_keys: int = 512
    heads_together: int = 4

    def keys_in_block(self, fixed_bytes: int, bytes_per_key: int, capacity: int) -> int:
        """Keys in one block: as many as the chip likes, a row has, and half of VMEM holds; a multiple of 128.

        It is 0 where not even 128 fit.
        """
        fitting = (self.vmem_bytes // 2 - fixed_bytes) // bytes_per_key
        return max(0, min(self.block_keys, fitting, capacity) // 128 * 128)


_MIB = 2**20

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", r"TPU v5 ?(lite|e)", "v5e:2x2", 128 * _MIB, 820e9, 197e12, 1.5e9, heads_together=2),
        Chip("v5p", r"TPU v5p?", "v5p:2x2x1", 64 * _MIB, 1230e9, 229e12, 1.75e9),
        Chip("v6e", r"TPU v6 ?(lite|e)", "v6e:2x2", 128 * _MIB, 1640e9, 920e12, 1.755e9),
        Chip("7x", r"TPU ?(v7x?|7x)", "tpu7x:2x2x1", 64 * _MIB, 3700e9, 1155e12, 2.2e9),
    )
}


def chip_named(name: str) -> Chip:
    """The chip of that name.

    Raises:
      ValueError: there is no such chip.
    """
    if name not in CHIPS:
        raise ValueError(f"chip {name!r} is not known; expected one of {', '.join(CHIPS)}")
    return CHIPS[name]


def chip_of(device_kind: str) -> Chip:
    """The chip of a JAX device, by its `device_kind`.

    Raises:
      ValueError: kernels were never compiled for it.
    """
    for chip in CHIPS.values():
        if re.fullmatch(chip.device_kind, device_kind):
            return chip
    raise ValueError(f"kernels are not made for {device_kind!r}; known chips: {', '.join(CHIPS)}")
