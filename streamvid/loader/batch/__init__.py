"""Batches as the caller receives them, in ring memory or on the device.

This is the top layer of the loader, and the only one that imports torch. Reading order: batch.py, contents.py,
color.py, ring.py, device.py, features.py, tokens.py.
"""
