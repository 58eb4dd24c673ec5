"""The layer benchmark: encodings, each checked bit for bit before it is timed."""

from gistkit.benchmark.cases import Case, codec_cases
from gistkit.benchmark.measure import DTYPES, Job, environment, jobs, rows
