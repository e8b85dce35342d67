"""What is done to models before they are trained: weights, adapters, precision, recomputing. And a small one of our own."""
