"""The layer benchmark: encodings, each checked bit for bit before it is timed; and how small cDMA's coders are."""

from gistkit.benchmark.cases import Case, codec_cases
from gistkit.benchmark.measure import DTYPES, Job, jobs, rows
from gistkit.benchmark.ratios import CODERS, LAYOUTS, ratio_rows, summed, watched
