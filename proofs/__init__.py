"""Stability certificates: search proposes, check disposes."""
