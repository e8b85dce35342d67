"""S3: transport.py sends the requests, http.py the reads among them, errors.py explains refusals."""
