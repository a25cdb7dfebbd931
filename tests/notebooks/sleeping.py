"""A cell that sleeps, for tests that interrupt it: it says so once nothing but the sleep is running."""

from __future__ import annotations

import sys
import threading
import time


def sleep_and_tell(seconds: float) -> None:
    """Sleep, and print "go" meanwhile, from another thread.

    An interrupt that comes between two statements of a cell can find IPython at an instruction without a line
    number; it then shows an AssertionError of its own, and the cell ends without an error.
    """
    main = threading.get_ident()
    frame = sys._getframe()
    line = 0

    def tell() -> None:
        while sys._current_frames().get(main) is not frame or frame.f_lineno != line:
            time.sleep(0.01)
        print("go", flush=True)

    threading.Thread(target=tell).start()
    line = frame.f_lineno + 1
    time.sleep(seconds)
