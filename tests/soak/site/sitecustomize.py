"""Every Python of a soak: on SIGUSR1 it writes the stacks of its threads to the file that NA_SOAK_STACKS names."""

import faulthandler
import os
import signal

if "NA_SOAK_STACKS" in os.environ:
    stacks = os.open(os.environ["NA_SOAK_STACKS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
