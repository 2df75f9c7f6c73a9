"""Every change of state, each a function of a `ledger.Transaction`."""
