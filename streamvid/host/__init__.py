"""What the machine offers to every room, on the lowest floor: imports nothing of the package but errors.

lock.py: exclusive file locks.   journal.py: findings of interrupted runs.   processes.py: worker processes, seen from
their parent, and worker.py from within.   resources.py: memory, cores and the user's cache folder.   range_file.py: a
seekable file over ranged reads.
"""
