"""hicache: a hierarchical KV-cache for LLM inference. Decisions, storage and tensor work; no sockets, no loop."""
