"""S3: transport.py creates requests, http.py sends read requests, and errors.py explains failures."""
