"""The console both commands print to: as wide as the terminal, or as ``$COLUMNS`` says where there is none."""

import os
import sys

from rich.console import Console

_PIPED_WIDTH = 120  # of output that goes to a file or another program, unless $COLUMNS says otherwise


def stdout_console() -> Console:
    """Standard output without rich's own highlighting and emoji."""
    return Console(width=None if sys.stdout.isatty() else _piped_width(), highlight=False, emoji=False)


def _piped_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) > 0 else _PIPED_WIDTH
