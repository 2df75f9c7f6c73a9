import socket
from pathlib import Path

import pytest
from servicekit import ports


def test_a_port_that_is_in_use_or_was_given_away_is_not_given_again(monkeypatch):
    first, second, third = [port for port in ports.candidates() if ports._is_free(port)][:3]
    monkeypatch.setattr(ports, "candidates", lambda: [first, second, third])
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        assert ports.free_port({second}) == third
        with pytest.raises(OSError, match="no free port"):
            ports.free_port({second, third})


def test_no_port_is_one_that_an_outgoing_connection_may_have():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports.LASTING) < first
