"""A program that tries the collectives; it fails where something is wrong."""

from notebook_accel.utils.testing_trials import try_operations as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
