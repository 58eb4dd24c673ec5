"""From a saved graph and a budget to a plan: choice of a policy, the plan's contract, refusals."""

from gistkit.planning.choose import EXAMPLE_FORMAT, accepts, check_words, least_bytes, made, refused
from gistkit.planning.contract import (
    AGAIN,
    check_forward,
    check_inputs,
    check_same,
    check_state,
    contract_of,
    task_calls,
)
from gistkit.planning.joint import with_joint_gradients
from gistkit.planning.knapsack import Choice, least_bytes_within
