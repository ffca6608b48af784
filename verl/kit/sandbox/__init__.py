"""The code sandbox, its server and client, and the tools that run code in it."""
