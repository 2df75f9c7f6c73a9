"""Initial values of modules that may be larger than a process's memory: computed or read a submodule at a time."""
