"""Drawing from result tables; nothing is computed here."""
