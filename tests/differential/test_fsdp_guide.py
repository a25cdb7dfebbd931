"""The FSDP config of the Transformers guide launches a script of ours and one of Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.launching import alone, run  # noqa: F401 - the fixture

GUIDE = Path(__file__).parents[1] / "unit" / "configs" / "fsdp_transformers_guide.yaml"
SCRIPT = Path(__file__).with_name("guide_script.txt")


def test_the_guides_config_launches_both() -> None:
    pytest.importorskip("transformers")
    Path("train.py").write_text(SCRIPT.read_text())
    out, _ = run("--cpu", "--config_file", str(GUIDE), "train.py", HF_HUB_OFFLINE="1")
    lines = out.splitlines()
    blocks = "['FSDPBertForSequenceClassification', 'FSDPBertLayer', 'FSDPBertLayer']"
    assert f"ours DistributedType.FSDP bf16 {blocks} True" in lines, out
    assert "trainer 2 bf16 16 steps" in lines, out
    names = {path.name for path in Path("checkpoint").iterdir()}
    assert {"pytorch_model_fsdp_0", "optimizer_0", "notebook_accel.json"} <= names
