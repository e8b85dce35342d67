"""Curation: figures measured on the pictures of each file, used to select rows before buckets are assigned.

Read `options.py` first, then `figures.py`, `bars.py` and `scenes.py`. `units/curate_unit.py` measures one file in a
worker. `curating.py` measures all files and adds the figures to the records as columns.

`signature.py` and `groups.py` find near-duplicates; `planning/duplicates.py` applies the groups to the samples.
"""
