"""Facilities of the machine for every room, on the lowest floor. Imports nothing from the package except errors.

lock.py: exclusive file locks.   journal.py: findings of interrupted runs.   processes.py: worker processes as seen by
their parent, and worker.py from inside.   resources.py: memory, cores and the user's cache folder.   range_file.py: a
seekable file over ranged reads.
"""
