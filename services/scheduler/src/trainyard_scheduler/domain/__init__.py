"""Rules of the scheduler, pure: no gRPC, no database, no clock of their own."""
