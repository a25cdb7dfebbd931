"""The secret of a run: where it comes from, and what follows where there is one.

Without a secret all who reach the ports of a run may talk to it, and what they say is data only. With one, peers prove
that they know it, and exchange pickles too.
"""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import Any, Final

from .. import environ
from .proof import KEY_BYTES

VARIABLE: Final = "NOTEBOOK_ACCEL_SECRET"
FILE_VARIABLE: Final = "NOTEBOOK_ACCEL_SECRET_FILE"
LEAST_LENGTH: Final = 16
HOW: Final = f"give all nodes the same secret ({FILE_VARIABLE} names a file that only you can read)"
"""The end of sentences about what needs a secret."""
_MAX_BYTES: Final = 1 << 16
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class Trust:
    """What nodes of a run believe of each other.

    Args:
        secret: what they prove; None lets all who reach them take part.
    """

    def __init__(self, secret: str | None = None) -> None:
        self._key = (
            None
            if secret is None
            else hmac.digest(secret.encode("utf-8", "surrogatepass"), b"notebook_accel nodes", "sha256")
        )

    @property
    def is_proven(self) -> bool:
        """Whether peers prove a secret."""
        return self._key is not None

    @property
    def key(self) -> bytes:
        """What both ends of a connection have to know; without a secret everybody knows it."""
        return bytes(KEY_BYTES) if self._key is None else self._key

    def __repr__(self) -> str:
        return "Trust(by a secret)" if self.is_proven else "Trust()"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled")


OPEN: Final = Trust()
"""Of runs without a secret."""


def find_secret(given: str | os.PathLike[str] | None) -> str | None:
    """Return the secret of a launch, None where it has none.

    Args:
        given: the secret itself, or the `Path` of its file. None looks at the variables, the file's name first.

    Raises:
        ValueError: the file cannot be read, others can read it too, or the secret is too short. No message has the
            secret.
    """
    if isinstance(given, str):
        return _check(given, "secret")
    name = "secret" if given is not None else FILE_VARIABLE
    path = given if given is not None else environ.get(FILE_VARIABLE)
    if path:
        return _check(_read_file(Path(path).expanduser(), name), f"{name}={str(path)!r}")
    text = (environ.get(VARIABLE) or "").strip()
    return _check(text, f"environment variable {VARIABLE}") if text else None


def _read_file(path: Path, name: str) -> str:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r}: the file cannot be read ({error.strerror})") from None
    if _find_open_modes(status):
        raise ValueError(
            f"{name}={str(path)!r}: other users may read or write the file (mode "
            f"{stat.S_IMODE(status.st_mode):03o}): chmod 600 {path}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{name}={str(path)!r}: the file belongs to another user: use one of your own")
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise ValueError(f"{name}={str(path)!r}: the file is no text") from None


def _find_open_modes(status: os.stat_result) -> int:
    """Return the modes by which others than this user reach a file.

    A file of root that a group of this process may read is not open: so Kubernetes hands a secret to a container with
    an `fsGroup`.
    """
    is_handed_over = status.st_uid == 0 and status.st_gid in (os.getegid(), *os.getgroups())
    return status.st_mode & (_OTHERS & ~stat.S_IRGRP if is_handed_over else _OTHERS)


def _check(secret: str, source: str) -> str:
    if len(secret) < LEAST_LENGTH:
        raise ValueError(
            f"{source}: the secret has {len(secret)} characters, at least {LEAST_LENGTH} are needed: "
            'python -c "import secrets; print(secrets.token_hex())" makes one'
        )
    return secret
