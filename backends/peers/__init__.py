"""Other engines, each run by its own interpreter: these scripts use the standard library and that engine, nothing else.

A script is started with the interpreter of the peers' environment (``make bench-peers``) and then obeys one command per
line; see :mod:`backends.peers.protocol`.
"""
