"""Places vLLM's KV cache in memory that the daemon can map, through vLLM's own hook for it.

vLLM allocates the KV cache of a CPU worker with one `torch.zeros` of int8 inside the context that
`get_mem_pool_context` gives it. The context here is a torch function mode: while it is entered, and in this thread
only, that one call is answered with a tensor over a `SharedPool`. Nothing of vLLM or torch is patched.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hicache_client.pool import SharedPool

_log = logging.getLogger("hicache.vllm")


class SharedPlacement(TorchFunctionMode):
    """Context manager. Afterwards `pool` is the memory behind the KV cache, or None and `reason` says why not."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` in bytes: of the backing allocations that vLLM announces in kv_cache_config.kv_cache_tensors."""
        super().__init__()
        self.sizes = frozenset(sizes)
        self.pool: SharedPool | None = None
        self.reason = "vLLM did not allocate its KV cache inside the context that it asked for"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The one allocation is ours, everything else is torch's."""
        kwargs = kwargs or {}
        if func is torch.zeros and self.pool is None and self._is_kv_cache(args, kwargs):
            size = int(args[0])
            try:
                self.pool = SharedPool(size)  # fresh memory reads as zeroes
            except OSError as error:
                self.reason = (
                    f"the KV cache of {size:,} bytes has no place in shared memory: {error.strerror or error}"
                )
            else:
                return torch.frombuffer(self.pool.buffer, dtype=torch.int8, count=size)
        return func(*args, **kwargs)

    def _is_kv_cache(self, args: Any, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        return (
            len(args) == 1
            and isinstance(args[0], int)
            and args[0] in self.sizes
            and kwargs.get("dtype") is torch.int8
            and (device is None or torch.device(device).type == "cpu")
        )


def placement(device: str, sizes: Sequence[int]) -> SharedPlacement | str:
    """The way to lend the daemon a KV cache on this kind of device, or the reason why there is none."""
    if device == "cpu":
        return SharedPlacement(sizes)
    return (
        f"the KV cache is on {device!r}, and this release moves KV to and from CPU engines only "
        "(the daemon has no lane for GPUs yet)"
    )
