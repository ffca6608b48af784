"""vLLM's OpenAI server, with prompts and tool calls in the format of the training."""
