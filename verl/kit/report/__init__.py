"""toolrl report: a run as one HTML file, to be looked at and sent."""
