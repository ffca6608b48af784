"""Converters of published data to the trainer's parquet rows; one script per source."""
