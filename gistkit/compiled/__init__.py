"""The compiled path: what a step under ``torch.compile`` keeps for backward, in fewer bytes."""

from gistkit.compiled.door import Backend, backend, compile, records_of
from gistkit.compiled.edit import Builder, Cone, encode, rebuild
from gistkit.compiled.moves import Settings
from gistkit.compiled.partitioner import cut
from gistkit.compiled.record import GraphRecord, Kept
from gistkit.compiled.split import Pair
from gistkit.compiled.traced import records_of as records_of_traced
