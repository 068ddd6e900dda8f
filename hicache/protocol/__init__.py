"""The wire: messages, frames, versions. The product's spec; see docs/internals/wire.md."""
