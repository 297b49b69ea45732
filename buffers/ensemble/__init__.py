"""Several replay buffers read as one."""
