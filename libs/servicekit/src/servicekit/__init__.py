"""What every service needs.

gRPC's core writes lines of its own to standard error, among them one for each compressed request and each failed TLS
handshake. Whoever reaches the port could fill the disk with them, so they are off unless GRPC_VERBOSITY is set. The
core reads the variable once, when it is imported; it is taken back at once, as jobs inherit the environment.
"""

import os

if "GRPC_VERBOSITY" not in os.environ:
    os.environ["GRPC_VERBOSITY"] = "NONE"
    import grpc as grpc

    del os.environ["GRPC_VERBOSITY"]
