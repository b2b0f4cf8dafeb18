"""Meso laws, one file each: theta, the information-loss budget per step. See :mod:`entropic_ctl.pruning.base`."""
