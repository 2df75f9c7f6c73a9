"""Pure rules of the store: no database, no network, no clock."""
