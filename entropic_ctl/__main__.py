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
    finally:
        # CPython dies of SIGINT at its end, whatever the status, if an interrupt left code compiled from a string (as
        # dataclasses do on import); running such code to its end takes that back.
        exec("")  # noqa: S102


if __name__ == "__main__":
    main()
