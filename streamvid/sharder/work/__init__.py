"""Execution of a build. pool.py and worker.py run units of work in processes on this machine.

destination.py, clips.py and staging.py manage files. tasks.py describes the division of a build into tasks, which share
findings through shared_journal.py. ray.py runs tasks on a Ray cluster. status.py reports progress.

This package imports dataset, storage, host, and the sharder's options and rejections.
"""
