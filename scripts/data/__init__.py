"""Published data in the parquet rows that the trainer reads; one script per source."""
