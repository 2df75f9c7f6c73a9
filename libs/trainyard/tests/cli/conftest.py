from libs.trainyard.tests.client.conftest import yard

__all__ = ["yard"]
