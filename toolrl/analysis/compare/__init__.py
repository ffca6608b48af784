"""Do settings differ in what they learn? Runs compared over rows and seeds."""
