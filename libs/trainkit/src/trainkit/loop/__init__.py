"""The loop: `fit` is the whole run from top to bottom; what it calls stands beside it."""
