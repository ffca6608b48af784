"""Reads torch's checkpoints without running code: their index and their objects are pickles, which may name any."""

from __future__ import annotations

import io
import pickle
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import safe_globals

_INDEX_NAMES = {  # classes and functions in an index
    *((metadata.__name__, name) for name in vars(metadata) if name.endswith(("Metadata", "Index", "Properties"))),
    (metadata.__name__, StorageMeta.__name__),
    (metadata.__name__, "_MEM_FORMAT_ENCODING"),
    (filesystem.__name__, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", PosixPath.__name__),
    ("pathlib._local", PosixPath.__name__),
}
_GENERATOR = np.zeros(0, dtype=np.uint32)  # as in numpy's random state
# Of numpy's arrays, besides what torch allows.
_OBJECTS: list[Any] = [_GENERATOR.__reduce__()[0], np.ndarray, np.dtype, type(_GENERATOR.dtype)]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in _INDEX_NAMES:
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which is no part of one and is not run")
        return super().find_class(module, name)


class TensorReader(FileSystemReader):
    """As torch's, with an index that holds nothing but what torch writes there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises UnpicklingError for an index that names anything else."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata: Metadata = _IndexUnpickler(stream).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorPlanner(DefaultLoadPlanner):
    """As torch's, which unpickles everything that is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises UnpicklingError for anything but tensors, plain values and numpy's random state."""
        with safe_globals(_OBJECTS):
            content = torch.load(value, weights_only=True)
        plain = io.BytesIO()
        torch.save(
            content, plain
        )  # torch's own method reads without limits: it gets what has passed them, written anew
        plain.seek(0)
        super().load_bytes(read_item, plain)
