"""Buffers that live in an actor, on a cluster."""
