"""One network under vDNN's policies: memory and seconds as the paper counts them (see :mod:`bench.papers.vdnn`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from bench.papers.baselines import average_bytes, gradient_maps, network_wide, oracular_s
from bench.papers.library import LibraryStep
from gistkit.ir.plan import Plan
from gistkit.ir.queries import CONV, Layer, layers
from gistkit.ir.tasks import Block
from gistkit.planning.policies.convolutions import ConvAlgorithms
from gistkit.planning.policies.vdnn import vdnn, vdnn_dyn
from gistkit.planning.simulate.simulator import Profile, Simulation, Simulator, memory_bytes

POLICIES = {"all(m)": ("all", "m"), "all(p)": ("all", "p"), "conv(m)": ("conv", "m"), "conv(p)": ("conv", "p")}
"""The paper's static policies, what they offload and with which algorithms; ``dyn`` beside them."""


@dataclass(frozen=True)
class Case(LibraryStep):
    """A step in the library's view, its costs, and what each policy makes of it."""

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return layers(self.graph)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        made = {n: vdnn(self.graph, self.costs, offload=o, algorithms=a) for n, (o, a) in POLICIES.items()}
        return {**made, "dyn": vdnn_dyn(self.graph, self.costs)}

    @cached_property
    def runs(self) -> dict[str, Simulation]:
        return {name: self._simulator.run(plan) for name, plan in self.plans.items()}

    @cached_property
    def profiles(self) -> dict[str, Profile]:
        return {name: self._simulator.profile(plan) for name, plan in self.plans.items()}

    @cached_property
    def _simulator(self) -> Simulator:
        return Simulator(self.graph, self.costs)

    @cached_property
    def _counted(self) -> frozenset[int]:
        """Blocks of Fig. 2: all but weight gradients."""
        return frozenset(b.id for b in self.graph.blocks if b.kind != "weight_gradient")

    @cached_property
    def _managed(self) -> frozenset[int]:
        """Counted blocks that belong to the feature extraction part."""
        found: set[int] = set()
        gradients = {b.id for b in gradient_maps(self.graph)}
        for layer in self.layers:
            if layer.features:
                found.update((*layer.x, *layer.y, *layer.own, *layer.weights))
                for t in layer.backward:
                    found |= gradients & {*self.graph.tasks[t].reads, *self.graph.tasks[t].writes}
        return frozenset(found)

    def baseline_bytes(self, algorithms: str, *, managed: bool = False, workspace: bool = True) -> int:
        """The improved network-wide allocation under (m) or (p) of what is counted."""
        blocks = tuple(b for b in self.graph.blocks if b.id in (self._managed if managed else self._counted))
        found = network_wide(replace(self.graph, blocks=blocks), self.costs, self._algorithms(algorithms))
        return found.total_bytes - (0 if workspace else found.workspace_bytes)

    def _algorithms(self, which: str) -> dict[int, str]:
        found = ConvAlgorithms(self.graph, self.costs)
        by_call = found.of(which)
        return {t: by_call[call] for call, tasks in found.tasks.items() for t in tasks}

    def memory(self, policy: str, *, everything: bool = False, workspace: bool = True) -> list[int]:
        """Bytes by task under a policy, of the feature extraction part or of all that is counted."""
        blocks = self._counted if everything else self._managed
        step = self.profiles[policy]
        kept = [
            i for i in step.intervals if i.block in blocks or (i.block < 0 and (workspace or i.what != "workspace"))
        ]
        return list(memory_bytes(kept, step.tasks))

    def most(self, policy: str, *, everything: bool = False) -> int:
        """The maximum memory."""
        return max(self.memory(policy, everything=everything))

    def saved(self, policy: str, *, workspace: bool = True) -> tuple[float, float]:
        """Reduction of the maximum and of the average memory over time, against the baseline (p). ``workspace`` False
        leaves the policy's out, not the baseline's: what is saved where no workspace is there when memory peaks."""
        base = self.baseline_bytes("p", managed=True)
        memory, run = self.memory(policy, workspace=workspace), self.runs[policy]
        ends = (*run.start_s[1:], run.step_s)
        area = sum(m * (end - start) for m, start, end in zip(memory, run.start_s, ends, strict=True))
        return 1 - max(memory) / base, 1 - area / run.step_s / base

    def saved_of_all(self, policy: str) -> tuple[float, float]:
        """As :meth:`saved`, of everything on the device: classifier and weight gradients too."""
        base = network_wide(self.graph, self.costs, self._algorithms("p")).total_bytes
        run = self.runs[policy]
        return 1 - run.peak_bytes / base, 1 - average_bytes(run) / base

    def loss(self, policy: str) -> float:
        """Throughput lost against the oracular baseline, feature extraction layers alone."""
        ideal = oracular_s(self.graph, self.costs, features_only=True)
        classifier = oracular_s(self.graph, self.costs) - ideal
        return 1 - ideal / (self.runs[policy].step_s - classifier)

    def on_host(self, policy: str) -> float:
        """Share of all allocations that is in host memory: what was offloaded over it and the maximum on the GPU."""
        moved = self.runs[policy].d2h_bytes
        return moved / (moved + self.most(policy, everything=True))

    def unused(self) -> float:
        """Share of the baseline that even the layer with the largest demand does not use."""
        named = self._algorithms("p")

        def demand(task: int) -> int:
            t = self.graph.tasks[task]
            held: list[Block] = [self.graph.blocks[b] for b in {*t.reads, *t.writes} if b in self._counted]
            return sum(b.nbytes for b in held) + self.costs.workspace_bytes(task, named.get(task, ""))

        return 1 - max(demand(t.index) for t in self.graph.tasks) / self.baseline_bytes("p")

    def feature_share(self) -> float:
        """Share of the feature extraction layers in the baseline (p)."""
        return self.baseline_bytes("p", managed=True) / self.baseline_bytes("p")

    def _plain(self, algorithms: str) -> Simulation:
        return self._simulator.run(vdnn(self.graph, self.costs, offload="none", algorithms=algorithms))

    def plain_s(self, algorithms: str) -> float:
        """Seconds of a step without offloads."""
        return self._plain(algorithms).step_s

    def reuse_s(self, algorithms: str = "p") -> float:
        """Seconds between the end of the first layer's forward and the start of its backward, nothing offloaded."""
        run, first = self._plain(algorithms), self.layers[0]
        return run.start_s[first.backward[0]] - run.start_s[first.forward + 1]

    def conv_share(self, algorithms: str = "p") -> float:
        """Share of the CONV layers in the time of the feature extraction part under (m) or (p)."""
        named = self._algorithms(algorithms)

        def seconds(kinds: tuple[str, ...]) -> float:
            tasks = [t for la in self.layers if la.features and (not kinds or la.kind in kinds) for t in la.tasks]
            return sum(self.costs.task_s(t, named.get(t, "")) for t in tasks)

        return seconds((CONV,)) / seconds(())
