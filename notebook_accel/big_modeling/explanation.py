"""Why each part of a model went to its device, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def show_size(size: int) -> str:
    """Return a size as text with a unit: `1.50 GiB`.

    Args:
        size: bytes.
    """
    for factor, unit in _UNITS:
        if abs(size) >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


@dataclass(kw_only=True, slots=True)
class _Row:
    part: str
    size: int
    device: str
    why: str


@dataclass(slots=True)
class Explanation:
    """Collects the decisions about a model's parts, in order."""

    rows: list[_Row] = field(default_factory=list)

    def add_placed(self, name: str, size: int, device: int | str, tied: Sequence[str]) -> None:
        """Note that a part goes to a device.

        Args:
            name: of the part.
            size: its bytes, with those of `tied`.
            device: where it goes.
            tied: names of parts that share its weights and go with it.
        """
        why = f"with {', '.join(tied)}, which shares weights" if tied else ""
        self.rows.append(_Row(part=name, size=size, device=str(device), why=why))

    def add_split(self, name: str, size: int, device: int | str | None, room: int | None) -> None:
        """Note that a part is split.

        Args:
            name: of the part.
            size: its bytes.
            device: too small for the whole part; None if it is split because it shares weights with another.
            room: bytes left on the device.
        """
        why = "split: it shares weights with what is next"
        if room is not None:
            why = f"split: {show_size(max(room, 0))} left on {device}"
        self.rows.append(_Row(part=name, size=size, device="", why=why))

    def add_too_large(
        self, name: str, size: int, device: int | str, room: int, reserved: int, reason: str
    ) -> None:
        """Note that a part does not fit a device, which counts as full then.

        Args:
            name: of the part.
            size: its bytes.
            device: the device.
            room: bytes left on it.
            reserved: bytes that it keeps for the largest layer.
            reason: why the part is not split.
        """
        kept = f" ({show_size(reserved)} kept for the largest layer)" if reserved else ""
        why = f"not on {device}: {show_size(max(room, 0))} left{kept}, {reason}"
        self.rows.append(_Row(part=name, size=size, device="", why=why))

    def format(self, used: Mapping[int | str, int], limits: Mapping[int | str, int], total: int) -> str:
        """Return the decisions as a table, and what each device has in the end.

        Args:
            used: bytes by device.
            limits: bytes that each device may give.
            total: bytes of the model.
        """
        lines = [("part", "size", "device", "why")]
        lines += [(row.part, show_size(row.size), row.device, row.why) for row in self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        texts = [
            f"{part:<{widths[0]}}  {size:>{widths[1]}}  {device:<{widths[2]}}  {why}".rstrip()
            for part, size, device, why in lines
        ]
        texts.insert(1, "-" * max(len(text) for text in texts))
        shown = [
            f"{device}: {show_size(size)}"
            + (f" of {show_size(limits[device])}" if device in limits and device != "disk" else "")
            for device, size in used.items()
            if size or device in limits
        ]
        return "\n".join([*texts, f"{show_size(total)} in all; {'; '.join(shown)}"])
