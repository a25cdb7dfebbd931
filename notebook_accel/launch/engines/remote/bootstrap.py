"""What a Python on a host runs first, as the text of this file: any Python 3 understands it, and says which it is."""

import base64
import json
import os
import sys
from typing import Any


def say(out: int, nonce: str, facts: "dict[str, Any]") -> None:
    """Tell the notebook what is known of this environment; the mark tells our lines from those of a login shell."""
    os.write(out, ("\nnotebook_accel:" + nonce + ":" + json.dumps(facts) + "\n").encode())


def find_version(name: str) -> str:
    """Return the version of an installed package, empty where it is none."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def begin(settings: "dict[str, Any]") -> int:
    """Say what this environment is, and become the agent where it is the right one; return the exit code."""
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no frame
    version = "{}.{}.{}".format(*sys.version_info[:3])
    facts = {"python": version, "executable": sys.executable}  # type: dict[str, Any]
    nonce = settings["nonce"]
    if version.rpartition(".")[0] != settings["python"]:
        say(out, nonce, facts)
        return 1
    sys.path[:] = [place for place in sys.path if place]  # the home folder may have modules of any name
    folder = settings["folder"]
    if folder and os.path.isdir(os.path.join(folder, "notebook_accel")) and folder not in sys.path:
        sys.path.insert(0, folder)
    from importlib import util

    for name in ("notebook_accel", "torch"):
        if util.find_spec(name) is None:
            facts["missing"] = name
            say(out, nonce, facts)
            return 97
    try:
        from notebook_accel.launch.engines.remote import agent
    except Exception as error:
        facts["error"] = type(error).__name__ + ": " + str(error)
        say(out, nonce, facts)
        return 1
    facts.update(agent.describe(), torch=find_version("torch"), ready=True)
    facts["notebook_accel"] = find_version("notebook-accel")
    say(out, nonce, facts)
    return agent.main(out, settings["with_ipython"], settings["variable"], settings["warm"], settings["lock"])


if __name__ == "__main__":
    sys.exit(begin(json.loads(base64.b64decode(sys.argv[1]).decode())))
