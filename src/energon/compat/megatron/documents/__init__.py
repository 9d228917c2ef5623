"""YAML documents as programs read them: parse, load, and the datasets and nodes behind them."""
