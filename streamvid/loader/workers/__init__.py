"""Decode processes, the memory they share with the loader, and the messages between them.

May import `loader/view` and the packages below the loader; never torch. Read messages.py, arena.py, worker.py,
reader.py and pool.py, in that order. cache.py is a cache that reading threads share.
"""
