"""Web server: URL parameters, pages, request checks, and routes."""
