"""The measured peak of a model's first steps on a CUDA card, held against its plan's budget: an operator may hold more
inside than a capture knows, and a step that takes more than planned must not do so unnoticed."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gistkit.capture import tensors_in
from gistkit.errors import BudgetWarning
from gistkit.ir import Budget
from gistkit.kernels import capturing
from gistkit.planning.cost import CUDA_LIBRARIES_BYTES

WATCHED = (2, 3, 4)
"""In the first step the libraries take what they hold from then on."""
ROUNDING = 0.01
"""Of the budget: PyTorch's allocator gives blocks that are up to 1 MiB larger than asked."""


class StepPeak:
    """Watches the steps :data:`WATCHED` and warns once. Where the highest peak so far was reached before the step, what
    the step took is not known."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._steps = budget, 0
        self._before: tuple[torch.device, int, int, int] | None = None

    def begins(self, model: torch.nn.Module, given: Any) -> None:
        """A forward of the model on ``given`` begins."""
        self._steps, self._before = self._steps + 1, None
        if self._steps not in WATCHED or capturing():
            return
        device = _card(given)
        if device is not None:
            tensors = (*model.parameters(), *model.buffers(), *tensors_in(given))
            sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
            planned_bytes = CUDA_LIBRARIES_BYTES + sum(sizes.values())
            there = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
            self._before = device, planned_bytes, *there

    @property
    def watches(self) -> bool:
        return self._before is not None

    def rests(self) -> None:
        """Watch no more: why the budget is exceeded has been told."""
        self._steps, self._before = WATCHED[-1], None

    def ends(self) -> None:
        """The backward of that forward has ended."""
        if self._before is None:
            return
        device, planned_bytes, there_bytes, highest_bytes = self._before
        self._before, total_bytes = None, self._budget.total_bytes
        peak_bytes = torch.cuda.max_memory_allocated(device)
        over_bytes = peak_bytes - there_bytes + planned_bytes - total_bytes
        if peak_bytes <= highest_bytes or over_bytes <= ROUNDING * total_bytes:
            return
        self.rests()
        warnings.warn(
            f"the budget of {total_bytes} bytes is exceeded by {over_bytes}: a step took {peak_bytes - there_bytes} "
            f"bytes beside what was there before; of that the plan counts {planned_bytes}. An operator, or what runs "
            "beside the model, holds more than the capture knows, or a convolution's workspace was not measured; plan "
            f"with measure=True, or with {over_bytes} bytes more as reserved_bytes=",
            BudgetWarning,
            stacklevel=2,
        )


def _card(given: Any) -> torch.device | None:
    return next((t.device for t in tensors_in(given) if t.is_cuda), None)
