"""A program that shares out data, draws random numbers and trains; it fails where something is wrong."""

from notebook_accel.utils.testing_trials import try_script as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
