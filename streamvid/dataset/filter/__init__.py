"""Conditions on columns: the text of `where=` becomes a checked tree of pyarrow calls."""
