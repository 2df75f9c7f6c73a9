"""Real servers for tests and for trying the services apart: Redis, PostgreSQL, an S3 server, nginx.

`fetch` gets the programs, `server` starts and ends one, `databases`, `storage` and `proxy` know how each is configured,
`yard` composes the whole set of a yard whose services run apart, `plugin` has the fixtures for pytest.
"""
