"""The web server: values of addresses, pages, checks of requests, and routes."""
