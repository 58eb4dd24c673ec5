"""gistkit: train networks in a fraction of the activation memory.

``model = gistkit.compress(model)`` is bit-exact; ``lossy="fp8"`` adds delayed precision reduction. See README.md.
"""

from gistkit import callbacks, functional, nn, policies, zoo
from gistkit.api import Fidelity, Profile, fidelity, measure, plan, profile
from gistkit.capture import capture
from gistkit.compiled import compile
from gistkit.errors import (
    BudgetError,
    BudgetWarning,
    CaptureError,
    CompileError,
    CompressError,
    DataError,
    GistError,
    MeasureError,
    ModelError,
    PlanError,
    PlanMismatchError,
)
from gistkit.ir import CallChoice, Decision, Plan, SavedGraph
from gistkit.planning.cost import Hardware, StepTimes
from gistkit.report import CompiledReport, Report, report
from gistkit.runtime import GraphedStep, LiveBytes, compress, restore, saving, step
from gistkit.version import VERSION

__version__ = VERSION

__all__ = [
    "BudgetError",
    "BudgetWarning",
    "CallChoice",
    "CaptureError",
    "CompileError",
    "CompiledReport",
    "CompressError",
    "DataError",
    "Decision",
    "Fidelity",
    "GistError",
    "GraphedStep",
    "Hardware",
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
    "callbacks",
    "capture",
    "compile",
    "compress",
    "fidelity",
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
