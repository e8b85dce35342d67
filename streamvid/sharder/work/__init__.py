"""Units of work: destination.py and staging.py manage their files; pool.py and worker.py run them.

Imports dataset, storage, host and the sharder's options.
"""
