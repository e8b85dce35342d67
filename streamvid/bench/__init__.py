"""Benchmarks of this machine and store (`streamvid bench`), and a search for batch sizes by timing training steps.

May import the loader. Read bench.py (measurements), verdict.py (their interpretation), store.py, batch_search.py.
"""
