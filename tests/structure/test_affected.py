"""Which tests `make check` runs for a change, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure.affected import rank_tests
from tests.structure.source import ROOT

UNIT = "tests/unit"


def rank(*names: str) -> dict[str, int]:
    ranked = rank_tests([ROOT / name for name in names])
    return {str(path.relative_to(ROOT)): distance for path, distance in ranked.items()}


def test_the_tests_of_a_module_come_first_and_then_those_of_its_importers() -> None:
    found = rank("notebook_accel/launch/transfer/pickled.py")
    assert found[f"{UNIT}/launch/transfer/test_pickling.py"] == 1, "pickling imports pickled"
    assert f"{UNIT}/test_topology.py" not in found
    found = rank("notebook_accel/launch/transfer/pickling.py")
    assert found[f"{UNIT}/launch/transfer/test_pickling.py"] == 0
    assert 0 < found[f"{UNIT}/launch/test_preflight.py"] < 6


def test_a_name_that_a_package_hands_out_leads_to_its_module() -> None:
    """Else all tests would have to do with every module, by what `notebook_accel` itself imports."""
    found = rank("notebook_accel/quantization.py")
    assert found[f"{UNIT}/test_quantization.py"] == 0
    assert len(found) < 20
    assert rank("notebook_accel/accelerator/core.py")[f"{UNIT}/test_compilation.py"] <= 2


def test_what_tests_share_leads_to_those_that_use_it() -> None:
    found = rank(f"{UNIT}/fake_device.py")
    assert found[f"{UNIT}/launch/test_launch_fake.py"] == 2, "by fake_cases"
    assert f"{UNIT}/test_nested.py" not in found
    assert rank("tests/notebooks/test_output.py") == {"tests/notebooks/test_output.py": 0}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("docs/options.md", f"{UNIT}/config/test_tables.py"),
        ("constraints-kernels.txt", None),
        ("gone.py", None),
    ],
)
def test_other_files_lead_to_the_tests_that_name_them(changed: str, named: str | None) -> None:
    found = rank(changed)
    assert set(found.values()) <= {0}
    assert named is None or named in found


def test_what_needs_another_environment_is_left_out() -> None:
    found = rank("tests/xla/test_launch.py", "tests/gpu/cases.py", "notebook_accel/comm/xla.py")
    assert not [name for name in found if Path(name).parts[1] in ("xla", "gpu", "benchmarks")]
