"""Array kernels: one torch form of each, a Numba form where it is twice as fast on the CPU."""

from flatroll.kernels.scans.returns import residual_scan, return_scan, vtrace_scan, zeroed
from flatroll.kernels.scans.scan import segmented_scan

__all__ = ["residual_scan", "return_scan", "segmented_scan", "vtrace_scan", "zeroed"]
