"""A program that tries `no_sync` and `accumulate`; it fails where something is wrong."""

from notebook_accel.utils.testing_trials import try_gradient_sync as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
