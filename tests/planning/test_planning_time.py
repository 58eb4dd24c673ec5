"""What keeps planning within its limits: less is looked at, and nothing is collected meanwhile."""

import gc

import pytest
import torch

import gistkit
from gistkit import zoo
from gistkit.api import planning
from gistkit.errors import BudgetError


def test_plans_and_refusals_leave_the_collector_on(monkeypatch):
    seen, made = [], planning.by_name
    monkeypatch.setattr(planning, "by_name", lambda *given: (seen.append(gc.isenabled()), made(*given))[1])
    x = torch.empty(4, 3, 32, 32, device="meta")
    with torch.device("meta"):
        model = zoo.nin(num_classes=10, image_size=32)
    gistkit.plan(model, x, hardware="h200")
    assert gc.isenabled()
    with pytest.raises(BudgetError):
        gistkit.plan(model, x, hardware="h200", budget=1)
    assert gc.isenabled() and seen == [False, False]
