"""One training step, recorded without running it for real: model and batch to SavedGraph."""

from gistkit.capture.batch import batch_size, check_rows, joined, row_bytes, rows, spread
from gistkit.capture.calls import (
    COVERED,
    GEOMETRY,
    PLAIN,
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
    takes_conv2d,
    takes_linear,
)
from gistkit.capture.entry import capture, loss_of
from gistkit.capture.isolation import (
    STAND_IN,
    left_behind,
    no_autocast_cache,
    on_copy,
    others_untouched,
    plain_copy,
    uncollected,
    untouched_random_states,
)
from gistkit.capture.ledger import tensors_in
from gistkit.capture.nodes import is_weight
from gistkit.capture.padding import own_positions
from gistkit.capture.recorder import Recorder, is_metadata, op_name
from gistkit.capture.refusal import check_runs_in_python
from gistkit.capture.step.conv_backward import needs_input, takes_its_own
from gistkit.capture.step.tasks import StepBuilder
from gistkit.capture.step.trace import Span, Tracer
