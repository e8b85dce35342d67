"""Metadata as users write it: one reader of CSV, JSON, JSON Lines and Parquet, and one way to type columns.

The sharder, `streamvid annotate` and forecasts of metadata read their input here. Imports storage only. Read
`columns.py` (a column, its type, its usual names) before `reader.py` (files as blocks of rows).
"""
