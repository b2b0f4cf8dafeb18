"""The paper's claims as runnable experiments, each with a verdict."""
