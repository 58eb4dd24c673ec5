"""Blocks of ``tests.support.step_graphs.Step`` while it is built: how long each lives and what needs it."""

from dataclasses import dataclass, field

from gistkit.ir.tasks import BEFORE, Block, Use

OUTLIVING = ("weight", "buffer", "input", "weight_gradient")
"""Kinds that are there when the step is over."""


@dataclass
class Life:
    """A block under construction."""

    kind: str
    nbytes: int
    first: int
    storage: int = -1
    last: int = BEFORE
    saved: int = -1
    uses: list[Use] = field(default_factory=list)
    holder: int = -1
    dtype: str = "float32"
    name: str = ""

    def block(self, number, end, outlives=False):
        """The block of that number in a step of ``end`` tasks."""
        last = end if outlives or self.kind in OUTLIVING else self.last
        uses = tuple(sorted(self.uses, key=lambda u: u.task))
        told = (self.holder, self.dtype, self.name)
        return Block(number, self.kind, self.nbytes, self.storage, self.first, last, self.saved, uses, *told)
