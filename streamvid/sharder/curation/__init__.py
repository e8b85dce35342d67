"""Curation: figures of the pictures of a file, by which rows are selected before buckets are assigned.

Read in this order: `options.py`, `figures.py`. `units/curate_unit.py` measures one file in a worker, and `curating.py`
does so for all files and adds the figures to the records as columns.

`signature.py` and `groups.py` find near-duplicates; `planning/duplicates.py` applies the groups to the samples.
"""
