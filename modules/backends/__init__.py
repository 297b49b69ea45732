"""Backends of recurrent modules: how a network runs over the runs of a flat batch."""
