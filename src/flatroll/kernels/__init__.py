"""Array kernels: each has a torch version, and a Numba version where that is twice as fast on the CPU."""

from flatroll.kernels.scan import residual_scan, return_scan, segmented_scan, vtrace_scan, zeroed

__all__ = ["residual_scan", "return_scan", "segmented_scan", "vtrace_scan", "zeroed"]
