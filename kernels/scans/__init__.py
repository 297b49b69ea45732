"""Segmented scans: returns and residuals run backwards over the rows of each run."""
