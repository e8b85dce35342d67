"""What a delivery shows of a stored sample: which frames, which crop, which caption, and which bytes that takes.

The lowest room of the loader: it imports nothing else of it, and never torch, because decode workers import it too.
Read index_row.py, view.py, clip_part.py, media.py, text.py, in that order.
"""
