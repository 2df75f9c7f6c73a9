"""Makes the secrets and certificates that an installation lacks."""
