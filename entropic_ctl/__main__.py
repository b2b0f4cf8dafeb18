"""``python -m entropic_ctl`` is the command line."""

from entropic_ctl.cli import main

if __name__ == "__main__":
    main()
