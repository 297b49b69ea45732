"""Returns and advantages as functions of tensors ``[*B, T]``."""
