"""Forecasts of a run's deliveries and costs, for sealed datasets and for metadata (`streamvid plan`).

This package may import all packages up to loader and sharder. Read run.py (input and result) first, then dataset.py
and metadata.py (the two sources), then counts.py, loads.py, batches.py and host.py, which compute the parts.
"""
