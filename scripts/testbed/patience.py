"""How long tests wait for what has to happen: one number, far beyond what anything takes on a starved machine."""

PATIENCE_S = 240.0
