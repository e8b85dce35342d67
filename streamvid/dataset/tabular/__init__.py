"""User metadata: one reader for CSV, JSON, JSON Lines and Parquet files, and one set of rules for column types.

The sharder, `streamvid annotate` and `streamvid plan` read metadata with this package. Read `columns.py` (columns,
types, usual names) before `reader.py` (files as blocks of rows).
"""
