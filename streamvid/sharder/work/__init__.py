"""Execution of a build: destination.py and staging.py manage files, status.py reports progress to other processes, and
pool.py and worker.py run tasks.

This package imports dataset, storage, host, and the sharder's options and rejections.
"""
