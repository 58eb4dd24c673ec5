"""Texts of errors that belong to no other file: argument, demand, value, remedy."""

import pytest
import torch

import gistkit
from gistkit import errors
from gistkit.kernels.layout import flat


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


def test_old_keywords_name_the_new_ones():
    x = torch.ones(1, 1, 2, 2)
    for call, text in (
        (lambda: gistkit.plan(reserve=1), r"plan: reserve= is called reserved_bytes= now"),
        (lambda: gistkit.functional.relu(x, passes=True), "passes= is called mask_in_pool= now"),
        (lambda: gistkit.functional.max_pool2d(x, 2, zero_code=True), "zero_code= is called mask_in_pool= now"),
    ):
        with pytest.raises(TypeError, match=text):
            call()
