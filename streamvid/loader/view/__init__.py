"""View of a stored sample in a delivery: which frames, which crop, which caption, and the bytes they take.

The lowest room of the loader: it imports no other room of it, and never torch, because decode workers import it too.
Read index_row.py, view.py, clip_part.py, media.py, text.py, in that order.
"""
