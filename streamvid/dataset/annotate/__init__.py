"""Columns added to a sealed dataset. Read annotate.py, then file.py (the annotation) and join.py (rows to samples)."""
