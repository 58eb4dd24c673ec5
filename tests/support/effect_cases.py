"""What single decisions do, in short, and the chain that the tests of it decide on."""

from gistkit.ir.plan import Plan
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.simulate.context import Context
from gistkit.planning.simulate.effects import block_effects
from gistkit.planning.simulate.simulator import Simulator
from gistkit.planning.simulate.step_index import StepIndex
from tests.support.step_graphs import chain

CPU, TITANX = hardware("cpu"), hardware("titanx")


def plan_of(graph, *decisions, choices=(), policy="test", **fields):
    return Plan(policy, graph.fingerprint, decisions, choices, **fields)


def lives(graph, plan, hw=CPU, density=0.5):
    """{(block, what): [(first, last, bytes)]} of a plan."""
    found = {}
    for i in Simulator(graph, cost_table(graph, hw, density=density)).profile(plan).intervals:
        found.setdefault((i.block, i.what), []).append((i.first, i.last, i.nbytes))
    return found


def effects(graph, block, decision, hw=CPU, density=0.5):
    """Of one decision, where all that may hold zeros is encoded too."""
    costs, index = cost_table(graph, hw, density=density), StepIndex(graph)
    saved = (index.by_storage[s].saved for s in costs.densities if s in index.by_storage)
    context = Context(index, encodings=tuple(sorted(t for t in saved if t >= 0)))
    return block_effects(graph, costs, decision, block, context)


def short(made):
    return [(i.first, i.last, i.nbytes, i.what) for i in made.intervals]


def block_of(graph, op, nth=0, result=0):
    """The block that the nth call of an op made."""
    call = [c for c in graph.calls if c.op == op][nth]
    return next(b for b in graph.blocks if b.storage == call.writes[result])


# chain(): tasks 0 conv, 1 relu, 2 conv, 3 relu, 4 mean | 5 mean, 6 relu, 7 conv w, 8 conv i, 9 relu, 10 conv w
CHAIN = chain(2)
RELU = block_of(CHAIN, "relu")
BYTES = RELU.nbytes
