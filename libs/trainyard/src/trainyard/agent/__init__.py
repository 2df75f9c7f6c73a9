"""The agent: the first process of every node of an attempt. `python -m trainyard.agent NODE_FOLDER`.

It starts the workers, keeps watch over them, and carries what they produce to the yard.

It starts in two stages. `boot`, `plan`, `contract`, `spawn` and `native` get the workers running and import next to
nothing; everything else, with asyncio and gRPC, is imported by `supervisor` while the workers already run.
"""
