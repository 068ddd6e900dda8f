"""Notices that a model's weights are no longer those that were described."""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from transformers import PreTrainedModel

Tables = list[dict[str, Any]]  # per module its parameters, its buffers and its modules


def _tables(modules: Sequence[torch.nn.Module]) -> Tables:
    return [table for m in modules for table in (m._parameters, m._buffers, m._modules)]


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What differs after a change; the version counts changes in place. Some tensors have no version (made
    in inference mode) or no memory of their own (wrapper subclasses): their identity must do."""
    version = -1 if tensor.is_inference() else tensor._version
    try:
        pointer = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # no memory of its own, as torch says in either way
        pointer = 0
    return pointer, tensor.dtype, tensor.shape, version


def _states(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    try:  # the usual case in one expression: this runs for every request
        return [(t.data_ptr(), t.dtype, t.shape, t._version) for t in tensors]
    except (RuntimeError, NotImplementedError):  # some tensor has no version or no memory: one by one
        return [_state(t) for t in tensors]


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # no storage to hold: the tensor itself is held
        return None


class WeightsWatch:
    """The weights as they were when this was made.

    Holds the tensors and their memory, so that neither an identity nor an address can come back with other
    contents; replaced weights are therefore freed only when the watch is.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = list(model.modules())
        self._tables = _tables(self._modules)
        self._entries = [entry for table in self._tables for entry in table.values()]
        self._tensors = [entry for entry in self._entries if isinstance(entry, torch.Tensor)]
        self._states = _states(self._tensors)
        self._storages = [_storage(t) for t in self._tensors]

    def unchanged(self) -> bool:
        """False after a replaced tensor or module, another dtype, shape or memory, or a change in place that
        torch counts (not through `.data`).

        Looks into the modules' own tables: while these hold the same objects, the lists made from them are
        complete. `named_parameters` and `named_buffers` cost several times as much.
        """
        tables = _tables(self._modules)
        if not all(map(is_, tables, self._tables)):
            return False
        entries = [entry for table in tables for entry in table.values()]
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        return _states(self._tensors) == self._states

    def training(self) -> bool:
        """Whether any module is in training mode; complete while `unchanged`."""
        return any([m.training for m in self._modules])
