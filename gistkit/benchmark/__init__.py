"""The layer benchmark: encodings, each checked bit for bit before it is timed."""

from gistkit.benchmark.cases import Case, codec_cases
from gistkit.benchmark.measure import environment
from gistkit.benchmark.run import DTYPES, Job, jobs, rows

__all__ = ["DTYPES", "Case", "Job", "codec_cases", "environment", "jobs", "rows"]
