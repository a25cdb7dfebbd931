"""Sources of cells on their way to workers."""

from __future__ import annotations

from notebook_accel.launch.transfer import cell_sources


def test_only_new_sources_are_collected() -> None:
    import linecache

    linecache.cache["<a cell of a test>"] = (3, None, ["x=1"], "<a cell of a test>")
    try:
        assert cell_sources.collect()["<a cell of a test>"] == ["x=1"]
        assert "<a cell of a test>" not in cell_sources.collect({"<a cell of a test>"})
    finally:
        del linecache.cache["<a cell of a test>"]
