"""Functions for returns and advantages of tensors ``[*B, T]``."""
