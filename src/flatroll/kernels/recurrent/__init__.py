"""Triton kernels of GRU and LSTM over runs of rows; imported on first use."""
