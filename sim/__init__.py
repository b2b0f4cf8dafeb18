"""A discrete-event simulator (SimPy) that runs the real control plane against modelled costs and recorded entropies."""
