"""Messages to tokens and back, by the chat template."""
