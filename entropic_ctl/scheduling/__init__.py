"""Macro policies, one file each: who runs next. See :mod:`entropic_ctl.scheduling.base`."""
