"""Which forms a storage may take."""

from gistkit.planning.forms.allowed import (
    SMALL_BYTES,
    SMALL_SHARE,
    Judge,
    check_decisions,
    default_form,
    kept_by_ops,
    own_decisions,
    rebuilt,
)
from gistkit.planning.forms.options import FIDELITIES, SPARSE, check_fidelity, check_lossy, encodings, options
from gistkit.planning.forms.predicted import capacity, held, kept_bytes, make_plan, with_figures
from gistkit.planning.forms.readers import call_choices, intolerant, rounded
from gistkit.planning.forms.rebuild import MAX_DEPTH, depth
from gistkit.planning.forms.recompute import OBSERVERS, RecomputePlan, Replays, SegmentPlan, recompute_plan
