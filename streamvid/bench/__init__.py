"""Benchmarks of this machine and store (`streamvid bench`), and a batch size search that times training steps.

The package may import the loader. Reading order: bench.py (measurements), verdict.py (their interpretation), store.py,
batch_search.py.
"""
