"""Stands in for the CUDA libraries of a torch build: torch_xla needs that build, its CPU part none of them.

`python cuda_stubs.py SITE-PACKAGES` makes, beside torch's own libraries, small ones with the names that they ask for,
where every call answers "there is no device". A call for an error's text gets one.
It needs a C compiler, `nm` and `readelf`; the real libraries are 4 GB.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

_LIBRARY = re.compile(r"lib(cu|nccl|nv)\w*\.so(\.\d+)*")
_UNVERSIONED = {
    "libcufile": "cuFile",
    "libcurand": "curand",
    "libcusparseLt": "cusparseLt",
    "libnccl": "nccl",
    "libnvshmem_host": "nvshmem",
}
_GIVEN_TEXTS = re.compile(
    r"cuGetError(String|Name)|cuptiGetResultString"
)  # they set a pointer that they are given
_TEXTS = re.compile(
    r"(cu|nccl)\w*Get\w*(String|ErrorName)"
)  # calls that return a pointer, which their callers follow
_NO_DEVICE = 100  # cudaErrorNoDevice; other libraries have no success of this number either


def main(site: str) -> None:
    """Make the libraries."""
    folder = Path(site) / "torch" / "lib"
    own = sorted(folder.glob("*.so*"))
    missing = {name for path in own for name in needed(path)} - {path.name for path in own}
    versions = {
        version: library for path in own for version, library in versioned(path) if library in missing
    }
    symbols: dict[str, set[str]] = defaultdict(set)
    for name, version in (found for path in own for found in undefined(path)):
        library = versions.get(version) or of_prefix(name, missing)
        if library:
            symbols[library].add(name)
    for library in sorted(missing):
        nodes = [version for version, of in versions.items() if of == library]
        make(folder / library, sorted(symbols[library]), nodes[0] if nodes else library)
    print(f"{len(missing)} stubs of CUDA libraries in {folder}")


def needed(path: Path) -> set[str]:
    """Return the names of CUDA libraries that a library needs."""
    text = output("readelf", "--dynamic", "--wide", str(path))
    return {name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", text) if _LIBRARY.fullmatch(name)}


def versioned(path: Path) -> list[tuple[str, str]]:
    """Return the versions that a library asks for, each with the library that has to have it."""
    text = output("readelf", "--version-info", "--wide", str(path))
    parts = re.split(r"  File: ", text)[1:]
    return [(name, part.split()[0]) for part in parts for name in re.findall(r" Name: (\S+)", part)]


def undefined(path: Path) -> set[tuple[str, str]]:
    """Return what a library finds elsewhere, each with its version, empty without."""
    words = [
        line.split()[-1] for line in output("nm", "--dynamic", "--undefined-only", str(path)).splitlines()
    ]
    return {(name, version.lstrip("@")) for name, _, version in (word.partition("@") for word in words)}


def of_prefix(name: str, libraries: set[str]) -> str:
    """Return the library that a symbol without version is of, by its first letters; empty where it is none."""
    found = (stem for stem, prefix in _UNVERSIONED.items() if name.startswith(prefix))
    stem = next(found, None)
    return next((library for library in libraries if stem and library.startswith(f"{stem}.so")), "")


def make(path: Path, names: list[str], version: str) -> None:
    """Compile a library that has these symbols, in this version."""
    versions = path.with_suffix(".map")
    versions.write_text(f"{version} {{ global: *; }};\n")
    text, number = (
        'const char *{}(void) {{ return "no device"; }}\n',
        f"int {{}}(void) {{{{ return {_NO_DEVICE}; }}}}\n",
    )
    given = 'int {}(int error, const char **text) {{ *text = "no device"; return 0; }}\n'
    code = "".join(
        (given if _GIVEN_TEXTS.fullmatch(name) else text if _TEXTS.fullmatch(name) else number).format(name)
        for name in names
    )
    options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{path.name}", f"-Wl,--version-script,{versions}"]
    subprocess.run(["cc", *options, "-x", "c", "-", "-o", str(path)], input=code, text=True, check=True)
    versions.unlink()


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(sys.argv[1])
