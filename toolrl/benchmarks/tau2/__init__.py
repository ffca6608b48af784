"""tau2: customer service with simulated users."""
