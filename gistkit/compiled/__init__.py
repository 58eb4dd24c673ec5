"""The compiled path: what a step under ``torch.compile`` keeps for backward, in fewer bytes."""

from gistkit.compiled.door import Backend, backend, compile, records_of, records_of_traced
from gistkit.compiled.partitioner import Settings, cut
