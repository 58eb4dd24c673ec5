"""Benchmarks of the checkout: steps (`python -m bench.steps`), plans, tables from rows. Layers: `gistkit bench`."""
