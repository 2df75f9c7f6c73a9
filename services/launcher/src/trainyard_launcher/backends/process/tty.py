"""Runs a command with its standard input as the controlling terminal: `python -I -S tty.py COMMAND...`.

A process of its own, because between fork and exec of a process with threads nothing may be done safely.
"""

import fcntl
import os
import sys
import termios

if __name__ == "__main__":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.execvp(sys.argv[1], sys.argv[1:])
