"""Backends of recurrent modules: several ways to run a GRU or LSTM over the runs of a flat batch."""
