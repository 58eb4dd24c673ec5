"""A plan made anew keeps what the calls have learnt that it says the same of."""

import copy

import torch
from torch import nn

import gistkit
from gistkit.runtime.program.program import Program
from tests.support.fast_cases import settle


def block(inputs):
    return nn.Conv2d(inputs, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)


def compressed():
    """Rebuilt ReLUs and, between convolutions, stored ones."""
    torch.manual_seed(0)
    stored = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    plain = nn.Sequential(*block(3), *block(8), *stored, *block(8), *block(8), *head)
    return gistkit.compress(copy.deepcopy(plain)), plain


def replan(engine, **densities):
    """The plan anew, these densities being measured: (the programs before and after)."""
    ((key, before),) = engine._programs.items()
    engine._densities[key].update({int(s): share for s, share in densities.items()})
    return before, engine._install(key, before.graph)


def test_calls_of_which_the_new_plan_says_the_same_keep_their_short_way():
    models = compressed()
    settle(models)
    engine = models[0].forward.engine
    ((_, program),) = engine._programs.items()
    sparse = [d.storage for d in program.plan.decisions if d.codec in ("zvc", "csr")]
    assert sparse, "a storage whose decision depends on its density"
    before, after = replan(engine, **{str(s): 1.0 for s in sparse[:1]})
    assert after is not before and after.decision(sparse[0]).codec == "dense"
    kept = [i for i, fast in enumerate(after.fast) if fast is not None]
    lost = [i for i, fast in enumerate(before.fast) if fast is not None and after.fast[i] is None]
    assert len(kept) > len(lost) > 0 and all(after.fast[i] is before.fast[i] for i in kept)
    touched = [i for i, s in enumerate(after._steps) if sparse[0] in {d.storage for d in (s.output, s.input) if d}]
    assert touched and not set(touched) & set(kept)
    settle(models, 2)
    assert replan(engine) == (after, after), "the same moves, the same program"
    settle(models, 3)  # one of these measures anew, and back it goes
    ((_, last),) = engine._programs.items()
    assert last is not after and last.decision(sparse[0]).codec != "dense"


def test_a_word_changes_with_what_a_fast_call_goes_by():
    models = compressed()
    settle(models)
    ((_, program),) = models[0].forward.engine._programs.items()
    other = Program(program.graph, program.plan)
    other.carry_over(program)
    assert other.fast == program.fast and any(program.fast)
    for change in ("sources", "headrooms"):
        other = Program(program.graph, program.plan)
        if change == "sources":
            other.sources = set(range(len(program.graph.storages))) - other.sources
        else:
            other.headrooms = dict.fromkeys(other.headrooms)  # type: ignore[misc]
        other.carry_over(program)
        lost = {program.step(i).op for i, fast in enumerate(program.fast) if fast is not None and other.fast[i] is None}
        assert lost == {"conv2d"} if change == "headrooms" else lost >= {"conv2d", "relu"}, change
