"""Offline sharder, which turns records into a sealed dataset of shards. The entry points are in sharder.py.

This package may import the lower layers (buckets, video, storage, dataset, plan, host), but never the loader. Read
the files in this order; each imports only from earlier ones:

    media_columns, rejections, windows, work_options → options → source/, work/ → units/ → probing → planning/
    → encode → build, report → seal → sharder
"""
