"""Delivery ledger: a log of every sample that a loader handed out, and its history over interrupted runs.

`writer.py` is used by the loader, `history.py` by readers; README.md specifies the files.
"""
