"""Benchmarks of this machine and store (`streamvid bench`), and batch sizes found by timing training steps.

May import the loader. Read bench.py (the measurements), verdict.py (what they mean), store.py, batch_search.py.
"""
