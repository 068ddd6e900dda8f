"""The engine's side of hicache. Names load on first use: importing this package costs next to nothing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_client.aio import AsyncClient
    from hicache_client.handles import AsyncLoadHandle, AsyncStoreHandle
    from hicache_client.options import EMPTY, ClientOptions, ClientStats
    from hicache_client.paths import runtime_dir
    from hicache_client.pool import SharedPool
    from hicache_client.probe import describe
    from hicache_client.sync import Client
    from hicache_client.sync_handles import LoadHandle, StoreHandle

__all__ = [
    "EMPTY",
    "AsyncClient",
    "AsyncLoadHandle",
    "AsyncStoreHandle",
    "Client",
    "ClientOptions",
    "ClientStats",
    "LoadHandle",
    "SharedPool",
    "StoreHandle",
    "describe",
    "runtime_dir",
]


def __getattr__(name: str) -> Any:
    homes = {
        "EMPTY": "options",
        "AsyncClient": "aio",
        "AsyncLoadHandle": "handles",
        "AsyncStoreHandle": "handles",
        "Client": "sync",
        "ClientOptions": "options",
        "ClientStats": "options",
        "LoadHandle": "sync_handles",
        "SharedPool": "pool",
        "StoreHandle": "sync_handles",
        "describe": "probe",
        "runtime_dir": "paths",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
