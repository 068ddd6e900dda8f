"""Bytes between L1 and L2. Knows blocks, offsets and layers; never keys, never the store."""
