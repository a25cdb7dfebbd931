"""A program that loads a Mixtral with the hub's names; prints its peaks of memory as JSON.

python -m tests.unit.big_modeling.converting FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers.conversion_mapping  # what its import takes is not counted
from transformers import MixtralConfig, MixtralForCausalLM

from notebook_accel import init_empty_weights, load_checkpoint_and_dispatch
from tests.unit.big_modeling.measured import free_at_once, peak_above, reset_peak


def main(folder: Path) -> dict[str, int]:
    free_at_once()
    config = MixtralConfig.from_pretrained(folder / "config")
    transformers.conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    found = {}
    for place in ("disk", "cpu"):
        with init_empty_weights():
            model = MixtralForCausalLM(config)
        before = reset_peak()
        load_checkpoint_and_dispatch(model, folder / "m", {"": place}, offload_folder=folder / "off")
        found[place] = peak_above(before)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
