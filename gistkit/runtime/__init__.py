"""Runs a model under a plan in eager mode."""

from gistkit.runtime.assign import GradientError, Gradients, TrialSteps, assigned, check_max_error, gradient_error
from gistkit.runtime.attach import compress, compressed_forward, restore, saving
from gistkit.runtime.engine import Engine
from gistkit.runtime.live import LiveBytes, LiveEvent
from gistkit.runtime.offload.host_memory import available_bytes, does_not_fit
from gistkit.runtime.program.budget_warnings import Denser, denser
from gistkit.runtime.program.match_plan import autocast_in_force, inputs_of
from gistkit.runtime.program.stats import Row, StepStats
from gistkit.runtime.stand_in import WHEN_TRACED, CompressedForward
from gistkit.runtime.step.graphed import GraphedStep, Replayed
from gistkit.runtime.step.step import step
