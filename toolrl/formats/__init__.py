"""Tool-call formats of model families: Hermes and Qwen, Llama 3, and in XML."""
