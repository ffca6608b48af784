"""BM25 search in memory, its server and client."""
