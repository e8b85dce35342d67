"""Conditions of `where=`. Read filter.py, then expression.py (parser) and nodes.py (pyarrow calls)."""
