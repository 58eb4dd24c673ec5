"""gistkit: train networks in a fraction of the activation memory.

``model = gistkit.compress(model)`` is bit-exact; ``lossy="fp8"`` adds delayed precision reduction. See README.md.
"""

from gistkit import functional, nn, policies, zoo
from gistkit.errors import CaptureError, CompressError, DataError, GistError, KernelError, PlanMismatchError
from gistkit.graph.capture import capture
from gistkit.graph.saved import SavedGraph
from gistkit.plan.plan import CallChoice, Decision, Plan
from gistkit.report import Report, report
from gistkit.runtime.attach import compress, restore
from gistkit.runtime.context import saving
from gistkit.runtime.live import LiveBytes
from gistkit.version import VERSION

__version__ = VERSION

__all__ = [
    "CallChoice",
    "CaptureError",
    "CompressError",
    "DataError",
    "Decision",
    "GistError",
    "KernelError",
    "LiveBytes",
    "Plan",
    "PlanMismatchError",
    "Report",
    "SavedGraph",
    "capture",
    "compress",
    "functional",
    "nn",
    "policies",
    "report",
    "restore",
    "saving",
    "zoo",
]
