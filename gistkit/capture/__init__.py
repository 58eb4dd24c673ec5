"""One training step, recorded without running it for real: model and batch to SavedGraph."""

from gistkit.capture.batch import batch_size, check_rows, joined, row_bytes, rows, spread
from gistkit.capture.calls import (
    COVERED,
    GEOMETRY,
    PLAIN,
    Add,
    BatchNorm,
    Bound,
    Conv2d,
    Dropout,
    Linear,
    MaxPool2d,
    Relu,
    bind,
    hooks_are_active,
    is_counted,
    operands,
    region_is_open,
)
from gistkit.capture.entry import STAND_IN, capture, no_autocast_cache, untouched_random_states
from gistkit.capture.isolation.autocast_cache import left_behind
from gistkit.capture.isolation.closures import on_copy, others_untouched
from gistkit.capture.isolation.copies import deep_copy
from gistkit.capture.isolation.unsupported_models import check_runs_in_python
from gistkit.capture.ledger import tensors_in
from gistkit.capture.recorder import Recorder, call_name, is_metadata
from gistkit.capture.step.conv_backward import needs_input, takes_its_own
from gistkit.capture.step.tasks import tasks_with_spans
from gistkit.capture.step.trace import Span, Tracer
from gistkit.capture.step.traced import loss_of
from gistkit.capture.weights import is_weight
