"""Buffers that other processes and machines use."""
