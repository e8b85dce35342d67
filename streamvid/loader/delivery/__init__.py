"""Pipeline that turns plan steps into complete batches ahead of the caller, and replaces bad samples (BAD-1).

This package may import `loader/view`, `loader/workers`, mix.py and options.py, but never torch. Read delivery.py,
requests.py, pipeline.py, flight.py, then decoded.py or stored.py (the kinds of delivery), and repair.py.
"""
