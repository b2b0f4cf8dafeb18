"""The control plane of entropic-time inference: signals, laws, loop, blocks and batching. NumPy only."""

__version__ = "0.1.0"
