"""Operating-system facilities for all packages. This lowest layer imports nothing from streamvid except errors.

lock.py: exclusive file locks.   journal.py: findings of interrupted runs.   processes.py: worker processes as seen by
their parent.   worker.py: start of worker processes.   resources.py: memory, cores and the user's cache folder.
range_file.py: seekable file over ranged reads.
"""
