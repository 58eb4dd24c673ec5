"""Which forms a storage may take."""

from gistkit.planning.forms.allowed import (
    SMALL_BYTES,
    Judge,
    check_decisions,
    decidable,
    default_form,
    kept_by_ops,
    own_decisions,
)
from gistkit.planning.forms.options import FIDELITIES, check_fidelity, options
from gistkit.planning.forms.predicted import capacity, held, kept_bytes, make_plan, with_figures
from gistkit.planning.forms.readers import call_choices, intolerant, rounds
from gistkit.planning.forms.rebuild import MAX_DEPTH
from gistkit.planning.forms.recompute import OBSERVERS, RecomputePlan, Replays, SegmentPlan, recompute_plan
from gistkit.planning.forms.rules import Planner, check_lossy
