"""Shares of non-zero elements: measured, or else what the ops that made a tensor lead us to expect."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt

from gistkit.ir import Call, Reading

RELU_DENSITY = 0.5
"""A ReLU of something symmetric about zero, as at random initialisation; trained networks have less (Gist III-A)."""
_RELU_LIKE = ("relu", "relu6", "threshold")
_COPIES = ("pad", "clone", "contiguous", "reshape", "to", "float", "half", "bfloat16", "type", "channel_shuffle")


class Densities:
    """Densities by storage: measured by the caller, else while recording, else expected, else None."""

    def __init__(self, reading: Reading, measured: Mapping[int, float] | None) -> None:
        self._reading = reading
        self._measured = {i: d for i, d in (measured or {}).items() if d is not None}
        self._expected: dict[tuple[int, int], float | None] = {}

    def of(self, storage: int, version: int) -> float | None:
        """The density of a storage's contents, None where nothing speaks for zeros in it."""
        if storage in self._measured:
            return self._measured[storage]
        recorded = self._reading.graph.storages[storage].density
        return self.expected((storage, version)) if recorded is None else recorded

    def expected(self, key: tuple[int, int]) -> float | None:
        """The density that the chain of ops behind a (storage, version) suggests, remembered."""
        if key not in self._expected:
            self._expected[key] = None
            self._expected[key] = self._guess(key)
        return self._expected[key]

    def _guess(self, key: tuple[int, int]) -> float | None:
        made = self._reading.made(key)
        if made is None or not made[0].operands:
            return None
        call = made[0]
        if call.op in _RELU_LIKE:
            return self._rectified(call)
        if call.op in _COPIES:
            return self._of_operand(call, 0)
        if call.op == "max_pool2d" and call.options:
            inner = self._of_operand(call, 0)
            return None if inner is None else 1 - (1 - inner) ** prod(call.options["kernel_size"])
        if call.op == "dropout" and call.options and call.options["training"]:
            inner = self._of_operand(call, 0)
            return (1.0 if inner is None else inner) * (1 - call.options["p"])
        return self._of_parts(call) if call.op == "cat" else None

    def _rectified(self, call: Call) -> float:
        """A ReLU's output; of a sum with what a ReLU made (a residual block) fewer elements are below zero: a share of
        0.5 / sqrt(k + 1) after k rectified terms. ResNet-50 has 0.50, 0.65, 0.71, 0.74, 0.77 and 0.78 in the blocks of
        a stage (random initialisation and images); this gives 0.50, 0.65, 0.71, 0.75, 0.78, 0.80.
        """
        value = self._reading.operand(call, 0)
        made = self._reading.made((value.storage, value.version))
        if made is None or made[0].op != "add" or len(made[0].operands) != 2:
            return RELU_DENSITY
        shares = [1 - d for d in (self._of_operand(made[0], i) for i in range(2)) if d is not None]
        if not shares:
            return RELU_DENSITY
        zero = prod(shares)
        return 1 - (zero if len(shares) == 2 else 0.5 * zero / sqrt(0.25 + zero * zero))

    def _of_operand(self, call: Call, position: int) -> float | None:
        value = self._reading.operand(call, position)
        return self.of(value.storage, value.version)

    def _of_parts(self, call: Call) -> float | None:
        parts = [
            (self._of_operand(call, i), prod(self._reading.operand(call, i).shape)) for i in range(len(call.operands))
        ]
        if not parts or any(d is None for d, _ in parts):
            return None
        return sum((d or 0.0) * n for d, n in parts) / max(1, sum(n for _, n in parts))
