"""`python -m raydpfl` is the `raydpfl` command."""

import sys

from raydpfl import interrupts


def main() -> None:
    """As `raydpfl.cli.main`, with Ctrl-C taken while that is imported too."""
    with interrupts.handled():
        try:
            from raydpfl import cli

            interrupts.check()
        except (Exception, KeyboardInterrupt):
            if not interrupts.asked():
                raise
            print("raydpfl: interrupted", file=sys.stderr)
            sys.exit(130)
        cli.main()


if __name__ == "__main__":
    main()
