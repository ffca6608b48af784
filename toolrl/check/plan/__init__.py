"""Memory of a rank, term by term; minimum and estimated time of a step; suggestions."""
