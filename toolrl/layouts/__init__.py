"""Row layouts of published data sets."""
