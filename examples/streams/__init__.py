"""The recipes of docs/spark-cookbook.md. `python examples/cookbook.py` runs them."""
