"""Columns added to a sealed dataset. Read annotate.py, then file.py (annotation file) and join.py (row matching)."""
