"""``python -m entropic_ctl`` and ``entropic`` are the command line; Ctrl-C gives one line, imports included."""

import sys


def main() -> None:
    """Run the command line; never returns normally (``SystemExit`` carries the status)."""
    try:
        from entropic_ctl.cli import main as run

        run()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("entropic: interrupted\n")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
