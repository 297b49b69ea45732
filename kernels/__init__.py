"""Array kernels: one torch form of each, a Numba form where it is twice as fast on the CPU."""

from flatroll.kernels.scan import residual_scan, segmented_scan

__all__ = ["residual_scan", "segmented_scan"]
