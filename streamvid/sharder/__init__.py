"""Offline: records become a sealed dataset of shards. sharder.py builds it, or reports what it would build.

May import lower floors (buckets, video, storage, dataset, plan, host), never loader. Read the files in this order; each
imports only from those before it:

    media_columns, rejections, windows → options → source/, work/ → probing → where, media_fit → assign
    → encode, plan → build, report → seal → sharder
"""
