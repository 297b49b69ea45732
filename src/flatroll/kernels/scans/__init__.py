"""Segmented scans: recursions backward in time within each run, for returns and advantages."""
