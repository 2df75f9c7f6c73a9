"""trainkit: the training library."""
