"""Tests of the package; a package of its own, because some libraries install one that is called `tests`, too."""
