"""S3: transport.py makes requests, http.py sends those that read, errors.py explains refusals."""
