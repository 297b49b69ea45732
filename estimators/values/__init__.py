"""Value estimators: modules that write advantages and value targets into a batch."""
