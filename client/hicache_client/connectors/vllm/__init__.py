"""hicache for vLLM: `{"kv_connector": "HiCacheConnector", "kv_connector_module_path":
"hicache_client.connectors.vllm", "kv_role": "kv_both"}`. Imports vLLM, when the connector is asked for."""

from typing import Any

__all__ = ["HiCacheConnector"]


def __getattr__(name: str) -> Any:
    if name == "HiCacheConnector":
        from .connector import HiCacheConnector  # noqa: PLC0415 - the other modules are of use without vLLM

        return HiCacheConnector
    raise AttributeError(name)
