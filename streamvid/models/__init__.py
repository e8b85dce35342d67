"""What is done to models before they are trained: weights, adapters, precision, recomputing; and a small one."""
