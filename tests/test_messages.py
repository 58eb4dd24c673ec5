"""Texts of errors that belong to no other file: argument, demand, value, remedy."""

from pathlib import Path

import pytest
import torch

import gistkit
from gistkit import errors
from gistkit.commands.wrong import InputError, claim
from gistkit.kernels.layout import flat
from gistkit.nn.keep import USED_TWICE, Alias
from gistkit.planning.forms.options import check_fidelity
from gistkit.runtime.recompute.calls import ReplayError


def test_plan_mismatch_says_what_to_do():
    error = errors.PlanMismatchError("relu #3", "max_pool2d", "plan the model again")
    assert str(error) == "the step differs from its plan: expected relu #3, got max_pool2d; plan the model again"
    assert (error.expected, error.got, error.remedy) == ("relu #3", "max_pool2d", "plan the model again")


def test_every_kind_is_a_gist_error_and_the_one_warning_is_none():
    kinds = {v for v in vars(errors).values() if isinstance(v, type)}
    assert all((kind.__doc__ or "").strip() for kind in kinds)
    assert {kind for kind in kinds if not issubclass(kind, errors.GistError)} == {errors.BudgetWarning}
    assert issubclass(errors.GistError, RuntimeError)
    assert issubclass(errors.BudgetWarning, UserWarning)  # the step goes on (docs/limits.md, "Budgets")


def test_flat_names_shape_strides_and_remedy():
    x = torch.zeros(4, 6)[:, :3]
    with pytest.raises(ValueError) as raised:
        flat(x)
    assert str(raised.value) == (
        "flat: x must be dense and non-overlapping, got shape (4, 3) with strides (6, 1); pass x.contiguous()"
    )


def test_alias_speaks_like_pytorch_after_an_inplace_edit():
    def message(run):
        with pytest.raises(RuntimeError) as raised:
            run()
        return str(raised.value)

    x = torch.randn(3, requires_grad=True)
    y = torch.sigmoid(x)
    theirs = message(lambda: (y.mul_(2), y.sum().backward())[-1])
    kept = torch.zeros(3)
    alias = Alias(kept)
    kept.add_(1)
    ours = message(alias.dense)
    beginning = "one of the variables needed for gradient computation has been modified by an inplace operation: "
    assert theirs.startswith(beginning) and ours.startswith(beginning)
    assert "is at version 1; expected version 0 instead." in theirs
    assert "is at version 1; expected version 0 instead." in ours


def test_used_twice_is_pytorchs_own_text():
    x = torch.randn(3, requires_grad=True)
    y = torch.sigmoid(x).sum()
    y.backward()
    with pytest.raises(RuntimeError) as raised:
        y.backward()
    assert str(raised.value) == USED_TWICE


def test_what_runs_anew_differently_and_what_a_pool_carries_say_what_to_do():
    told = str(ReplayError("x (call 3) saved fewer tensors when it ran anew"))
    assert told.endswith('policy="gist", which runs nothing anew')


def test_words_that_are_none_say_what_there_is():
    wrong = (("exact", None), "; bitwise changes no bit"), (("lossy", "fp7"), 'lossy="fp7": the number is the bits')
    for words, text in wrong:
        with pytest.raises(ValueError, match=text):
            check_fidelity(*words)
    with pytest.raises(InputError, match=r"must end in \.png, \.svg or \.pdf, got 'x.txt'; name one that does"):
        claim(plot=Path("x.txt"))


def test_old_keywords_name_the_new_ones():
    x, weight = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    for call, text in (
        (lambda: gistkit.plan(reserve=1), r"plan: reserve= is called reserved_bytes= now"),
        (lambda: gistkit.functional.conv2d(x, weight, slices=2), "slices= is called weight_grad_slices= now"),
        (lambda: gistkit.functional.linear(x, x, slices=2), "slices= is called weight_grad_slices= now"),
        (lambda: gistkit.functional.relu(x, passes=True), "passes= is called mask_in_pool= now"),
        (lambda: gistkit.functional.max_pool2d(x, 2, zero_code=True), "zero_code= is called mask_in_pool= now"),
    ):
        with pytest.raises(TypeError, match=text):
            call()
