"""Conditions of `where=`. Read filter.py, then expression.py (text to a checked tree) and nodes.py (pyarrow calls)."""
