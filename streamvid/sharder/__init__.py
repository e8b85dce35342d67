"""Offline sharder: turns records into a sealed dataset of shards. sharder.py performs the run or a dry run.

May import the lower layers (buckets, video, storage, dataset, plan, host), never loader. Read the files in this order;
each imports only from earlier ones:

    media_columns, rejections, windows → options → source/, work/ → probing → where, media_fit → assign
    → encode, plan → build, report → seal → sharder
"""
