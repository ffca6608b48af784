"""verl: reinforcement learning for language models that call tools.

Importing the package loads nothing heavy: torch, ray and vLLM are imported only where they are used.
"""

__version__ = "0.1.0"
