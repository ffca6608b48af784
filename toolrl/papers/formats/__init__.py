"""Text formats of other papers."""
