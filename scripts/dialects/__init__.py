"""The systems whose specifications trainkit covers row by row, and what proves their rows."""
