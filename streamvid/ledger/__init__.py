"""Delivery ledger: a log of every sample that a loader handed out, and the history of a run across interruptions.

`writer.py` is used by the loader, `history.py` by readers; README.md specifies the files.
"""
