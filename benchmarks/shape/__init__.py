"""Code metrics: functions entered per call, import chains, file sizes, comments."""
