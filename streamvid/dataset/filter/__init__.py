"""Conditions that `where=` accepts. Read filter.py, then expression.py (parser) and nodes.py (pyarrow calls)."""
