"""What autograd keeps for a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(module: nn.Module, forward: Callable[[], Any]) -> int:
    """Of a forward of the module, beside its parameters; each storage once."""
    owned = {each.untyped_storage().data_ptr() for each in module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
        del output
        return sum(each.untyped_storage().nbytes() for address, each in kept.items() if address not in owned)
