"""Batches as the caller receives them, in ring memory or on the device.

This is the top package of the loader, and the only loader package that imports torch. Read batch.py, contents.py,
color.py, ring.py, device.py, features.py and tokens.py, in that order.
"""
