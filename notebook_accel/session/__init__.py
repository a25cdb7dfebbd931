"""Session: worker processes that stay, and functions and cells that run on them."""

from .core import Session, current_session

__all__ = ["Session", "current_session"]
