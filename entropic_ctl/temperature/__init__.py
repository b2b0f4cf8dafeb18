"""Micro laws, one file each: how random the next token is. See :mod:`entropic_ctl.temperature.base`."""
