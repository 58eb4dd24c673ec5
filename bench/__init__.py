"""Benchmarks: layers (`python -m bench.run`), training steps (`python -m bench.steps`), tables made from their rows."""
