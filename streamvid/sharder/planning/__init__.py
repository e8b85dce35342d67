"""Planning: from records to a shard plan. All steps are deterministic, so every machine makes the same plan (SHARD-1).

This package imports `sharder/probing.py`, `sharder/source` and the layers below. Read `where.py` (selection of rows)
and `media_fit.py` (conditioning inputs) first, then `assign.py` (records → samples with buckets and keys), `plan.py`
(samples → shards) and `trusted.py` (plans from metadata, without opening files).
"""
