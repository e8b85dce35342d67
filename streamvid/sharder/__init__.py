"""Offline sharder, which turns records into a sealed dataset of shards. The entry points are in sharder.py.

This package may import the lower layers (buckets, video, storage, dataset, plan, host, cluster), but never the loader.
Read the files in this order; each imports only from earlier ones:

    media_columns, rejections, windows, work_options, curation/ → options → source/, work/ → units/ → probing
    → curating, planning/ → encode → build, report → seal → sharder
"""
