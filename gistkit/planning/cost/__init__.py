"""What a step costs: hardware, cost table, codecs, convolution algorithms, step times, densities."""

from gistkit.planning.cost.algorithms import Algorithm, by_part, of_part
from gistkit.planning.cost.budget import check_budget, parse_budget, parse_bytes
from gistkit.planning.cost.codec_costs import MEASURED_DENSITY, passes
from gistkit.planning.cost.density import Densities
from gistkit.planning.cost.devices import CUDA_LIBRARIES_BYTES, GIB, PRESETS, Hardware, hardware, preset_name
from gistkit.planning.cost.table import CostTable, cost_table
from gistkit.planning.cost.times import ANEW, HOST_FIGURES, StepTimes, step_fingerprint
