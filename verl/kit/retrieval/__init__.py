"""Search tools: BM25 in memory, a retrieval server and its client."""
