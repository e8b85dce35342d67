"""Units of work that read media in worker processes: probing, measuring, encoding and cutting.

Read probe_unit.py first, then curate_unit.py, encode_unit.py and cut_unit.py. This package imports little besides
video, storage, source/media.py and source/spool.py, because every worker imports it when it starts.
"""
