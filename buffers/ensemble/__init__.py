"""An ensemble: several replay buffers sampled as one."""
