"""From a saved graph and a budget to a plan: choice of a policy, the plan's contract, refusals."""

from gistkit.planning.choose import accepts, check_words, made
from gistkit.planning.contract import (
    AGAIN,
    check_forward,
    check_inputs,
    check_same,
    check_state,
    contract_of,
    task_calls,
)
from gistkit.planning.knapsack import Choice, least_bytes_within
from gistkit.planning.refusal import EXAMPLE_FORMAT, least_bytes, refused
