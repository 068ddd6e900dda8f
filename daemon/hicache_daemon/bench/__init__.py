"""Benchmarks, each a module with `run(quick, progress) -> list[Case]`; `report` gives them one shape."""
