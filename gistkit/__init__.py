"""gistkit: train networks in a fraction of the activation memory.

``model = gistkit.compress(model)`` is bit-exact; ``lossy="fp8"`` adds delayed precision reduction. See README.md.
"""

import sys
from typing import TYPE_CHECKING

from gistkit import functional, nn, policies, zoo
from gistkit.errors import (
    BudgetError,
    BudgetWarning,
    CaptureError,
    CompressError,
    DataError,
    GistError,
    KernelError,
    MeasureError,
    ModelError,
    PlanError,
    PlanMismatchError,
)
from gistkit.graph.capture import capture
from gistkit.graph.saved import SavedGraph
from gistkit.measuring import measure
from gistkit.plan.hardware import Hardware
from gistkit.plan.plan import CallChoice, Decision, Plan
from gistkit.plan.times import StepTimes
from gistkit.planning import PlanPackage
from gistkit.profiling import Profile, profile
from gistkit.report import Report, report
from gistkit.runtime.attach import compress, restore
from gistkit.runtime.context import saving
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.step import step
from gistkit.version import VERSION

if TYPE_CHECKING:
    from gistkit.planning import plan
else:
    sys.modules["gistkit.plan"].__class__ = PlanPackage  # the package and the function share the name

__version__ = VERSION

__all__ = [
    "BudgetError",
    "BudgetWarning",
    "CallChoice",
    "CaptureError",
    "CompressError",
    "DataError",
    "Decision",
    "GistError",
    "Hardware",
    "KernelError",
    "LiveBytes",
    "MeasureError",
    "ModelError",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "Profile",
    "Report",
    "SavedGraph",
    "StepTimes",
    "capture",
    "compress",
    "functional",
    "measure",
    "nn",
    "plan",
    "policies",
    "profile",
    "report",
    "restore",
    "saving",
    "step",
    "zoo",
]
