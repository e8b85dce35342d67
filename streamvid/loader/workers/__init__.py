"""Decode processes, the memory they share with the loader, and the messages between them.

This package may import `loader/view` and the packages below the loader, but never torch. Read messages.py, arena.py,
board.py, worker.py, reader.py and pool.py, in that order. cache.py is a cache that reading threads share; audio.py
decodes audio.
"""
