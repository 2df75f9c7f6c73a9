"""Other libraries' public names on trainkit. A dialect translates; everything it does is trainkit's."""
