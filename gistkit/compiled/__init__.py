"""The compiled path: what a step under ``torch.compile`` keeps for backward, in fewer bytes."""

from gistkit.compiled.edit import Builder, Cone, encode, rebuild
from gistkit.compiled.split import Pair
