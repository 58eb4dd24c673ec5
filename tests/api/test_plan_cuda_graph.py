"""plan(cuda_graph=True): what a graph cannot hold is no choice, and the host's time does not count."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.capture import capture
from gistkit.planning.cost import parse_budget
from gistkit.planning.cost.table import GRAPH_LIBRARIES_BYTES
from gistkit.planning.forms import recompute_plan

X, TARGETS = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
BATCH_BYTES = X.nbytes + TARGETS.nbytes


def planned(policy, **words):
    model = gistkit.zoo.resnet18(num_classes=10, image_size=32)
    return gistkit.plan(model, X, TARGETS, loss_fn=F.cross_entropy, hardware="h100-sxm", policy=policy, **words)


@pytest.mark.parametrize("policy", ["gist", "checkpoint", "optimal"])
def test_nothing_is_sparse_or_sent_away(policy):
    whole = planned(policy)
    assert policy != "gist" or any(d.form.sparse for d in whole.decisions)
    made = planned(policy, cuda_graph=True)
    assert not any(d.form.sparse or d.on_host for d in made.decisions)
    assert made.step_s < whole.step_s  # sixteen small images leave the device waiting for the host
    assert made.contract.reserved_bytes == BATCH_BYTES


def test_a_budget_has_the_copy_of_the_batch_in_it():
    least = planned("checkpoint", cuda_graph=True)
    made = planned("optimal", cuda_graph=True, budget=least.peak_bytes, reserved_bytes=0)
    assert made.peak_bytes <= least.peak_bytes
    plain_bytes = planned("plain", cuda_graph=True).peak_bytes - BATCH_BYTES - GRAPH_LIBRARIES_BYTES
    share = planned("optimal", cuda_graph=True, budget="120%")
    assert share.budget_bytes == parse_budget("120%", plain_bytes)


def test_the_output_is_let_go_of():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 4096))
    labels = torch.arange(16)
    words = {"loss_fn": F.cross_entropy, "policy": "plain", "measure": False}
    peaks = [gistkit.plan(model, X, labels, cuda_graph=g, **words).peak_bytes for g in (False, True)]
    assert peaks[0] - (peaks[1] - X.nbytes - labels.nbytes) == 16 * 4096 * 4


def test_policies_that_send_to_the_host_are_refused():
    with pytest.raises(gistkit.PlanError, match="or the plan is for a CUDA graph, which holds no transfers"):
        planned("vdnn-all", cuda_graph=True)


def test_nothing_that_draws_runs_anew():
    layers = [layer for n in (3, 8, 8, 8, 8) for layer in (nn.Conv2d(n, 8, 3, padding=1), nn.GELU())]
    model = nn.Sequential(*layers[:4], nn.Dropout(0.5), *layers[4:], nn.Flatten(), nn.Linear(8192, 10)).train()
    graph = capture(model, (X,), backward=True, loss_fn=F.cross_entropy, targets=(TARGETS,))
    for cuda_graph in (False, True):
        words = {"loss_fn": F.cross_entropy, "policy": "checkpoint", "cuda_graph": cuda_graph}
        plan = gistkit.plan(model, X, TARGETS, hardware="h100-sxm", **words)
        calls = {c for s in recompute_plan(graph, {d.storage: d for d in plan.decisions}).segments for c in s.calls}
        assert calls and any(graph.calls[c].op == "dropout" for c in calls) is not cuda_graph
        assert "host" not in plan.details  # this plan as a graph would be refused, or is one


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_draws_where_it_drops(dropout):
    class Attention(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

    graph = capture(Attention(), (torch.randn(2, 4, 8, 16, requires_grad=True),), backward=True)
    assert any(task.draws for task in graph.tasks) is (dropout > 0)


def test_a_plan_that_waits_for_the_host_names_the_graph():
    made = planned("checkpoint")
    as_graph = planned("checkpoint", cuda_graph=True)
    assert f"as a CUDA graph the step would take {1e3 * as_graph.step_s:.1f} ms, not" in made.details["host"]
    assert "host" not in as_graph.details and "host" not in planned("vdnn-all").details
    cpu = gistkit.plan(gistkit.zoo.resnet18(num_classes=10, image_size=32), X, hardware="cpu", policy="checkpoint")
    assert "host" not in cpu.details


@pytest.mark.parametrize("training", [False, True])
def test_a_randomized_relu_draws_where_it_is_trained(training):
    layers = nn.Sequential(nn.Linear(8, 8), nn.RReLU().train(training))
    graph = capture(layers, (torch.randn(4, 8, requires_grad=True),), backward=True)
    assert {task.op for task in graph.tasks if task.draws} == ({"rrelu"} if training else set())
