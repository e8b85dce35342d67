"""Batches as the caller receives them, over the ring or on the device.

The highest package of the loader, and the only one that imports torch. Read batch.py, contents.py and color.py,
ring.py, device.py, then features.py and tokens.py.
"""
