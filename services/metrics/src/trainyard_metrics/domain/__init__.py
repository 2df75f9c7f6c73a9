"""Pure rules of the ingestor: no files, no database, no network, no clock."""
