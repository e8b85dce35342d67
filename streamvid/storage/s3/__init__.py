"""S3 transport. transport.py creates requests, http.py sends read requests, and errors.py explains failures."""
