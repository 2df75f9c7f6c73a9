"""The commands of `yard`, by subject. Each module registers its own."""
