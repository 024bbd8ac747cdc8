"""Programs people run: python -m experiments.NAME. No other folder imports from here."""
