"""What an agent of torch elastic does beside starting workers."""

from __future__ import annotations

import logging
import socket

import pytest
from torch.distributed.elastic import events

from notebook_accel import notebook_launcher


def _own_rank() -> str | None:
    import os

    return os.environ.get("RANK")


def test_no_event_is_written_that_nobody_reads(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Each would be made of the machine's name, which a name server may take seconds to tell."""
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", lambda name="": asked.append(name) or "host")
    written: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: written.append(record.getMessage()))
    logger = events._get_or_create_logger("null")
    logger.addHandler(handler)
    try:
        found = notebook_launcher(
            _own_rank,
            num_processes=2,
            num_nodes="1:2",
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{port}",
            view="none",
            returns="all",
        )
        assert found == ["0", "1"]
    finally:
        logger.removeHandler(handler)
    assert not asked and not "".join(written)
