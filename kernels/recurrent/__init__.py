"""Triton forms of the GRU and the LSTM over runs of rows; they load only where they are called."""
