"""The client that lives in an engine: pyzmq and msgspec alone; importing it loads neither torch nor pydantic."""
