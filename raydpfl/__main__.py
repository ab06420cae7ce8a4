"""`python -m raydpfl` is the `raydpfl` command."""

import os
import sys

from raydpfl.core import signals


def main() -> None:
    """As `raydpfl.cli.app.main`, with Ctrl-C taken while that is imported too."""
    try:
        os.getcwd()
    except FileNotFoundError:  # which would end numpy's import without a word of it
        print("raydpfl: the working directory is gone", file=sys.stderr)
        sys.exit(2)
    with signals.handle_signals():
        try:
            from raydpfl.cli import app

            signals.check()
        except (Exception, KeyboardInterrupt):
            if not signals.is_stop_requested():
                raise
            print("raydpfl: interrupted", file=sys.stderr)
            sys.exit(130)
        app.main()


if __name__ == "__main__":
    main()
