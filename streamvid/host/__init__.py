"""Operating-system facilities for all packages. This lowest layer imports nothing from streamvid except errors.

lock.py provides exclusive file locks. journal.py stores the findings of interrupted runs. processes.py starts and ends
worker processes, worker.py is their entry point, and imports.py makes them start faster. resources.py reports memory,
cores and the user's cache folder. range_file.py provides a seekable file over ranged reads.
"""
