"""View of a stored sample in a delivery: its frames, crop and caption, and the bytes to read for them.

This is the lowest package of the loader. It imports neither other packages of the loader nor torch, because decode
workers import it. Read index_row.py, view.py, clip_part.py, media.py, audio.py and text.py, in this order.
"""
