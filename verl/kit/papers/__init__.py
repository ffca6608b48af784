"""What the recipes of other papers need beside the path: rewards and text formats, loaded by name."""
