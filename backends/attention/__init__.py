"""Paged attention kernels, registered with transformers by name."""
