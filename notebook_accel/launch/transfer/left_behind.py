"""Accelerators stay in the process that made them: others get a stand-in, which can be carried but not used.

States of Accelerate are those of the receiver: with that of the sender each rank would be the first of one.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from ... import probes

_MODULES: Final = ("accelerate.accelerator", "notebook_accel.accelerator.core")


class LeftBehind:
    """Stands for an accelerator of another process: every use is an error.

    Args:
        what: names the accelerator, and says where it was made.
    """

    def __init__(self, what: str) -> None:
        vars(self)["what"] = what

    def __repr__(self) -> str:
        return f"<{vars(self)['what']}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return LeftBehind, (vars(self)["what"],)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols, such as that of copies
            raise AttributeError(name)
        self._refuse()

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{vars(self)['what']}; it stays in the process that made it: make it inside the function that is launched"
        )


def is_accelerator(obj: object) -> bool:
    """Return whether an object is an accelerator, of this package or of Accelerate itself."""
    return any(kind.__name__ == "Accelerator" and kind.__module__ in _MODULES for kind in type(obj).__mro__)


def is_their_state(obj: object) -> bool:
    """Return whether an object is a state of Accelerate itself, as `TrainingArguments` of Transformers have one."""
    return type(obj).__module__ == "accelerate.state" and hasattr(type(obj), "_shared_state")


def join_state(kind: Any) -> Any:
    """Return a state of Accelerate that shows what this process is, once there is an `Accelerator`."""
    state = object.__new__(kind)
    state.__dict__ = kind._shared_state
    return state


def describe(accelerator: Any) -> str:
    """Return what an accelerator is, and where it was made, as far as that is known."""
    text = f"this is an {type(accelerator).__name__} of another process"
    if (made_at := vars(accelerator).get("_made_at")) is not None:
        text += f", made in {probes.describe_line(*made_at)}"
    return text
