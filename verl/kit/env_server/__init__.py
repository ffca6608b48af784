"""Any environment over HTTP: server and client."""
