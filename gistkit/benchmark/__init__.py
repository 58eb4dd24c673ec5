"""The layer benchmark: encodings, fused operators and their rivals, each checked bit for bit before it is timed."""

from gistkit.benchmark.cases import Case
from gistkit.benchmark.measure import environment
from gistkit.benchmark.picture import plot_rows
from gistkit.benchmark.run import DTYPES, FAMILIES, Job, all_cases, jobs, rows

__all__ = ["DTYPES", "FAMILIES", "Case", "Job", "all_cases", "environment", "jobs", "plot_rows", "rows"]
