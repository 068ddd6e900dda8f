"""Which rows leave a tier first. One file per policy; all pass tests/conformance/test_eviction.py."""
