"""Units of work that decode media: the part of probing and of making clips that runs in worker processes.

Read probe_unit.py first, then encode_unit.py and cut_unit.py. This package imports video, storage, source/media.py,
source/spool.py and a few small modules of the sharder, because every worker imports it when it starts.
"""
