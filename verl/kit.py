"""What was `verl.kit` is the package `toolrl`: the error of an import lists its folders. To be removed."""

from verl.moved import MOVED

_FOLDERS = ", ".join(f"{old} is {new}" for old, new in MOVED.items() if old.startswith("verl.kit."))

raise ImportError(f"verl.kit has moved: {_FOLDERS}")
